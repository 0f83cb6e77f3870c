"""examples/roles/job.yaml: programs in Python are a run's rollout, grader and trainer. Three steps, in which the grader
is killed, and started anew. Training gets no prompt that is held out. soak_python_roles has the whole run, and the other
deaths."""
from python_roles import *
from timelines import check_rows, check_thread, timelines

# The grader, which looks at what it is given: the examples' rule of what is held out is dray's.
(work / "look.py").write_text(f"""
import runpy, sys
import dray
sys.path.insert(0, {str(EXAMPLES)!r})
from text import held_out
batches = dray.Role.batches

def look(role, **how):
    for batch in batches(role, **how):
        if batch.task in ("reward", "score"):
            column, held = ("answer", False) if batch.task == "reward" else ("eval_answer", True)
            assert all(held_out(int(text[::-1])) == held for text in batch.list(column)), batch.list(column)
        yield batch

dray.Role.batches = look
runpy.run_path({str(EXAMPLES / "grade.py")!r}, run_name="__main__")
""")
folder = work / "short"
# With decay, as an untrained model has no rewards to learn from.
job = settings(steps=3, warmup__max_steps=0, rollout__prompts=8, eval__prompts=24, eval__every=2,
               checkpoint__every=2, actor__weight_decay=1, roles__rollout__instances=1, roles__trainer__ranks=1,
               roles__grader__instances=1, roles__grader__command=f"exec python3 {work / 'look.py'}")
process = start(folder, *job, job=JOB)
if reached(folder, 1, process):
    kill(folder, "grader")
out, errors = process.communicate(timeout=PATIENCE)
check(process.returncode == 0, f"status {process.returncode}: {out}{errors}")
check_nothing_left(folder)
check("starting grader anew" in out, out)
check_samples(folder, 3, 64)
check([row["step"] for row in rows(folder) if row.get("eval_accuracy") is not None] == [0, 2, 3], rows(folder))
first, last = (load_file(folder / "checkpoints" / f"step-00000{n}" / "model.safetensors") for n in (0, 3))
change = max(float((last[name] - first[name]).abs().max()) for name in first)
check(0 < change < 0.1 and "model.layers.1.mlp.up_proj.weight" in first, f"three steps changed {change}")
card = json.loads((folder / "checkpoints/latest/dray.json").read_text())
check(card["step"] == 3 and (folder / "checkpoints/latest/queue.cursor").stat().st_size > 0, card)
# Their time adds up, too.
named = set()
for (_, label, tid), spans in timelines(folder).items():
    if tid == 1:
        check_thread(label, spans)
        named |= {(label.split(" ")[0], s[3]) for s in spans}
check({("grader", "reward"), ("grader", "restart"), ("trainer", "actor"), ("trainer", "checkpoint"),
       ("rollout", "rollout"), ("rollout", "weights update"), ("rollout", "wait for weights")} <= named, sorted(named))
check_rows("short", rows(folder)[1:])
finish()
