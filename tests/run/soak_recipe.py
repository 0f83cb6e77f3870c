"""The demo's recipe, whole, with several seeds: held-out accuracy begins below 0.3 and ends above
0.9. One run has its engine and its desk killed, one its trainer, and is resumed: both end like
their undisturbed twin."""
from jobs import *

job = pathlib.Path(os.environ["DRAY_SOURCE_DIR"]) / "examples" / "reverse.yaml"
seeds = 5 if os.environ.get("DRAY_TEST_SEEDS") is None else int(os.environ["DRAY_TEST_SEEDS"])


def long_run(folder, *arguments, **options):
    line = command(folder, *arguments, job=job, resume=options.get("resume", False))
    env = dict(os.environ, DRAY_FAULT=options.get("fault", ""))
    done = subprocess.run(line, env=env, cwd=work, capture_output=True, text=True, timeout=3600)
    check_nothing_left(folder)
    return done


for seed in range(1, seeds + 1):
    folder = work / f"seed-{seed}"
    began = time.monotonic()
    done = long_run(folder, "--seed", str(seed))
    check(done.returncode == 0, f"seed {seed}: {done.stderr}")
    measured = [row["eval_accuracy"] for row in rows(folder) if "eval_accuracy" in row]
    print(f"seed {seed}: {measured}, {time.monotonic() - began:.0f} s", flush=True)
    check(measured[0] < 0.3 and measured[-1] > 0.9, f"seed {seed}: {measured}")

folder = work / "disturbed"
done = long_run(folder, "--seed", "1", fault="engine:0:generated:100:kill,desk:0:cleared:200:kill")
check(done.returncode == 0 and done.stdout.count("anew") == 2, f"disturbed: {done.stderr}")
check_same_run(work / "seed-1", folder, "killed engine and desk", steps=400)
folder = work / "resumed"
done = long_run(folder, "--seed", "1", fault="trainer:1:after_step:250:kill")
check(done.returncode == 1, "the trainer was not killed")
check(long_run(folder, resume=True).returncode == 0, "resumed")
check_same_run(work / "seed-1", folder, "killed trainer", steps=400)
finish()
