"""A value model at length: held-out accuracy of the demo rises by its advantages; either trainer is killed at
every point, in both deterministic schedules, in async, and with a queue that keeps what was committed."""
import pathlib

from gae import *

FAULTS = ["critic:0:claimed:3:kill", "critic:1:after_backward:3:kill", "critic:1:after_step:3:kill",
          "critic:0:after_publish:4:kill", "critic:0:after_commit:4:kill",
          "critic:0:in_checkpoint:4:kill", "critic:1:in_checkpoint:4:kill",
          "critic:0:checkpoint_named:4:kill", "critic:0:after_checkpoint:4:kill",
          "critic:0:after_checkpoint:6:kill", "critic:0:after_publish:0:kill",
          "trainer:0:after_step:3:kill", "trainer:0:after_commit:4:kill",
          "trainer:0:in_checkpoint:4:kill", "trainer:0:checkpoint_named:4:kill",
          "trainer:0:after_checkpoint:4:kill", "trainer:0:covered:4:kill",
          "trainer:0:after_checkpoint:6:kill", "trainer:0:in_checkpoint:0:kill"]

for name, settings in (("sync", []), ("one-step", ["schedule=one_step_async"]),
                       ("journal", ["queue.durability=journal"]),
                       ("both", ["queue.durability=journal", "schedule=one_step_async"])):
    arguments = words(settings)
    whole = work / name
    done = run(whole, *arguments, job=gae_file)
    check(done.returncode == 0, f"{settings}: {done.stderr}")
    check_killed(whole, FAULTS, *arguments)
    # What the first death left whole is not taken for what is made again.
    folder = work / f"{name}-twice"
    run(folder, *arguments, fault="trainer:0:checkpoint_named:4:kill", job=gae_file)
    for fault in ("trainer:0:covered:4:kill", "critic:0:after_commit:5:kill"):
        check(run(folder, resume=True, fault=fault).returncode == 1, f"{name}, twice: {fault}")
    check(run(folder, resume=True).returncode == 0, f"{name}, twice")
    check_same_models(whole, folder, f"{name}, killed three times")
    # Roles that are started anew.
    for fault in ("engine:0:generated:3:kill", "desk:0:committed:3:kill", "desk:0:finished:3:kill"):
        folder = work / f"{name}-{fault.split(':')[0]}-{fault.split(':')[2]}"
        done = run(folder, *arguments, fault=fault, job=gae_file)
        check(done.returncode == 0 and "anew" in done.stdout, f"{name}, {fault}: {done.stderr}")
        check_same_models(whole, folder, f"{name}, {fault}")

for durability in ("none", "journal", "checkpoint"):
    for number, fault in enumerate(FAULTS[:-1]):
        folder, what = work / f"async-{durability}-{number}", f"async, {durability}, {fault}"
        done = begun(folder, *words([*FLIGHT, f"queue.durability={durability}", "checkpoint.every=3"]),
                     fault=fault.replace(":4:", ":3:"))
        check(done.returncode == 1, f"{what}: status {done.returncode}")
        done = recorded(folder, resume=True)
        check(done.returncode == 0, f"{what}, resumed: {done.stderr}")
        check_both(folder, what, Bounds("async", 2))

demo = pathlib.Path(os.environ["DRAY_SOURCE_DIR"]) / "examples" / "reverse.yaml"
text = demo.read_text().replace("method: grpo", "method: gae")
job_file.write_text(text.rstrip() + "\n  - {name: critic, tasks: [value, critic]}\n")
for schedule in ("sync", "async"):
    folder = work / f"demo-{schedule}"
    done = run(folder, *words(("steps=150", "eval.every=150", f"schedule={schedule}")))
    check(done.returncode == 0, f"the demo: {done.stderr}")
    accuracy = [row["eval_accuracy"] for row in rows(folder) if "eval_accuracy" in row]
    print(schedule, "held-out accuracy", accuracy)
    check(accuracy[-1] > accuracy[0] + 0.5, f"{schedule}: held-out accuracy: {accuracy}")
finish()
