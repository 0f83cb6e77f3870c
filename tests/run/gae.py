"""A small job with a value model. Used by the tests beside it."""
from lineage import *

GAE = TINY.replace("advantage: {micro_batch: 4}", "advantage: {method: gae, micro_batch: 4}") + """
reward: {rule: command, command: 'while read -r line; do echo 0.${#line}; done', micro_batch: 4}
critic: {lr: 1e-2, micro_batch: 8}
roles:
  - {name: engine, tasks: [rollout, eval], ranks: 2}
  - {name: trainer, tasks: [old_log_prob, actor], ranks: 2}
  - {name: critic, tasks: [value, critic], ranks: 2}
  - {name: desk, tasks: [driver, reward, reference, advantage]}
"""
GAE = GAE.replace("reward: {micro_batch: 4}\n", "", 1)

gae_file = work / "gae.yaml"
gae_file.write_text(GAE)


def critic(folder, step):
    return folder / "critic" / f"step-{step:06}"


def check_same_models(folder, other, what, steps=6):
    check_same_run(folder, other, what, steps)
    a, b = (critic(f, steps) for f in (folder, other))
    check(b.is_dir() and same_folder(a, b), f"{what}: the value model differs")


def check_killed(whole, faults, *arguments):
    """A run that is killed there and resumed ends as the undisturbed one. (Samples that a journal has need no
    weights.)"""
    if "queue.durability=journal" in arguments:
        TIMES.add("update_bytes")
    for number, fault in enumerate(faults):
        folder = work / f"{whole.name}-killed-{number}"
        done = run(folder, *arguments, fault=fault, job=gae_file)
        role = fault.split(":")[0]
        check(done.returncode == 1 and f"{role} rank" in done.stderr and
              f"dray run --resume {folder}" in done.stderr,
              f"{fault}: {done.returncode}: {done.stderr}")
        done = run(folder, resume=True)
        check(done.returncode == 0, f"{fault}, resumed: {done.stderr}")
        check_same_models(whole, folder, fault)


# Under schedules whose steps train samples of several versions.
PAIR = ["roles.engine.instances=2", "roles.engine.ranks=1"]
# Some responses take long: groups of later steps' prompts are complete first.
LATE = ["schedule=async", "staleness=2", "rollout.batching=continuous", "rollout.max_new_tokens=20", *PAIR,
        "clock.enabled=true", "clock.tokens=3", "clock.correlation=0.5", "clock.variation=0.7", "clock.tail=6",
        "clock.tail_share=0.2", "clock.token_seconds=3e-3", "clock.train_seconds=1e-5", "clock.log_prob_seconds=1e-5"]
FLIGHT = [*LATE, "update=in_flight", "rollout.partial_tokens=3"]


def begun(folder, *arguments, **options):
    return recorded(folder, *DATA, *arguments, job=gae_file, **options)


def check_both(folder, what, bounds, tasks=("critic", "value")):
    """What the last checkpoint of each model is made of: the same samples in each step, which had their values from
    the version that the step began with. Returns whether a step had samples of several steps' prompts.

    tasks: without `value` where a queue keeps values of steps that are made again, from the same samples."""
    check_lineage(folder, what, bounds)
    last, mixed = newest(folder), False
    actor = lineage(folder, last)
    for task in tasks:
        other = lineage(folder, last, task)
        check(sorted(other) == sorted(actor), f"{what}: {task} in steps {sorted(other)}")
        for step in actor:
            mine, its = (collections.Counter(row[:4] for row in steps.get(step, ())) for steps in (actor, other))
            check(mine == its, f"{what}: step {step}: actor alone had {mine - its}, {task} alone {its - mine}")
            mixed = mixed or len({row[0] for row in mine}) > 1
    check(critic(folder, last).is_dir(), f"{what}: no value model of step {last}")
    return mixed
