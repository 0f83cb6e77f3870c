"""A small job with a value model. Used by the tests beside it."""
from jobs import *

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
