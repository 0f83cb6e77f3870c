"""Who hangs, in all ways: with the same row each time, while it waits for a server, in a built-in role, with nothing in its
hands. test_silence has the first one."""
from hanging import *

# One that does so each time it gets that row loses it, and the step is made with another.
done, took = own("poison", "numpy.isnan(batch.tag('refill')[list(batch.slots).index(5)]) and time.sleep(1e6)", *WAIT, "--set", "queue.max_attempts=2")
told = done.stdout + done.stderr
check(done.returncode == 0 and told.count("starting grader anew") == 2, f"a poisonous row: {told}")

# What waits for a server, and says so, is not ended; nor is it while others go on.
done, took = own("server", f"[(time.sleep(0.2), role.report('judge')) for _ in range({8 * PATIENT})]", *WAIT)
told = done.stdout + done.stderr
check(done.returncode == 0 and "anew" not in told and took > 1.5 * PATIENT, f"a server: {took:.1f} s: {told}")

# Built-in roles: an engine is started anew; a trainer ends the run, which goes on.
ALONE = ["--set", "roles.engine.ranks=1", "--set", "roles.trainer.ranks=1"]
done = run(work / "engine", *WAIT, *ALONE, fault="engine:0:generated:3:hang")
check(done.returncode == 0 and "rows of rollout, while nothing moved" in done.stdout,
      f"an engine: {done.stdout}{done.stderr}")
done = run(work / "trainer", *WAIT, *ALONE, fault="trainer:0:after_backward:3:hang")
check(done.returncode == 1 and "rows of actor" in done.stderr and f"dray run --resume {work / 'trainer'}" in done.stderr,
      f"a trainer: {done.stdout}{done.stderr}")
check(run(work / "trainer", resume=True).returncode == 0, "a trainer, resumed")

# Who gets next to nothing of a core, for others go before it, is slow, and not silent.
core = min(os.sched_getaffinity(0))
rivals = [subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, [{core}])\nwhile os.getppid() == {os.getpid()}: pass"])
          for _ in range(6)]
done = subprocess.run(command(work / "starved", *ALONE, "--set", "steps=1", "--set", "limits.wait_seconds=5", job=job_file),
                      cwd=work, capture_output=True, text=True, timeout=2 * PATIENCE,
                      preexec_fn=lambda: (os.setpriority(os.PRIO_PROCESS, 0, 15), os.sched_setaffinity(0, [core])))
for rival in rivals:
    rival.kill()
    rival.wait()
check(done.returncode == 0 and "warning" not in done.stdout, f"starved: {done.stdout}{done.stderr}")
check_nothing_left(work / "starved")

# Nobody holds rows: all wait for each other.
begun = time.monotonic()
done = run(work / "nobody", *WAIT, *ALONE, fault="trainer:0:after_publish:3:hang")
check(done.returncode == 1 and f"dray run --resume {work / 'nobody'}" in done.stderr, f"nobody: {done.stdout}{done.stderr}")
check(time.monotonic() - begun < 6 * PATIENT + 10, f"nobody: {time.monotonic() - begun:.1f} s")
finish()
