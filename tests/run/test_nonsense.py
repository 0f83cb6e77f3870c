"""Roles of one's own that write columns in another form than the built-in ones read: the run ends, and says so."""
import importlib.util

from jobs import *

if not importlib.util.find_spec("numpy"):
    print("numpy is missing")
    shutil.rmtree(work)
    sys.exit(77)

os.environ["PYTHONPATH"] = os.environ["DRAY_SOURCE_DIR"] + "/python"
ROLES = """
roles:
  - {name: engine, tasks: [rollout, eval]}
  - {name: trainer, tasks: [old_log_prob, actor]}
  - {name: grader, tasks: [reward], command: exec %s grade.py}
  - {name: desk, tasks: [driver, reference, advantage]}
""" % sys.executable
job_file.write_text(TINY + ROLES)
# WIDE: how many numbers a row the column `rewards` gets.
(work / "grade.py").write_text("""
import os
import dray, numpy

with dray.Role() as role:
    for batch in role.batches():
        batch.set("reward", (batch.slots % 2).astype(numpy.float32))
        batch.set("rewards", numpy.ones((batch.rows, int(os.environ["WIDE"])), numpy.float32))
""")
both = "rewards=[{name: right}, {name: half, weight: 0.5}]"
for wide, right in (("2", True), ("1", False), ("3", False)):
    folder = work / f"wide-{wide}"
    done = run(folder, "--set", "steps=1", "--set", both, environment={"WIDE": wide})
    said = "" if right else f"column rewards: expected 2 numbers a row, found {wide}"
    check(not right or rows(folder)[1]["rewards"] == {"right": 1, "half": 1}, f"wide {wide}: {rows(folder)[-1]}")
    check((done.returncode == 0) == right and said in done.stderr, f"wide {wide}: {done.returncode}: {done.stderr}")

# Rewards that are finite, with a sum that is not.
job_file.write_text(TINY)
done = run(work / "huge", *words((
    "rewards=[{name: one, rule: command, command: 'while read -r line; do echo 3e38; done', weight: 1e6}]",
    "steps=1", "limits.restarts=2")))
check(done.returncode == 1 and "rewards: expected a sum" in done.stderr, f"huge: {done.returncode}: {done.stderr}")

# Prompts as text, which a driver and a rollout of one's own may hand each other, but not the built-in grader.
job_file.write_text(TINY + """
roles:
  - {name: world, tasks: [driver, rollout, eval, actor], command: exec %s world.py}
  - {name: desk, tasks: [reward, advantage]}
""" % sys.executable)
(work / "world.py").write_text("""
import dray, numpy

with dray.Role() as role:
    role.queue.insert({"prompt": ["1+1="] * 4, "answer": ["2"] * 4}, "step-000001", rows=16, group_size=4,
                      once_per_group=True, tags={"step": 1}, seal=True)
    for batch in role.batches(["rollout", "actor"]):
        if batch.task == "actor":
            role.queue.end()
            continue
        batch.set("response", [numpy.full(2, 5, numpy.int32)] * batch.rows)
        batch.set("rollout_log_prob", [numpy.full(2, -1, numpy.float32)] * batch.rows)
        batch.set("response_version", [numpy.full(2, 0, numpy.int32)] * batch.rows)
        batch.set_tag("version", [0] * batch.rows)
""")
done = run(work / "text", *words(("steps=1", "reference.enabled=false", "actor.old_log_prob=rollout",
                                  "queue.on_loss=end", "limits.restarts=2", "limits.wait_seconds=20")))
said = "column prompt: expected I32, found U8"
check(done.returncode == 1 and said in done.stderr, f"text: {done.returncode}: {done.stderr}")
finish()
