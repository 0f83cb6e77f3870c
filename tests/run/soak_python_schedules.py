"""The trainer, rollout and graders of examples/roles under every schedule, with the lineage checked: undisturbed; with
a grader and a rollout that are killed; and with a rank of the trainer that is killed, after which the run goes on. Under
rolling and async the whole job learns, too."""
from python_roles import *
from lineage import *

PATIENCE = 3600
RECORDED = f"exec python3 {pathlib.Path(__file__).parent / 'recorded_role.py'} "
SMALL = settings(steps=STEPS, warmup__max_steps=0, rollout__prompts=PROMPTS, rollout__samples=SAMPLES,
                 rollout__micro_batch=SAMPLES, actor__optimiser_steps=2, eval__every=3, eval__prompts=12,
                 checkpoint__every=2, checkpoint__keep=10, queue__max_attempts=8,
                 tasks__actor__needs="[prompt, response, rollout_log_prob, response_version, reward, advantage]",
                 roles__rollout__command=RECORDED + "rollout.py", roles__trainer__command=RECORDED + "train.py",
                 roles__grader__command=f"exec python3 {work / 'grade.py'}") + DATA
# Groups of four, not eight of them at once; the rest as it is.
(work / "grade.py").write_text(f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n" +
                               (EXAMPLES / "grade.py").read_text().replace("8 * samples", "samples"))
SCHEDULES = {"sync": (), "one_step_async": (), "rolling": (), "async": settings(staleness=1)}
if known := set(known_schedules()) - set(SCHEDULES):
    check(False, f"schedules that are not tried: {known}")


def begin(folder, schedule, *more, resume=False):
    line = command(folder, resume=True) if resume else \
        command(folder, *SMALL, *settings(schedule=schedule), *SCHEDULES[schedule], *more, job=JOB)
    return subprocess.Popen(line, env=dict(os.environ, **begin_record(folder)), cwd=work, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def end(process, what, folder):
    out, errors = process.communicate(timeout=PATIENCE)
    check(process.returncode == 0, f"{what}: status {process.returncode}: {out[-1500:]}{errors}")
    check_nothing_left(folder)
    return out


def check_run(folder, schedule, what):
    bounds = Bounds(schedule, 1)
    check_lineage(folder, what, bounds)
    check_bound(folder, what, bounds)
    made = rows(folder)
    check([row["step"] for row in made] == list(range(STEPS + 1)), f"{what}: {[row['step'] for row in made]}")
    due = [row.get("eval_version", -1) for row in made if row["step"] in (0, 3, STEPS)]
    check(all(version >= step for version, step in zip(due, (0, 3, STEPS))), f"{what}: evaluations by {due}")


for schedule in SCHEDULES:
    folder = work / f"disturbed-{schedule}"
    process = begin(folder, schedule)
    for step, role in ((1, "grader"), (2, "rollout"), (4, "grader")):
        if reached(folder, step, process, PATIENCE):
            kill(folder, role, instance=str(step % 2))
    out = end(process, f"{schedule}, roles killed", folder)
    check("anew" in out, out)
    check_run(folder, schedule, f"{schedule}, roles killed")
    folder = work / f"resumed-{schedule}"
    process = begin(folder, schedule)
    if reached(folder, 3, process, PATIENCE):
        kill(folder, "trainer", rank="1")
    out, errors = process.communicate(timeout=PATIENCE)
    check(process.returncode == 1 and f"dray run --resume {folder}" in errors, f"{schedule}: {out}{errors}")
    last = newest(folder)
    check(last in (2, 4), f"{schedule}: the newest checkpoint is of step {last}")
    check_lineage(folder, f"{schedule}, killed", Bounds(schedule, 1))
    out = end(begin(folder, schedule, resume=True), f"{schedule}, resumed", folder)
    check(f"from step {last}" in out, out)
    check_run(folder, schedule, f"{schedule}, resumed")

for schedule in ("rolling", "async"):
    folder = work / f"whole-{schedule}"
    process = start(folder, *settings(schedule=schedule), *SCHEDULES[schedule], job=JOB)
    out, errors = process.communicate(timeout=PATIENCE)
    check(process.returncode == 0, f"{schedule}: status {process.returncode}: {errors}")
    check_nothing_left(folder)
    found = [(row["step"], row["eval_accuracy"]) for row in rows(folder) if row.get("eval_accuracy") is not None]
    print(f"{schedule}: held-out: {found}")
    check(found[-1][1] > 0.9, f"{schedule}: held-out {found}")
    check(max(row["staleness_max"] for row in rows(folder)) <= 1, f"{schedule}: staleness")
finish()
