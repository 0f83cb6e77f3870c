"""Engines and desks are killed at every point; the run goes on, every sample is trained on once,
and the result is that of an undisturbed run, bit for bit."""
from jobs import *

whole = work / "whole"
check(run(whole).returncode == 0, "the undisturbed run")

faults = ["engine:0:claimed:1:kill", "engine:1:claimed:3:kill", "engine:0:generated:3:kill",
          "engine:1:generated:3:kill", "engine:0:committed:3:kill", "engine:0:updating:2:kill",
          "engine:1:updating:3:kill", "engine:0:updated:3:kill", "engine:1:updated:0:kill",
          "engine:0:claimed:0:kill", "engine:0:generated:6:exit",
          "desk:0:claimed:3:kill", "desk:0:inserted:3:kill", "desk:0:sealed:3:kill",
          "desk:0:inserted:0:kill", "desk:0:finished:3:kill", "desk:0:finished:4:kill",
          "desk:0:cleared:3:kill", "desk:0:rewarded:3:kill", "desk:0:scored:3:kill",
          "desk:0:committed:3:kill", "desk:0:finished:6:kill", "desk:0:scored:6:kill",
          "engine:0:generated:2:kill,desk:0:rewarded:4:kill"]
faults = [f for f in faults if not (f.startswith("engine:1:claimed"))]
for number, fault in enumerate(some(faults)):
    folder = work / f"killed-{number}"
    done = run(folder, fault=fault)
    check(done.returncode == 0, f"{fault}: exit status {done.returncode}: {done.stderr}")
    check("anew" in done.stdout, f"{fault}: nothing was restarted: {done.stdout}")
    check([row["samples"] for row in rows(folder)] == [0] + [16] * 6, f"{fault}: samples")
    check_same_run(whole, folder, fault)

# A role that dies again and again ends the run, and says why.
folder = work / "hopeless"
done = run(folder, "--set", "limits.restarts=3", fault="engine:0:claimed:2:exit!")
check(done.returncode == 1 and "engine died 3 times in a row" in done.stderr, f"{done.stderr}")
folder = work / "refused"
done = run(folder, "--set", "limits.restarts=2", "--set", "reward.rule=command", "--set",
           "reward.command=read -r x; echo nonsense")
check(done.returncode == 1 and "expected a number a line, found 'nonsense'" in done.stderr,
      f"a bad reward command: {done.stderr}")

# Something that hangs is noticed.
folder = work / "hanging"
done = run(folder, "--set", "limits.wait_seconds=3", fault="engine:0:claimed:2:stop")
check(done.returncode == 0 and "engine rank 0 has been stopped for" in done.stdout and
      "and holds 4 rows of rollout: starting engine anew" in done.stdout,
      f"hanging: {done.returncode} {done.stdout}{done.stderr}")
check_same_run(whole, folder, "hanging")

# The coordinator's death ends the run; it can be resumed.
folder = work / "coordinator"
process = start(folder, json_lines=True)
for line in process.stdout:
    if '"event":"step","step":2' in line:
        break
for pid, line in processes_of(folder):
    if "--coordinator" in line:
        os.kill(pid, signal.SIGKILL)
out, err = process.communicate(timeout=PATIENCE)
check_nothing_left(folder, sockets=False)
if process.returncode != 0:  # else it had finished already
    check("coordinator" in err and "--resume" in err, f"coordinator killed: {err}")
check(run(folder, resume=True).returncode == 0, "coordinator killed, resumed")
check_same_run(whole, folder, "coordinator killed")
finish()
