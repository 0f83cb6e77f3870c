"""Measures how well the loop uses the cores: examples/reverse.yaml under sync and one_step_async, in four layouts.

    bench/loop.py [--steps N] [--seeds N] [--set KEY=VALUE ...] [--json] [--quick] [--strict]

runs the demo with 1 or 2 ranks of the engine and of the trainer, one run after the other, seed by seed. one_step_async
also runs with `nice: 19` for the engine and the desk. Its steps do not wait for them, so that the trainer then has a
core whenever it wants one. For each layout it prints:

    step                 the seconds of a step (with --json by phase, too: sampling, log-probs, updates)
    bound                the CPU time of a step in all processes, divided by the cores, which no step can undercut
    reached              the bound divided by the seconds of a step
    of the least         the same with the smallest bound of all runs; ranks that wait for each other spin, which
                         takes CPU time and does no work
    others               the share of the cores that went to processes outside the run; with more than a few percent
                         the other figures mean little
    to 0.9 held-out      the seconds of all steps until a held-out accuracy of 0.9, interpolated between two evaluations
    of the fastest sync  the same, divided by that of the fastest sync layout

--quick runs two layouts and 60 steps. --strict makes the exit status 1 when no layout of one_step_async reaches 0.85 of
the bound."""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import jobs
from scale import TICK, last_step, look

CORES = len(os.sched_getaffinity(0))
AS_IT_IS, BEHIND = None, 19  # None means the nice values of the job file
LAYOUTS = [(schedule, engine, trainer, nice)
           for schedule, nice in (("sync", AS_IT_IS), ("one_step_async", AS_IT_IS), ("one_step_async", BEHIND))
           for engine in (1, 2) for trainer in (1, 2)]
QUICK = [("sync", 2, 2, AS_IT_IS), ("one_step_async", 1, 1, BEHIND)]
WARMUP, TARGET, ACCURACY = 20, 0.85, 0.9


def machine_seconds():
    """Returns the CPU seconds that all processes of the machine have used."""
    fields = [int(word) for word in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / TICK


def wait_for_step(run, folder, step):
    while last_step(folder) < step:
        if run.poll() is not None:
            sys.exit(f"bench/loop.py: the run ended with {run.returncode} before step {step}")
        time.sleep(0.01)
    return last_step(folder), time.monotonic(), sum(look(folder)[0].values()), machine_seconds()


def seconds_to(folder):
    """Returns the seconds of the steps until the accuracy is reached; None when it is not."""
    seconds, before = 0.0, None
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        seconds += row["step_seconds"] if row["step"] else 0
        accuracy = row.get("eval_accuracy")
        if accuracy is None:
            continue
        if accuracy >= ACCURACY:
            share = (ACCURACY - before[1]) / (accuracy - before[1]) if before else 1
            return before[0] + share * (seconds - before[0]) if before else seconds
        before = seconds, accuracy
    return None


def phases(folder):
    """Returns {phase: seconds} of the first rank of each role. Each is the median over the steps after the warm-up."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] for row in rows if row["step"] > WARMUP]
    return {phase: sorted(step.get(phase, 0) for step in seconds)[len(seconds) // 2] for phase in seconds[-1]}


def measure(a, folder, layout, seed):
    schedule, engine, trainer, nice = layout
    settings = (f"seed={seed}", f"schedule={schedule}", f"roles.engine.ranks={engine}", f"roles.trainer.ranks={trainer}",
                f"steps={a.steps}", *(f"roles.{role}.nice={nice}" for role in ("engine", "desk") if nice), *a.set)
    run = subprocess.Popen(jobs.command("run", "reverse", folder, settings), stdout=subprocess.DEVNULL)
    try:
        first, begin, cpu, busy = wait_for_step(run, folder, WARMUP)
        last, end, cpu_then, busy_then = wait_for_step(run, folder, a.steps - 5)
        if run.wait(600):
            sys.exit(f"bench/loop.py: {layout} ended with {run.returncode}")
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
            run.wait(60)
    took, used = end - begin, cpu_then - cpu
    return {"step_seconds": took / (last - first), "bound_seconds": used / CORES / (last - first),
            "others": max(0, busy_then - busy - used) / (CORES * took), "seconds_to_accuracy": seconds_to(folder),
            "phases": phases(folder)}


def mean(runs, key):
    values = [run[key] for run in runs if run[key] is not None]
    return sum(values) / len(values) if values else None


def compare(layouts, runs):
    seen = []
    for layout in layouts:
        each = runs[layout]
        one = {"schedule": layout[0], "engine_ranks": layout[1], "trainer_ranks": layout[2], "nice": layout[3],
               **{key: mean(each, key) for key in each[0] if key != "phases"}, "phases": each[-1]["phases"]}
        one["reached"] = one["bound_seconds"] / one["step_seconds"]
        one["reached_in"] = sum(run["seconds_to_accuracy"] is not None for run in each)
        seen.append(one)
    least = min(one["bound_seconds"] for one in seen)
    fastest = min((one["seconds_to_accuracy"] for one in seen
                   if one["schedule"] == "sync" and one["seconds_to_accuracy"] is not None), default=None)
    for one in seen:
        one["of_least_bound"] = least / one["step_seconds"]
        known = fastest is not None and one["seconds_to_accuracy"] is not None
        one["against_fastest_sync"] = one["seconds_to_accuracy"] / fastest if known else None
    return seen


def word(value, form):
    return "-" if value is None else form.format(value)


def show(seen):
    print(f"examples/reverse.yaml on {CORES} cores                 step    bound  reached  of the least  others"
          f"  to {ACCURACY} held-out  of the fastest sync")
    for one in seen:
        name = f"{one['schedule']}, engine {one['engine_ranks']}, trainer {one['trainer_ranks']}"
        name += f", nice {one['nice']}" if one["nice"] else ""
        print(f"  {name:44} {1e3 * one['step_seconds']:6.1f} ms {1e3 * one['bound_seconds']:5.1f} ms"
              f"  {one['reached']:6.3f}  {one['of_least_bound']:12.3f}  {100 * one['others']:4.0f} %"
              f"  {word(one['seconds_to_accuracy'], '{:13.1f} s'):>15}"
              f"  {word(one['against_fastest_sync'], '{:.2f}'):>19}")


def main():
    a = jobs.options(__doc__, steps=400, seeds=1).parse_args()
    a.steps = 60 if a.quick else a.steps
    layouts = QUICK if a.quick else LAYOUTS
    runs = {layout: [] for layout in layouts}
    for seed in range(1, (1 if a.quick else a.seeds) + 1):
        for layout in layouts:
            with tempfile.TemporaryDirectory(prefix="dray-loop-") as made:
                runs[layout].append(measure(a, pathlib.Path(made) / "run", layout, seed))
    seen = compare(layouts, runs)
    if a.json:
        for one in seen:
            print(json.dumps(one))
    else:
        show(seen)
    best = max(one["reached"] for one in seen if one["schedule"] == "one_step_async")
    sys.exit(1 if a.strict and best < TARGET else 0)


if __name__ == "__main__":
    main()
