"""Roles that share a device, one of which is killed again and again, wherever it is: with its turn, or waiting for
it, or taking weights. The others go on at once, and the run ends as it would have."""
import random
import threading

from shared import *

SEED = int(os.environ.get("DRAY_TEST_SEED", time.time()))
print("seed", SEED)
random.seed(SEED)
SHARED = devices(engine="cpu:0", trainer="cpu:0")
STEPS, KILLS = 400, 25


def kill_engines(folder, process, killed):
    while process.poll() is None and len(killed) < KILLS:
        time.sleep(random.uniform(0.02, 0.3))
        ranks = [pid for pid, line in processes_of(folder) if line.endswith("role engine")]
        if ranks:
            killed.append(random.choice(ranks))
            try:
                os.kill(killed[-1], signal.SIGKILL)
            except ProcessLookupError:
                killed.pop()


for schedule in ("sync", "one_step_async"):
    how = ["--set", f"schedule={schedule}", "--set", f"steps={STEPS}", "--set", "limits.restarts=1000", "--set",
           "checkpoint.every=20", "--set", "queue.max_attempts=1000"]
    whole, folder = work / f"{schedule}-whole", work / f"{schedule}-killed"
    check(run(whole, *how).returncode == 0, f"{schedule}: the undisturbed run")
    process, killed = start(folder, *how, *SHARED), []
    killer = threading.Thread(target=kill_engines, args=(folder, process, killed))
    killer.start()
    out, errors = process.communicate(timeout=PATIENCE)
    killer.join()
    print(schedule, len(killed), "kills")
    check(process.returncode == 0, f"{schedule}, seed {SEED}: {out[-2000:]} {errors}")
    check(len(killed) == KILLS, f"{schedule}: {len(killed)} kills")
    check_same_run(whole, folder, f"{schedule}, seed {SEED}", STEPS)
finish()
