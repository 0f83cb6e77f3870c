"""The page of 10,000 steps of 20 ranks: less than 2 MB, drawn in less than 2 s, and its values are those of
metrics.jsonl. The run is written, not run."""
import ctypes
import random

from pages import *

STEPS, RANKS = 10000, 20


def record(dray, folder, label, name, rng):
    path = f"{folder}/trace/{label.replace(' ', '-')}-1.spans"
    assert dray.dray_trace_open(path.encode(), label.encode(), None) == 0
    now = 10**9
    for step in range(1, STEPS + 1):
        busy = int(rng.uniform(0.5, 0.9) * 1e8)
        dray.dray_trace_span(0, name, now, now + busy, step)
        dray.dray_trace_span(2, b"publish" if name == b"actor" else b"take weights", now + busy, now + busy + 10**6, step)
        dray.dray_trace_span(1, b"queue claim", now + busy + 10**6, now + 10**8, step)
        now += 10**8
        if step % 5000 == 0:
            assert dray.dray_trace_flush(None) == 0
    assert dray.dray_trace_open(None, None, None) == 0


library = os.environ.get("DRAY_LIBRARY", "")
if not os.path.exists(library):
    print("DRAY_LIBRARY is not there")
    sys.exit(77)
rng, folder = random.Random(1), work / "long"
(folder / "trace").mkdir(parents=True)
dray = ctypes.CDLL(library)
dray.dray_trace_span.argtypes = [ctypes.c_int, ctypes.c_char_p] + 3 * [ctypes.c_int64]
dray.dray_trace_span.restype = None
for rank in range(RANKS):
    trainer = rank >= RANKS - 4
    label = f"trainer {rank - RANKS + 4}" if trainer else f"engine.{rank} 0"
    record(dray, folder, label, b"actor" if trainer else b"rollout", rng)
with (folder / "metrics.jsonl").open("w") as out:
    for step in range(STEPS + 1):
        time_of = {role: {"processes": n, "busy": rng.random() * 0.05 * n, "transfer": rng.random() * 0.01 * n, "cpu": 0.1,
                          "wait": {cause: rng.random() * 0.005 * n for cause in
                                   ("samples", "weights", "readers", "ranks", "admission", "controller")}}
                   for role, n in (("engine", 16), ("trainer", 4), ("desk", 1))}
        row = {"step": step, "samples": 256, "step_seconds": 0.1 + rng.random() / 100, "time": time_of,
               "staleness_tokens": [rng.randrange(1000) for _ in range(4)]}
        row |= {key: rng.random() for key in ("reward_mean", "response_length_mean", "tokens", "tokens_per_s", "loss",
                                              "grad_norm", "ratio_max", "kl_to_reference", "entropy", "staleness_mean",
                                              "update_seconds", "update_bytes", "clip_fraction", "behaviour_ratio_max",
                                              "weight_version", "learning_rate", "rollout_gap_max", "cut_fraction")}
        if step % 100 == 0:
            row["eval_accuracy"] = rng.random()
        out.write(json.dumps(row) + "\n")
began = time.monotonic()
done = subprocess.run([PROGRAM, "report", str(folder)], capture_output=True, text=True, timeout=PATIENCE)
check(done.returncode == 0, done.stderr)
page = folder / "report.html"
print(f"{page.stat().st_size} bytes, written in {time.monotonic() - began:.2f} s")
check(page.stat().st_size < 2_000_000, f"{page.stat().st_size} bytes")
check_values("long", data_of(page)["runs"][0], rows(folder))
if CHROMIUM:
    seen = [int(open_page("long", page, width, False)["drawn"]) for width in (1280, 390)]
    print(f"drawn in {seen} ms")
    check(min(seen) < 2000, f"drawn in {seen} ms")
finish()
