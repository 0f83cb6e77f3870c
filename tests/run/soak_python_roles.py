"""examples/roles/job.yaml from its beginning to its end, as it stands: it learns, although graders and rollout are
killed meanwhile and another grader comes by itself and leaves; a run whose trainer's rank is killed says how it goes
on, and does."""
from python_roles import *

PATIENCE = 3600
folder = work / "whole"
whole = start(folder, job=JOB)
for step, role in ((20, "grader"), (40, "rollout"), (60, "grader")):
    if reached(folder, step, whole, PATIENCE):
        kill(folder, role, instance=str(step // 20 % 2))
if reached(folder, 80, whole, PATIENCE):
    environment = next(iter(ranks_of(folder, "grader").values()))[1]
    guest = subprocess.Popen([sys.executable, str(EXAMPLES / "grade.py")],
                             env=dict(environment, DRAY_INSTANCE="7"))
    reached(folder, 120, whole, PATIENCE)
    guest.send_signal(signal.SIGTERM)
    check(guest.wait(60) == 0, f"the grader that left: {guest.returncode}")
out, errors = whole.communicate(timeout=PATIENCE)
check(whole.returncode == 0, f"status {whole.returncode}: {errors}")
check_nothing_left(folder)
check(out.count("starting") == 3, out)
check_samples(folder, 400, 256)
print("held-out:", [(row["step"], row["eval_accuracy"]) for row in rows(folder)
                    if row.get("eval_accuracy") is not None])
check(rows(folder)[-1]["eval_accuracy"] > 0.9, f"held-out {rows(folder)[-1]}")
from transformers import AutoModelForCausalLM  # noqa: E402
model = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "latest")
check(model.config.model_type == "qwen2", model.config)

for rank in ("0", "1"):
    folder = work / f"killed-{rank}"
    killed = start(folder, *settings(steps=12, checkpoint__every=4), job=JOB)
    if reached(folder, 6, killed, PATIENCE):
        kill(folder, "trainer", rank)
    out, errors = killed.communicate(timeout=PATIENCE)
    check(killed.returncode == 1 and f"dray run --resume {folder}" in errors, f"{out}{errors}")
    check_nothing_left(folder)
    again = run(folder, resume=True)
    check(again.returncode == 0 and "from step 4" in again.stdout, f"{again.stdout}{again.stderr}")
    check_samples(folder, 12, 256)
finish()
