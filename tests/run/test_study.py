"""dray study: runs in turns, goes on where it was stopped or killed, tells of what failed; its figures
against numpy."""
import json
import os
import signal
import subprocess
import time

import numpy

from jobs import PATIENCE, PROGRAM, check, check_nothing_left, finish, job_file, rows, work

TWO = "sync,sync:actor.lr=0.01"
NAMES = TWO.split(",")


def command(out, *arguments, seeds=2, schedules=TWO):
    return [PROGRAM, "study", str(job_file), "--schedules", schedules, "--seeds", str(seeds), "--out",
            str(out), *arguments]


def study(out, *arguments, fault=None, **options):
    env = dict(os.environ)
    env.pop("DRAY_FAULT", None)
    if fault:
        env["DRAY_FAULT"] = fault
    done = subprocess.run(command(out, "--json", *arguments, **options), env=env, cwd=work,
                          capture_output=True, text=True, timeout=PATIENCE)
    check_nothing_left(out)
    return done, [json.loads(line) for line in done.stdout.splitlines()]


def of(events, kind):
    return [event for event in events if event["event"] == kind]


def result(out):
    return json.loads((out / "study.json").read_text())


# ---- runs in turns, and not again -----------------------------------------------------------------

def idle_of_rows(made):
    """Shares of roles' time by kind and cause, from step 2 on."""
    sums, whole = {}, {}
    for row in made[2:]:
        for role, time in row["time"].items():
            whole[role] = whole.get(role, 0) + time["processes"] * row["step_seconds"]
            parts = [("busy", time["busy"]), ("transfer", time["transfer"]), ("idle", sum(time["wait"].values()))]
            for kind, seconds in parts + [(f"idle {cause}", s) for cause, s in time["wait"].items()]:
                key = ".".join([kind.split()[0], role] + kind.split()[1:])
                sums[key] = sums.get(key, 0) + seconds
    return {key: value / whole[key.split(".")[1]] for key, value in sums.items()}


out = work / "turns"
done, events = study(out)
check(done.returncode == 0, f"a study ends with {done.returncode}: {done.stderr}")
order = [(event["seed"], event["schedule"]) for event in of(events, "begin")]
check(order == [(1, NAMES[0]), (1, NAMES[1]), (2, NAMES[0]), (2, NAMES[1])], f"order: {order}")
check(len(of(events, "run")) == 4 and of(events, "end")[0]["complete"], f"events: {events}")
for name in ("study.html", "accuracy-samples.svg", "accuracy-seconds.svg"):
    check("<svg" in (out / name).read_text(), f"{name}: no picture")
first = {name: (out / name / "seed-2" / "metrics.jsonl").stat().st_mtime_ns for name in NAMES}
check(rows(out / NAMES[1] / "seed-2")[3]["learning_rate"] >
      5 * rows(out / NAMES[0] / "seed-2")[3]["learning_rate"] > 0,
      "the settings of an entry change nothing")
measures = result(out)["schedules"][0]["runs"][0]["measures"]
shares = idle_of_rows(rows(out / NAMES[0] / "seed-1"))
check(any(key.startswith("idle.engine.") for key in shares), f"no waits in the rows: {shares}")
for key, share in shares.items():
    check(abs(measures.get(key, -1) - share) < 1e-9, f"{key}: {measures.get(key)}, by the rows {share}")
for role in ("engine", "trainer"):
    parts = sum(measures.get(f"{kind}.{role}", 0)
                for kind in ("busy", "transfer", "idle", "unaccounted"))
    check(abs(parts - 1) < 1e-9, f"the parts of {role}'s time make {parts}")

done, events = study(out, seeds=3)
check([event["seed"] for event in of(events, "begin")] == [3, 3], "runs that are done run again")
check(sum(event["before"] for event in of(events, "run")) == 4, "runs that were done are not told")
again = {name: (out / name / "seed-2" / "metrics.jsonl").stat().st_mtime_ns for name in NAMES}
check(first == again, "a run that is done was written again")

done, events = study(out, "--set", "actor.clip=0.3")
check(done.returncode == 1 and "another job" in done.stderr and "clip: 0.3" in done.stderr,
      f"another job in the same folder: {done.returncode}, {done.stderr}")

# ---- stopped, killed, failed ----------------------------------------------------------------------

LONG = ("--set", "steps=60", "--set", "checkpoint.keep=100")


def begun(out):
    rows_of_it = out / "sync" / "seed-1" / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if rows_of_it.exists() and len(rows_of_it.read_text().splitlines()) > 4:
            return
        time.sleep(0.01)
    check(False, "no rows came")


for number in (signal.SIGINT, signal.SIGKILL):
    out = work / f"stopped-{number}"
    line = command(out, *LONG, seeds=1, schedules="sync")
    process = subprocess.Popen(line, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    begun(out)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    check_nothing_left(out, sockets=number == signal.SIGINT)
    if number == signal.SIGINT:
        check(process.returncode == 130, f"stopped by Ctrl-C: {process.returncode}")
        check(not result(out)["complete"], "a study that was stopped says that it is complete")
    done, events = study(out, *LONG, seeds=1, schedules="sync")
    check(done.returncode == 0 and result(out)["complete"], f"going on: {done.stderr}")
    check([row["step"] for row in rows(out / "sync" / "seed-1")] == list(range(61)),
          "a run that went on lacks rows, or has them twice")

out = work / "failed"
done, events = study(out, seeds=1, fault="trainer:0:after_step:3:kill")
check(done.returncode == 1, f"a study with a failed run ends with {done.returncode}")
check(all("was killed by signal 9" in event["error"] for event in of(events, "run")),
      f"what failed is not told: {of(events, 'run')}")
made = result(out)["schedules"]
check([s["failed"] for s in made] == [1, 1] and made[0]["runs"][0]["state"] == "failed",
      f"failed runs are counted as {made}")
done, events = study(out, seeds=1)
check(done.returncode == 0 and [s["failed"] for s in result(out)["schedules"]] == [0, 0],
      "a run that failed is not tried again")

# ---- figures against numpy ------------------------------------------------------------------------

SEEDS = 8
EVALUATED = [{0: 0, 3: 3, 6: 6}, {0: 0, 3: 4, 6: 6}]  # of each entry, the version by the row's step
draw = numpy.random.default_rng(12)
out = work / "figures"
table = {}
for number, name in enumerate(NAMES):
    for seed in range(1, SEEDS + 1):
        folder = out / name / f"seed-{seed}"
        folder.mkdir(parents=True)
        run = [{"step": 0, "samples": 0, "step_seconds": 0.0, "eval_accuracy": 0.1, "loss": 0.5}]
        for step in range(1, 7):
            row = {"step": step, "samples": 16, "tokens": int(draw.integers(30, 60)),
                   "step_seconds": float(draw.uniform(0.5, 1.5)), "loss": float(draw.normal()),
                   "staleness_max": int(draw.integers(0, 3)),
                   "seconds": {"actor": float(draw.uniform())}}
            if step % 3 == 0:
                row["seconds"]["checkpoint"] = float(draw.uniform())
                row["eval_accuracy"] = float(min(1, 0.1 + 0.15 * step + 0.05 * draw.normal()))
                row["eval_version"] = EVALUATED[number][step]
            run.append(row)
        if (number, seed) == (0, 2):
            run[4]["loss"] = None
        if (number, seed) == (1, 3):
            run[6]["eval_accuracy"] = 0.05
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in run))
        table[number, seed] = run
done, events = study(out, "--accuracy", "0.6", seeds=SEEDS)
check(done.returncode == 0 and not of(events, "begin"), f"finished runs: {done.stderr}")
made = result(out)

time_of = {key: numpy.cumsum([row["step_seconds"] for row in run]) for key, run in table.items()}
equal = min(t[-1] for t in time_of.values())
check(made["samples"] == 96 and abs(made["seconds"] - equal) < 1e-9, "equal samples, equal time")


def measured(key):
    run, seconds = table[key], time_of[key]
    evaluated = EVALUATED[key[0]]
    steps = numpy.array(list(evaluated.values()))
    accuracy = numpy.array([run[i]["eval_accuracy"] for i in evaluated])
    fine = numpy.linspace(0, 6, 600001)
    above = numpy.nonzero(numpy.interp(fine, steps, accuracy) >= 0.6)[0]
    values = {"accuracy_end": accuracy[-1], "accuracy_at_samples": accuracy[-1],
              "accuracy_at_seconds": numpy.interp(equal, seconds[steps], accuracy),
              "samples_per_s": 96 / seconds[-1],
              "tokens_per_s": sum(row["tokens"] for row in run[1:]) / seconds[-1],
              "staleness_max": max(row["staleness_max"] for row in run[1:]),
              "seconds.actor": numpy.mean([row["seconds"]["actor"] for row in run[1:]]),
              "seconds.checkpoint": numpy.mean([row["seconds"].get("checkpoint", 0) for row in run[1:]])}
    if len(above):
        values["steps_to_accuracy"] = fine[above[0]]
    return values


def check_interval(what, got, values, below=None):
    """The ends are where 100,000 resamples by numpy say, within the noise of 10,000."""
    values = numpy.array(values)
    index = draw.integers(0, len(values), (100000, len(values)))
    means = values[index].mean(1)
    mean = values.mean()
    if below is not None:
        below = numpy.array(below)
        means, mean = means / below[index].mean(1), mean / below.mean()
    check(got["n"] == len(values) and abs(got["mean"] - mean) < 1e-5, f"{what}: {got}, mean {mean}")
    shares = [((means < got[end] - 1e-6).mean(), (means <= got[end] + 1e-6).mean())
              for end in ("low", "high")]
    check(shares[0][0] <= 0.033 and shares[0][1] >= 0.017 and shares[1][0] <= 0.983 and
          shares[1][1] >= 0.967, f"{what}: {got} holds {shares} of the resamples")


found = {key: measured(key) for key in table}
for name in found[0, 1].keys() | found[1, 1].keys():
    both = [seed for seed in range(1, SEEDS + 1) if name in found[0, seed] and name in found[1, seed]]
    for number in (0, 1):
        got = made["schedules"][number]["measures"][name]
        own = [found[number, seed][name] for seed in range(1, SEEDS + 1)
               if name in found[number, seed]]
        check_interval(f"{name} of {NAMES[number]}", got, own)
    a, b = ([found[number, seed][name] for seed in both] for number in (1, 0))
    check_interval(f"difference in {name}", got["difference"], numpy.subtract(a, b))
    if min(b) > 0:
        check_interval(f"ratio of {name}", got["ratio"], a, b)
check([s["diverged"] for s in made["schedules"]] == [1, 1], "runs that diverged are not counted")
why = [r["diverged"] for s in made["schedules"] for r in s["runs"] if "diverged" in r]
check("loss is not finite at step 4" in why[0] and "0.050 at the end" in why[1], f"diverged: {why}")
reached = [sum("steps_to_accuracy" in found[n, s] for s in range(1, SEEDS + 1)) for n in (0, 1)]
check([s["reached"] for s in made["schedules"]] == reached, f"reached: expected {reached}")
curve = made["schedules"][0]["curves"]["samples"]
at = numpy.mean([numpy.interp(curve[17]["x"], [0, 48, 96],
                              [row["eval_accuracy"] for row in table[0, s] if "eval_accuracy" in row])
                 for s in range(1, SEEDS + 1)])
check(len(curve) == 61 and curve[60]["x"] == 96 and abs(curve[17]["mean"] - at) < 1e-9, "the curve")
text = (out / "study.json").read_text()
study(out, "--accuracy", "0.6", seeds=SEEDS)
check(text == (out / "study.json").read_text(), "the same runs give other figures")

finish()
