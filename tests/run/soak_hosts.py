"""A run over three hosts (network namespaces, shaped links) in which a link is down for 20 s, a host goes for ever and
one is added: no step has other samples than it should, none is trained twice, nobody hangs; and a gang of trainers over
two hosts, one of which goes: the run ends, says so, and goes on with --resume."""
from netspaces import *

make_spaces(4)
BATCH = 16
ROLES = """
roles:
  - {name: engine, tasks: [rollout, eval], instances: 3, local: 1}
  - {name: trainer, tasks: [old_log_prob, actor]}
  - {name: desk, tasks: [driver, reference, advantage]}
  - {name: grader, tasks: [reward], instances: 2, local: 0}
"""


def job_of(name, steps, more=""):
    job = work / f"{name}.yaml"
    job.write_text(TINY.replace("steps: 6", f"steps: {steps}") + f"""
listen: tcp:{NET}.1:{PORT}
clock: {{enabled: true, token_seconds: 0.01, tokens: 3, train_seconds: 1e-4}}
""" + more + ROLES)
    return job


def disturbed(name, schedule, steps):
    """A link that is down for 20 s, then a host that is gone for ever, then one more."""
    folder, job = work / name, job_of(name, steps, schedule)
    process = begin(folder, job)
    # Graders on one host, engines on two.
    graders = join(1, folder, job, "grader:2", token="task")
    engine = join(2, folder, job, "engine:1", "--wait", "60")
    lost = join(3, folder, job, "engine:1")
    reached(process, 5)
    link_set(2, "down")
    time.sleep(20)
    link_set(2, "up")
    check(wait_for(process, lambda e: e["event"] == "host" and "host2" in e["message"] and "gone" in e["message"], 60),
          f"{name}: the link was not missed")
    check(wait_for(process, lambda e: e["event"] == "host" and "host2" in e["message"] and "joined" in e["message"]
                   and e is not look(process)[0], 60), f"{name}: the host has not come back")
    now = max(e["step"] for e in look(process) if e["event"] == "step")
    reached(process, now + 5)
    link_set(3, "down")  # for ever
    check(wait_for(process, lambda e: e["event"] == "host" and "host3" in e["message"] and "gone" in e["message"], 60),
          f"{name}: the host was not missed")
    reached(process, max(e["step"] for e in look(process) if e["event"] == "step") + 3)
    lost.kill()
    lost.communicate()
    link_set(3, "up")
    added = join(3, folder, job, "engine:1", "--name", "added")
    check(wait_for(process, lambda e: e["event"] == "host" and "added" in e["message"], 60), f"{name}: none was added")
    end(process, name)
    end(graders, f"{name}: graders")
    end(engine, f"{name}: the engine whose link was down")
    end(added, f"{name}: the host that was added")
    check_trained(folder, steps, BATCH, name)
    return [row["reward_mean"] for row in rows(folder)]


disturbed("sync", "schedule: sync\n", 400)
disturbed("async", "schedule: async\n", 700)
finish()
