"""examples/arithmetic.yaml, whole, with several seeds: held-out accuracy rises, and lengths of answers differ much."""
from jobs import *

job = pathlib.Path(os.environ["DRAY_SOURCE_DIR"]) / "examples" / "arithmetic.yaml"
for seed in range(1, int(os.environ.get("DRAY_TEST_SEEDS", 3)) + 1):
    folder = work / f"seed-{seed}"
    line = command(folder, "--seed", str(seed), job=job)
    done = subprocess.run(line, cwd=work, capture_output=True, text=True, timeout=3600)
    check(done.returncode == 0, f"seed {seed}: {done.stderr}")
    measured = [row["eval_accuracy"] for row in rows(folder) if "eval_accuracy" in row]
    print(f"seed {seed}: {measured}", flush=True)
    check(measured[-1] > measured[0] + 0.08, f"seed {seed}: {measured}")
    check_nothing_left(folder)
finish()
