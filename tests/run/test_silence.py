"""Who falls silent is named, with what it holds, and keeps the others waiting no longer than
limits.wait_seconds allows; who does not need it does not wait at all."""
from hanging import *

SCHEDULES = {"sync": [], "one_step_async": ["--set", "schedule=one_step_async"]}


def is_stopped(pid):
    try:
        return "T (stopped)" in pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended meanwhile
        return False


# Hang at weight sync (verl #3895, AReaL #1439): a rank of an engine stops in the middle of an update, a rank
# of the trainer when it has published. The first is started anew; the second ends the run, which goes on.
def stopped(name, fault, setting=()):
    """The run, and how long it took."""
    begun = time.monotonic()
    return run(work / name, *setting, *WAIT, fault=fault), time.monotonic() - begun


def run_fresh():
    return run(work / "fresh", "--set", "schedule=rolling", *ENGINES, "--set", "fresh_share=1",
               fault="engine.0:0:claimed:3:kill,engine.1:0:claimed:3:kill")


ENGINES = ["--set", "roles.engine.instances=2", "--set", "roles.engine.ranks=1"]
*readers, writer, grader, fresh = beside_each_other(
    *[(stopped, f"reader-{schedule}", "engine:1:updating:3:stop", setting) for schedule, setting in SCHEDULES.items()],
    (stopped, "writer", "trainer:1:after_publish:3:stop"),
    (own, "grader", "role.epoch > 1 or time.sleep(1e6)", *WAIT),
    (run_fresh,))
for schedule, (done, took) in zip(SCHEDULES, readers):
    check(done.returncode == 0 and "engine rank 1 has been stopped for" in done.stdout,
          f"{schedule}, a reader: {done.stdout}{done.stderr}")
    check(took < 4 * PATIENT, f"{schedule}, a reader: {took:.1f} s")
done, took = writer
folder = work / "writer"
check(done.returncode == 1 and "trainer rank 1 has been stopped for" in done.stderr and
      f"dray run --resume {folder}" in done.stderr, f"a writer: {done.stdout}{done.stderr}")
check(took < 4 * PATIENT, f"a writer: {took:.1f} s")
check(run(folder, resume=True).returncode == 0, "a writer, resumed")

# An engine that is started anew, and whose first samples must be of the newest version, takes that one.
check(fresh.returncode == 0 and "anew" in fresh.stdout, f"fresh: {fresh.stdout}{fresh.stderr}")
seconds = [row["step_seconds"] for row in rows(work / "fresh")]
check(max(seconds) < 5 * PATIENT / 3, f"fresh: steps of {seconds} s")

# A role that hangs, and uses no CPU, is named with what it holds, and ended when nothing in the run has moved: a grader
# of one's own is started anew, and its row goes on.
done, took = grader
told = done.stdout + done.stderr
check(done.returncode == 0 and "grader rank 0 has used no CPU for" in told and
      "rows of reward: it hangs, or waits for a device or a server" in told and
      "rows of reward, while nothing moved (limits.wait_seconds): starting grader anew" in told, f"a grader: {told}")
check(all(row["samples"] == 16 for row in rows(work / "grader")[1:]), "a grader: samples were lost")

# One silent worker blocks all (SkyRL #1173): one of two engines stops when it has made its samples, the other one
# makes all that come behind; nobody waits until it is judged. (One that reads weights, or holds samples, is waited
# for until then: above.)
folder = work / "worker"
process = start(folder, *ENGINES, "--set", f"limits.wait_seconds={20 * PATIENT}", json_lines=True,
                fault=",".join(f"engine.1:0:committed:{step}:stop" for step in range(1, 6)))
begun = time.monotonic()
seen = any('"event":"step","step":6,' in line for line in process.stdout)
took = time.monotonic() - begun
stopped = [line for pid, line in processes_of(folder) if "role engine" in line and is_stopped(pid)]
process.kill()
process.communicate(timeout=PATIENCE)
check_nothing_left(folder, sockets=False)
check(seen and took < 2 * PATIENT, f"a worker: {took:.1f} s")
check(len(stopped) == 1, "a worker: nobody was stopped")
finish()
