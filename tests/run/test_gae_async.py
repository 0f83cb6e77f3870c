"""A value model under schedules whose steps train samples of several versions: policy and value model train the
same samples in each step, each sample once, whatever is killed. Which those are is not said here: it is compared
between what both recorded."""
from gae import *

bounds = Bounds("async", 2)


def whole(name, settings):
    """Whether a step had samples of several steps' prompts."""
    folder = work / name
    done = begun(folder, *words(settings))
    check(done.returncode == 0 and "anew" not in done.stderr, f"{name}: {done.stderr}")
    mixed = check_both(folder, name, Bounds(name if name == "rolling" else "async", 2))
    table = rows(folder)
    # The version that the step begins with: of step 1 it says 0 of all tokens, of the next ones it does not.
    # (Under the clock it learns nothing.)
    check(table[1]["value_mean"] == 0 and ("clock.enabled=true" in settings or
                                           all(row["value_mean"] != 0 for row in table[2:])),
          f"{name}: {[row['value_mean'] for row in table[1:]]}")
    return mixed


def behind():
    """A policy's trainer that is behind: nothing is bound to a step before both models have made the one before. In
    the meantime an engine that was late delivers samples of an older step, which are the next that a task claims."""
    folder = work / "slow"
    environment = dict(os.environ, **begin_record(folder),
                       DRAY_FAULT="trainer:0:claimed:2:stop,engine.1:0:generated:1:stop")
    with open(work / "slow.out", "w") as out:
        process = subprocess.Popen(command(folder, *DATA, *words(LATE), job=gae_file), env=environment, cwd=work,
                                   stdout=out, stderr=out)
        alone = 0  # how often the engine was seen stopped, and not yet the trainer
        while process.poll() is None:
            time.sleep(0.1)
            stopped = {line.split("role ")[1].split()[0]: pid for pid, line in processes_of(folder)
                       if state_of(pid) == "T"}
            alone = alone + 1 if stopped and "trainer" not in stopped else 0
            if "trainer" in stopped or alone == 50:  # it may hold what the trainer waits for
                if "engine" in stopped:
                    os.kill(stopped["engine"], signal.SIGCONT)
                time.sleep(2)
            if "trainer" in stopped:
                os.kill(stopped["trainer"], signal.SIGCONT)
    check(process.returncode == 0, f"a slow trainer: {(work / 'slow.out').read_text()}")
    check_both(folder, "a slow trainer", bounds)


def killed(number, durability, fault, settings=LATE):
    folder, what = work / f"killed-{number}", f"{durability}, {fault}"
    done = begun(folder, *words([*settings, f"queue.durability={durability}", "checkpoint.every=4"]), fault=fault)
    check(done.returncode == 1 and f"dray run --resume {folder}" in done.stderr, f"{what}: {done.stderr}")
    if newest(folder) > 0:  # of version 0 there is no value model
        check_both(folder, what, bounds)
    since = time.monotonic()
    done = recorded(folder, resume=True)
    check(done.returncode == 0 and time.monotonic() - since < 10, f"{what}, resumed: {done.stderr}")
    check_both(folder, f"{what}, resumed", bounds)
    check_bound(folder, what, bounds)


def interrupted():
    """Ctrl-C: both end after the same step, each with its checkpoint."""
    folder = work / "stopped"
    environment = dict(os.environ, **begin_record(folder))
    process = subprocess.Popen(command(folder, *DATA, *words(LATE), json_lines=True, job=gae_file), env=environment,
                               cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if '"event":"step","step":3' in line:
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    last = rows(folder)[-1]["step"]
    check(process.returncode in (130, 0) and newest(folder) == last, f"stopped: status {process.returncode}: {err}")
    check_both(folder, f"stopped at {last}", bounds)
    check(recorded(folder, resume=True).returncode == 0, "stopped, resumed")
    check_both(folder, "stopped, resumed", bounds)


whole_runs = some([("async", ["schedule=async"]), ("late", LATE), ("fresh", [*LATE, "fresh_share=0.5"]),
                   ("flight", FLIGHT), ("rolling", ["schedule=rolling", *PAIR])])
kills = some([("journal", "trainer:0:after_publish:5:kill"), ("none", "critic:0:after_step:5:kill"),
              # As many samples are made as may be, and none is kept: as many may be made again.
              ("journal", "critic:0:after_publish:3:kill", FLIGHT)])
mixed = beside_each_other(*[(whole, *case) for case in whole_runs])
check(any(mixed), "no step of async had samples of several steps' prompts: nothing was tried")
beside_each_other((behind,), (interrupted,), *[(killed, number, *case) for number, case in enumerate(kills)])
finish()
