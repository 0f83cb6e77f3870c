"""Roles whose `devices` overlap take turns, under any schedule: what they compute never overlaps, and is the
same to the bit as that of roles that do not share; a holder that dies or is stopped keeps nobody from it."""
from shared import *

SHARED = devices(engine="cpu:0", trainer="cpu:0")
WARM = ("--set", "warmup.max_steps=3", "--set", "warmup.reward=0")

for schedule in ("sync", "one_step_async"):
    how = ("--set", f"schedule={schedule}", *WARM)
    apart, shared = work / f"{schedule}-apart", work / f"{schedule}-shared"
    done = run(apart, *how)
    check(done.returncode == 0, f"{schedule}: {done.stderr}")
    done = run(shared, *how, *SHARED)
    check(done.returncode == 0, f"{schedule}, shared: {done.stderr}")
    check_same_run(apart, shared, schedule)
    check_turns(shared, "engine", "trainer")
# Without turns trainer and engine compute at the same time: the check above can fail.
check(overlaps(work / "one_step_async-apart", "engine", "trainer"), "one_step_async: nothing overlaps")

# All of them; rows of several steps under way at once, and cut.
everyone = devices(engine="cpu:0", trainer="cpu:0", desk="cpu:0")
folder = work / "everyone"
done = run(folder, *everyone, *WARM)
check(done.returncode == 0, f"everyone: {done.stderr}")
check_same_run(work / "sync-apart", folder, "everyone")
check_turns(folder, "engine", "trainer", "desk")
folder = work / "continuous"
done = run(folder, *SHARED, "--set", "schedule=one_step_async", "--set", "rollout.batching=continuous",
           "--set", "rollout.partial_tokens=2")
check(done.returncode == 0, f"continuous: {done.stderr}")
check_turns(folder, "engine", "trainer")

# The holder dies in the middle of its turn, with rows in its hands.
fault = "engine:1:generated:3:kill"
folder = work / "killed"
done = run(folder, *SHARED, *WARM, "--set", "schedule=one_step_async", fault=fault)
check(done.returncode == 0 and "anew" in done.stdout, f"{fault}: {done.stdout} {done.stderr}")
check_same_run(work / "one_step_async-apart", folder, fault)

# It is stopped in the middle of its turn: it is killed, and the others go on.
folder = work / "stopped"
fault = "engine:0:generated:3:stop"
done = run(folder, *SHARED, *WARM, "--set", "schedule=one_step_async", "--set", "limits.wait_seconds=2", fault=fault)
check(done.returncode == 0 and "has been stopped" in done.stdout and
      "the lease engine+trainer/cpu:0" in done.stdout, f"{fault}: {done.stdout} {done.stderr}")
check_same_run(work / "one_step_async-apart", folder, fault)

# Stopped while it takes weights, with rows under way that go on with those, it has no turn. Before some of the
# versions it has begun no rows: so there are several runs.
for first in (1, 2, 3):
    folder = work / f"updating-{first}"
    fault = ",".join(f"engine:0:updating:{version}:stop" for version in range(first, 6))
    done = run(folder, *SHARED, "--set", "schedule=async", "--set", "staleness=2", "--set", "rollout.batching=continuous", "--set",
               "update=in_flight", "--set", "rollout.max_new_tokens=20", "--set", "limits.wait_seconds=2", fault=fault)
    check(done.returncode == 0 and "has been stopped" in done.stdout and "engine+trainer" not in done.stdout,
          f"{fault}: {done.stdout} {done.stderr}")
finish()
