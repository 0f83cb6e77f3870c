"""one_step_async: the samples of step k are of version max(0, k - 2) exactly, whatever happens. Two runs
are bit-identical, and so is one whose engine, desk or trainer is killed at any point, or that is stopped
and goes on: an engine that is started anew gets a version again that the trainer has left behind."""
from jobs import *

SCHEDULE = ("--set", "schedule=one_step_async")
whole = work / "whole"
done = run(whole, *SCHEDULE)
check(done.returncode == 0, f"the undisturbed run: {done.stderr}")
for row in rows(whole):
    step = row["step"]
    version = max(0, step - 2)
    check(row["weight_version"] == row["weight_version_min"] == version, f"version: {row}")
    check(row["staleness_mean"] == row["staleness_max"] == max(0, min(1, step - 1)), f"staleness: {row}")
    check(step not in (0, 3, 6) or row["eval_version"] == step, f"evaluation: {row}")
    check(step == 0 or row["samples"] == 16, f"samples: {row}")
# What the next step's samples are made by goes with the checkpoint.
check(any((checkpoint(whole, 4) / "previous").glob("*.safetensors*")), "the version before step 4's")
sync = work / "sync"
check(run(sync).returncode == 0, "sync")
check(not same_folder(checkpoint(sync, 6), checkpoint(whole, 6)),
      "one_step_async trained what sync trains")

killed = ["engine:0:claimed:3:kill", "engine:1:generated:3:kill", "engine:0:updating:2:kill",
          "engine:1:updated:2:kill", "engine:0:generated:5:exit", "desk:0:inserted:4:kill",
          "desk:0:sealed:4:kill", "desk:0:finished:3:kill", "desk:0:cleared:4:kill",
          "desk:0:scored:3:kill", "engine:0:generated:2:kill,desk:0:rewarded:4:kill"]
for number, fault in enumerate(some(killed)):
    folder = work / f"killed-{number}"
    done = run(folder, *SCHEDULE, fault=fault)
    check(done.returncode == 0, f"{fault}: exit status {done.returncode}: {done.stderr}")
    check("anew" in done.stdout, f"{fault}: nothing was restarted: {done.stdout}")
    check_same_run(whole, folder, fault)

resumed = ["trainer:0:after_backward:3:kill", "trainer:1:after_step:5:kill",
           "trainer:0:in_checkpoint:4:kill", "trainer:0:after_checkpoint:6:kill",
           "trainer:0:after_step:1:kill"]
for number, fault in enumerate(some(resumed)):
    folder = work / f"resumed-{number}"
    check(run(folder, *SCHEDULE, fault=fault).returncode == 1, f"{fault}: it went on")
    done = run(folder, resume=True)
    check(done.returncode == 0, f"{fault}, resumed: {done.stderr}")
    check_same_run(whole, folder, fault)

# With files instead of memory, and with a queue that outlives its coordinator.
for name, setting in (("disk", "weights.mode=disk"), ("journal", "queue.durability=journal"),
                      ("saved", "queue.durability=checkpoint")):
    folder = work / name
    done = run(folder, *SCHEDULE, "--set", setting, fault="trainer:0:after_step:5:kill")
    check(done.returncode == 1, f"{name}: it went on")
    done = run(folder, resume=True, fault="engine:0:updated:4:kill")
    check(done.returncode == 0, f"{name}: {done.stderr}")
    check(name != "disk" or "anew" in done.stdout, f"{name}: nothing was restarted")
    check(same_folder(checkpoint(folder, 6) / "optimizer", checkpoint(whole, 6) / "optimizer"),
          f"{name}: the optimiser's state differs")

# A sample that is lost after the engine has gone on to the next version is made by its own again.
GRADER = """
import json, os, sys
seen = 0
for line in sys.stdin:
    row = json.loads(line)
    seen += 1
    if seen == 20 and not os.path.exists(sys.argv[1]):
        open(sys.argv[1], "w").write(row["prompt"])
    if os.path.exists(sys.argv[1]) and open(sys.argv[1]).read() == row["prompt"]:
        os.kill(os.getpid(), 9)
    print(len(row["response"]) % 2, flush=True)
"""
(work / "grader.py").write_text(GRADER)
folder = work / "lost"
grade = f"{sys.executable} {work / 'grader.py'} {work / 'cursed'}"
done = run(folder, *SCHEDULE, "--set", "reward.rule=command", "--set", f"reward.command={grade}",
           "--set", "queue.max_attempts=2")
log = "".join(p.read_text() for p in (folder / "logs").glob("desk*"))
check(done.returncode == 0 and "replaced by prompt" in log, f"lost: {done.stderr} {log}")
check([row["samples"] for row in rows(folder)[1:]] == [16] * 6, "lost: a step is short of samples")
check([row["weight_version_min"] for row in rows(folder)] == [0, 0, 0, 1, 2, 3, 4], "lost: versions")
finish()
