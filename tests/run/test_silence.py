"""Who falls silent is named, with what it holds, and keeps the others waiting no longer than
limits.wait_seconds allows; who does not need it does not wait at all."""
from jobs import *

PATIENT = 3 * (8 if "asan" in PROGRAM or "tsan" in PROGRAM else 1)
WAIT = ["--set", f"limits.wait_seconds={PATIENT}"]
SCHEDULES = {"sync": [], "one_step_async": ["--set", "schedule=one_step_async"]}

# Hang at weight sync (verl #3895, AReaL #1439): a rank of an engine stops in the middle of an update, a rank
# of the trainer when it has published. The first is started anew; the second ends the run, which goes on.
for schedule, setting in SCHEDULES.items():
    folder = work / f"reader-{schedule}"
    begun = time.monotonic()
    done = run(folder, *setting, *WAIT, fault="engine:1:updating:3:stop")
    check(done.returncode == 0 and "engine rank 1 has been stopped for" in done.stdout,
          f"{schedule}, a reader: {done.stdout}{done.stderr}")
    check(time.monotonic() - begun < 4 * PATIENT, f"{schedule}, a reader: {time.monotonic() - begun:.1f} s")
folder = work / "writer"
begun = time.monotonic()
done = run(folder, *WAIT, fault="trainer:1:after_publish:3:stop")
check(done.returncode == 1 and "trainer rank 1 has been stopped for" in done.stderr and
      f"dray run --resume {folder}" in done.stderr, f"a writer: {done.stdout}{done.stderr}")
check(time.monotonic() - begun < 4 * PATIENT, f"a writer: {time.monotonic() - begun:.1f} s")
check(run(folder, resume=True).returncode == 0, "a writer, resumed")

# An engine that is started anew, and whose first samples must be of the newest version, takes that one.
folder = work / "fresh"
done = run(folder, "--set", "schedule=rolling", "--set", "roles.engine.instances=2", "--set", "roles.engine.ranks=1",
           "--set", "fresh_share=1", fault="engine.0:0:claimed:3:kill,engine.1:0:claimed:3:kill")
check(done.returncode == 0 and "anew" in done.stdout, f"fresh: {done.stdout}{done.stderr}")
seconds = [row["step_seconds"] for row in rows(folder)]
check(max(seconds) < 5 * PATIENT / 3, f"fresh: steps of {seconds} s")

# One silent worker blocks all (SkyRL #1173): one of two engines stops when it has made its samples, the other one
# makes all that come behind; nobody waits until it is judged. (One that reads weights, or holds samples, is waited
# for until then: above.)
folder = work / "worker"
process = start(folder, "--set", "roles.engine.instances=2", "--set", "roles.engine.ranks=1", "--set",
                f"limits.wait_seconds={20 * PATIENT}", json_lines=True,
                fault=",".join(f"engine.1:0:committed:{step}:stop" for step in range(1, 6)))
begun = time.monotonic()
seen = any('"event":"step","step":6,' in line for line in process.stdout)
took = time.monotonic() - begun
stopped = [line for pid, line in processes_of(folder)
           if "role engine" in line and "T (stopped)" in pathlib.Path(f"/proc/{pid}/status").read_text()]
process.kill()
process.communicate(timeout=PATIENCE)
check_nothing_left(folder, sockets=False)
check(seen and took < 2 * PATIENT, f"a worker: {took:.1f} s")
check(len(stopped) == 1, "a worker: nobody was stopped")
finish()
