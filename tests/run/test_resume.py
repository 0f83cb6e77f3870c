"""The trainer is killed at every point of a step, then the run resumed: it ends bit-identical to an
undisturbed one. Ctrl-C likewise."""
import importlib.util

from jobs import *

whole = work / "whole"
check(run(whole).returncode == 0, "the undisturbed run")

faults = ["trainer:0:after_backward:3:kill", "trainer:1:after_step:3:kill",
          "trainer:0:after_step:5:kill", "trainer:0:after_publish:3:kill",
          "trainer:1:after_publish:4:kill", "trainer:0:after_commit:4:kill",
          "trainer:0:in_checkpoint:4:kill", "trainer:1:in_checkpoint:4:kill",
          "trainer:0:after_checkpoint:4:kill", "trainer:0:after_checkpoint:6:kill",
          "trainer:0:after_publish:6:kill", "trainer:0:in_checkpoint:0:kill",
          "trainer:0:checkpoint_named:4:kill", "trainer:0:checkpoint_named:0:kill",
          "trainer:1:after_commit:3:exit"]
for number, fault in enumerate(some(faults)):
    folder = work / f"killed-{number}"
    done = run(folder, fault=fault)
    check(done.returncode == 1, f"{fault}: exit status {done.returncode}")
    check("trainer rank" in done.stderr and f"dray run --resume {folder}" in done.stderr,
          f"{fault}: {done.stderr}")
    done = run(folder, resume=True)
    check(done.returncode == 0, f"{fault}, resumed: {done.stderr}")
    check_same_run(whole, folder, fault)

# Twice in one run, and resuming what is finished changes nothing.
folder = work / "twice"
check(run(folder, fault="trainer:0:after_step:3:kill").returncode == 1, "twice: first")
check(run(folder, resume=True, fault="trainer:0:after_step:5:kill").returncode == 1,
      "twice: second")
check(run(folder, resume=True).returncode == 0, "twice: end")
check_same_run(whole, folder, "killed twice")
check(run(folder, resume=True).returncode == 0, "resume of a finished run")
check_same_run(whole, folder, "resumed when finished")
# With fewer steps than are done it is refused, and nothing is changed.
config = (folder / "config.yaml").read_text()
(folder / "config.yaml").write_text(config.replace("steps: 6\n", "steps: 2\n", 1))
done = run(folder, resume=True)
check(done.returncode != 0 and "steps: expected 6 or more, which the run has done, found 2" in done.stderr,
      f"fewer steps: {done.returncode}: {done.stdout}{done.stderr}")
(folder / "config.yaml").write_text(config)
check_same_run(whole, folder, "refused with fewer steps")
# Each resume keeps the timeline that was there, and begins a new one.
timelines = [json.loads((folder / f"trace{n}.json").read_text()) for n in ("-1", "-2", "-3", "")]
steps = [{e.get("args", {}).get("step") for e in t["traceEvents"]} for t in timelines]
check(6 in steps[2] and not steps[3] & {1, 2, 3, 4, 5}, f"timelines: {steps}")

# Asked to leave before anything of step 4 is trained, and when samples of it are, or one of its two optimiser steps
# is made: then there is no checkpoint of step 3, which would have a part of step 4. (Samples that a journal has need no
# weights.)
TIMES.add("update_bytes")
for point in ("claimed", "after_backward", "after_step"):
    folder = work / f"left-{point}"
    leave(folder, "--set", "queue.durability=journal", fault=f"trainer:0:{point}:4:stop")
    check(checkpoint(folder, 3).is_dir() == (point == "claimed"), f"left {point}: the checkpoint of step 3")
    done = run(folder, resume=True)
    check(done.returncode == 0, f"left {point}, resumed: {done.stderr}")
    check_same_run(whole, folder, f"left {point}")
TIMES.remove("update_bytes")

# metrics.jsonl with a torn last line, and rows of steps that are done again.
folder = work / "torn"
check(run(folder, fault="trainer:0:after_step:4:kill").returncode == 1, "torn")
with open(folder / "metrics.jsonl", "a") as file:
    file.write('{"step": 4, "rew')
check(run(folder, resume=True).returncode == 0, "torn, resumed")
check_same_run(whole, folder, "torn line")

# Checkpoints to which no link leads are left in place.
os.rename(folder / "checkpoints/latest", work / "link")
done = run(folder, resume=True)
check(done.returncode != 0 and "leads to none" in done.stderr, f"no link: {done.returncode}: {done.stderr}")
os.rename(work / "link", folder / "checkpoints/latest")
check(run(folder, resume=True).returncode == 0, "the link is back")
check_same_run(whole, folder, "no link")


def wait_for_step(process, step):
    for line in process.stdout:
        if f'"event":"step","step":{step}' in line:
            return


# Ctrl-C: ends after the step, with a checkpoint; SIGTERM is the same.
for number, sent in enumerate((signal.SIGINT, signal.SIGTERM)):
    folder = work / f"stopped-{number}"
    process = start(folder, json_lines=True)
    wait_for_step(process, 1 + number)
    process.send_signal(sent)
    out, err = process.communicate(timeout=PATIENCE)
    check_nothing_left(folder)
    last = rows(folder)[-1]["step"]
    check(process.returncode in (130, 0), f"stopped: status {process.returncode}: {err}")
    check(checkpoint(folder, last).is_dir(), f"stopped: no checkpoint {last}")
    check(run(folder, resume=True).returncode == 0, "stopped, resumed")
    check_same_run(whole, folder, "stopped and resumed") if last % 2 == 0 else None
    check(lasting(whole) == lasting(folder), "stopped and resumed: metrics")

# Twice: at once. And a supervisor that is killed takes everything with it.
folder = work / "interrupted"
process = start(folder, json_lines=True, fault="trainer:0:after_step:3:stop")
wait_for_step(process, 2)
time.sleep(1)  # the trainer stands still in step 3 by then
process.send_signal(signal.SIGINT)
time.sleep(0.3)
process.send_signal(signal.SIGINT)
out, err = process.communicate(timeout=PATIENCE)
check(process.returncode == 130 and "at once" in err, f"twice: {process.returncode} {err}")
check_nothing_left(folder)
check(run(folder, resume=True).returncode == 0, "interrupted, resumed")
check_same_run(whole, folder, "interrupted twice")

folder = work / "orphaned"
process = start(folder, json_lines=True, fault="trainer:0:after_step:3:stop")
wait_for_step(process, 2)
busy = subprocess.run(command(folder, resume=True), capture_output=True, text=True)
check(busy.returncode == 1 and "a run is going on there" in busy.stderr, f"busy: {busy.stderr}")
process.kill()
process.communicate(timeout=PATIENCE)
check_nothing_left(folder, sockets=False)
check(run(folder, resume=True).returncode == 0, "orphaned, resumed")
check_same_run(whole, folder, "killed supervisor")

# Rows that a killed supervisor held back are of steps that are made again.
folder = work / "held"
check(run(folder, fault="trainer:0:after_step:3:kill").returncode == 1, "held")
(folder / ".metrics.pending").write_text("".join(json.dumps({"step": n, "reward_mean": 9}) + "\n" for n in (3, 4)))
process = start(folder, json_lines=True, resume=True, fault="trainer:0:after_step:3:stop")
check('"event":"start"' in process.stdout.readline(), "held, resumed")
check(not (folder / ".metrics.pending").exists(), "rows of an earlier life are left")
process.kill()
process.communicate(timeout=PATIENCE)
check_nothing_left(folder, sockets=False)

# A trainer in Python that dies twice before its second checkpoint: the first one is written once.
if importlib.util.find_spec("torch"):
    from tiny_python import job_with
    job = job_with("rollout", """
with dray.Role() as role:
    for batch in role.batches():
        answer(batch, max(0, int(batch.tag("step")[0]) - 1))
""")
    folder = work / "python"
    small = words(("steps=2", "reference.enabled=false", "actor.old_log_prob=rollout", "eval.every=0",
                   "limits.wait_seconds=40"))
    for again in (False, True):
        done = run(folder, *(() if again else small), job=job, resume=again, environment={"KILL": "1"})
        check(done.returncode == 1 and checkpoint(folder, 0).is_dir(), f"python, {again}: {done.stderr}")
    done = run(folder, resume=True)
    check(done.returncode == 0 and checkpoint(folder, 0).is_dir(), f"python, resumed twice: {done.stderr}")
finish()
