"""Recorded layouts of a real engine's models, a line each: models.py vllm|sglang TP RANK [model types...]. The last
line is what came of all, as JSON."""
import json
import os
import sys
import tempfile
import time
import traceback

sys.modules["torchvision"] = None  # PyPI's does not fit a torch for the CPU: as if it were not there
engine, tp, rank = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
wanted = sys.argv[4:]
if engine == "vllm":
    import vllm_engine as engine_of
else:
    import sglang_engine as engine_of
import checkpoints
import compare  # noqa: E402

ranks = engine_of.Ranks(tp, rank)
totals = {"equal": 0, "in_place": 0, "written": 0, "failed": 0, "not_built": 0}
begun, built = time.monotonic(), set()
for model_type, name in checkpoints.architectures(getattr(engine_of, "TASKS", ("FOR_CAUSAL_LM_MAPPING",))):
    if wanted and not {model_type, name} & set(wanted) or not engine_of.knows(name):
        continue
    with tempfile.TemporaryDirectory() as folder:
        try:
            name, tensors = checkpoints.checkpoint(model_type, name, folder, 7)
        except Exception as error:
            print(f"{model_type} {name}: no checkpoint: {type(error).__name__} {str(error)[:150]!r}", flush=True)
            if os.environ.get("TRACE"):
                traceback.print_exc()
            continue
        if name in built:
            continue
        try:
            model, config = ranks.model(folder)
            with engine_of.around(config):
                for _ in range(2):  # some engines' models load once in their lives
                    model.load_weights((n, t.clone()) for n, t in tensors.items())
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            totals["not_built"] += 1
            print(f"{model_type} {name}: not loaded by the engine: {type(error).__name__} {str(error)[:160]!r}",
                  flush=True)
            if os.environ.get("TRACE"):
                traceback.print_exc()
            continue
        try:
            with engine_of.around(config):
                came = compare.compared(model, tensors)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            totals["failed"] += 1
            print(f"{model_type} {name}: FAILED {type(error).__name__} {str(error)[:200]!r}", flush=True)
            if os.environ.get("TRACE"):
                traceback.print_exc()
            continue
        built.add(name)
        if model_type == os.environ.get("PLANTED"):
            with engine_of.around(config):
                totals["planted"] = compare.planted(model, tensors, 100, 7)
        bad = came["silent"] + came["rest"] + came["changed"]
        totals["equal"] += not bad
        totals["failed"] += bool(bad)
        totals["most_seconds"] = max(totals.get("most_seconds", 0), round(came["seconds"], 2))
        totals["in_place"] += came["in_place"]
        totals["written"] += came["written"]
        print(f"{model_type} {name}: {'DIFFERS ' + str(bad[:3]) if bad else 'equal'}, "
              f"{came['in_place']}/{came['written']} in place, {came['blocks']} blocks, "
              f"{came['seconds']:.2f} s", came["by_loader"] or "", came["load_tensors"] or "", flush=True)
        del model
print(json.dumps({"engine": engine, "tp": tp, "rank": rank, **totals,
                  "seconds": round(time.monotonic() - begun, 1)}))
sys.exit(totals["failed"] > 0)
