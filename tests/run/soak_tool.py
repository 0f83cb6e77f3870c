"""examples/tool.yaml, whole, with several seeds: held-out accuracy rises, in both ways of batching, and the tool takes
most of the time, not the processors."""
import resource

from jobs import *

CORES = 2
job = pathlib.Path(os.environ["DRAY_SOURCE_DIR"]) / "examples" / "tool.yaml"
for seed in range(1, int(os.environ.get("DRAY_TEST_SEEDS", 3)) + 1):
    for batching in ("continuous", "closed"):
        folder = work / f"{batching}-{seed}"
        line = command(folder, "--seed", str(seed), "--set", f"rollout.batching={batching}", job=job)
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(line, cwd=work, capture_output=True, text=True, timeout=3600)
        after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begin
        check(done.returncode == 0, f"seed {seed}: {done.stderr}")
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        measured = [row["eval_accuracy"] for row in rows(folder) if "eval_accuracy" in row]
        print(f"{batching}, seed {seed}: {measured}, {seconds:.0f} s, {used / seconds / CORES:.1%} of two cores", flush=True)
        check(measured[-1] > measured[0] + 0.1, f"seed {seed}: {measured}")
        check(used / seconds / CORES <= 0.6, f"seed {seed}: {used} s of {seconds} s")
        check_nothing_left(folder)
finish()
