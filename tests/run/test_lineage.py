"""Each sample is trained once, and every prompt of the data once a pass, in the lineage of the last
checkpoint, whatever is killed, and whatever the queue holds then. Resuming moves from every
checkpoint."""
from lineage import *

SCHEDULES = {"sync": [], "one_step_async": ["schedule=one_step_async"],
             "rolling": ["schedule=rolling", "roles.engine.instances=2", "roles.engine.ranks=1"],
             "async": ["schedule=async", "staleness=2", "rollout.batching=continuous", "update=in_flight"]}
SCHEDULES = {schedule: words(settings)
             for schedule, settings in SCHEDULES.items() if schedule in known_schedules()}
STALENESS = 2  # of async

# Prompts lost or repeated on resume (NeMo-RL #3599): steps since the last checkpoint are done again,
# with the samples that they had. The queue is new, or its journal or its last checkpoint is read.
FAULTS = {"none": ["trainer:0:after_step:5:kill", "trainer:0:checkpoint_named:4:kill",
                   "trainer:0:after_checkpoint:4:kill", "trainer:1:in_checkpoint:2:kill"],
          "journal": ["trainer:0:claimed:6:kill", "trainer:0:after_commit:5:kill",
                      "trainer:0:covered:4:kill", "desk:0:cleared:5:kill,trainer:0:after_publish:6:kill"],
          "checkpoint": ["trainer:0:committed:6:kill", "trainer:0:after_checkpoint:4:kill"]}
for schedule, setting in SCHEDULES.items():
    whole, bounds = work / f"whole-{schedule}", Bounds(schedule, STALENESS)
    check(recorded(whole, *DATA, *setting).returncode == 0, f"{schedule}: the undisturbed run")
    check_lineage(whole, f"{schedule}, undisturbed", bounds)
    same = whole if bounds.exact else None
    for durability, faults in FAULTS.items():
        for number, fault in enumerate(faults if schedule == "sync" else faults[:1]):
            what = f"{schedule}, {durability}, {fault}"
            folder = work / f"{schedule}-{durability}-{number}"
            done = recorded(folder, *DATA, *setting, "--set", f"queue.durability={durability}",
                            fault=fault)
            check(done.returncode == 1, f"{what}: status {done.returncode}")
            check_lineage(folder, what, bounds, same)
            done = recorded(folder, resume=True)
            check(done.returncode == 0, f"{what}, resumed: {done.stderr}")
            check_lineage(folder, f"{what}, resumed", bounds, same)
            check_same_run(whole, folder, what) if same and durability == "none" else None
            # A burst beyond the bound after recovery (AReaL #1345).
            check_bound(folder, what, bounds)

    # The trainer is asked to leave when samples of a step are trained, of which no checkpoint knows then.
    folder, what = work / f"{schedule}-left", f"{schedule}, left"
    os.environ.update(begin_record(folder))
    leave(folder, *DATA, *setting, "--set", "queue.durability=journal", "--set", "actor.optimiser_steps=1",
          fault="trainer:0:after_backward:4:stop")
    del os.environ["DRAY_RECORD"]
    check_lineage(folder, what, bounds)
    done = recorded(folder, resume=True)
    check(done.returncode == 0, f"{what}, resumed: {done.stderr}")
    check_lineage(folder, f"{what}, resumed", bounds)

    # A queue that has the prompts of all steps when none is trained, twice.
    folder, what = work / f"{schedule}-twice", f"{schedule}, twice"
    done = recorded(folder, *DATA, *setting, "--set", "queue.durability=journal", "--set", "checkpoint.every=6",
                    fault="trainer:0:after_publish:4:exit")
    check(done.returncode == 1, f"{what}: status {done.returncode}")
    done = recorded(folder, resume=True, fault="trainer:0:claimed:1:kill")
    check(done.returncode == 1 and "was killed by signal 9" in done.stderr, f"{what}: {done.stderr}")
    done = recorded(folder, resume=True)
    check(done.returncode == 0, f"{what}: {done.stderr}")
    check_lineage(folder, what, bounds, same)


def moves(folder, step):
    """Seconds until the run that goes on from `step` has trained the next one."""
    begun = time.monotonic()
    process = start(folder, resume=True, json_lines=True)
    seen = any(f'"event":"step","step":{step + 1}' in line for line in process.stdout)
    took = time.monotonic() - begun
    process.kill()
    process.communicate(timeout=PATIENCE)
    check_nothing_left(folder, sockets=False)
    return took if seen else None


# Resume deadlock, engines waiting for the checkpoint's version and the trainer for samples (prime-rl
# #3004): it moves from every checkpoint. A queue whose journal has let go of more than the checkpoint
# knows is there, too.
for schedule, setting in SCHEDULES.items():
    for durability in ("none", "journal") if schedule == "sync" else ("none",):
        folder = work / f"every-{schedule}-{durability}"
        done = run(folder, *DATA, *setting, "--set", "checkpoint.every=1", "--set",
                   f"queue.durability={durability}", fault="trainer:0:after_publish:6:kill")
        check(done.returncode == 1, f"{schedule}: status {done.returncode}")
        for step in some(range(6)):
            again = work / f"{folder.name}-{step}"
            shutil.copytree(folder, again, symlinks=True)
            latest = again / "checkpoints" / "latest"
            latest.unlink()
            latest.symlink_to(checkpoint(again, step).name)
            for newer in range(step + 1, 6):
                shutil.rmtree(checkpoint(again, newer))
            took = moves(again, step)
            check(took and took < (10 if "asan" not in PROGRAM and "tsan" not in PROGRAM else 100),
                  f"{schedule}, {durability}: from step {step}: {took} s")


def optimiser_steps(folder, step):
    data = (checkpoint(folder, step) / "optimizer" / "model.safetensors").read_bytes()
    header = int.from_bytes(data[:8], "little")
    at = json.loads(data[8:8 + header])["step"]["data_offsets"]
    return int.from_bytes(data[8 + header + at[0]:8 + header + at[1]], "little")


# The loop ends before the last update (prime-rl #3050): the last version was trained on the last
# samples, checkpointed, and evaluated.
for schedule in SCHEDULES:
    folder = work / f"whole-{schedule}"
    last = rows(folder)[-1]
    check(newest(folder) == STEPS and optimiser_steps(folder, STEPS) == 2 * STEPS,
          f"{schedule}: {newest(folder)} {optimiser_steps(folder, STEPS)}")
    check(last["step"] == STEPS and "eval_accuracy" in last, f"{schedule}: {last}")
finish()
