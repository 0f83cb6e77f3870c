"""Compares the predictions of dray simulate and dray size for the clock job with runs of it.

    bench/simulate.py [--slower F] [--runs N] [--out DIR] [--set KEY=VALUE ...] [--json] [--quick] [--strict] [--size N]
                      [ENTRY...]

Services are fitted on one run of `sync` and one of `one_step_async`, with one engine and one trainer, and with eight
times as many steps. Each entry is then run N times (10), one run after the other with a seed each, and simulated. No entry is
part of the fit. The script prints the predicted and the measured seconds of a step, mean staleness, and idle time of
engines and trainer, and their differences. The limits are 5 % of the step, 0.1 of the staleness, and 2 points of the
idle time.

ENTRY selects entries by their names, below. --size N instead runs all splits of N devices once, with `async`, and
compares the fastest with the one that dray size chooses (limit: 5 %). --slower multiplies all sleeps, for a machine
that has other work. --quick makes 2 runs of each, and fits of twice
as many steps. --strict makes the exit status 1 when a limit is missed."""
import json
import pathlib
import subprocess
import sys
import tempfile

import jobs

WARMUP, STEPS = 4, 24
FIT = 8  # fits have so many times more steps, because the mean length of few responses varies too much
FIT_SEED = 101
ROLES = ("engine", "trainer")
ENTRIES = {
    "rolling, 3 engines": ["schedule=rolling", "roles.engine.instances=3"],
    "async 2, 3 engines": ["schedule=async", "staleness=2", "roles.engine.instances=3"],
    "async 2, 1 engine": ["schedule=async", "staleness=2"],
    "async 1, 7 engines": ["schedule=async", "staleness=1", "roles.engine.instances=7"],
    "one_step_async, 7 engines": ["schedule=one_step_async", "roles.engine.instances=7"],
}


def pace(slower):
    return [f"clock.token_seconds={0.01 * slower}", f"clock.train_seconds={0.006 * slower}", "clock.variation=0.3",
            f"steps={STEPS}"]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def run(folder, settings, seed):
    subprocess.run(jobs.command("run", "clock", folder, settings, "--seed", str(seed)), stdout=subprocess.DEVNULL,
                   check=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1 + WARMUP:-1]
    whole = {role: sum(row["step_seconds"] * row["time"][role]["processes"] for row in rows) for role in ROLES}
    return {"step": mean(row["step_seconds"] for row in rows), "staleness": mean(row["staleness_mean"] for row in rows),
            **{role: sum(sum(row["time"][role]["wait"].values()) for row in rows) / whole[role] for role in ROLES}}


def ask(verb, traces, settings, *more):
    words = jobs.command(verb, "clock", "", settings, "--json", *more)
    at = words.index("--out")
    del words[at:at + 2]
    for trace in traces:
        words += ["--trace", str(trace)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare(name, predicted, runs, a):
    measured = {key: mean(one[key] for one in runs) for key in runs[0]}
    seen = {"entry": name, "runs": len(runs), "predicted": predicted, "measured": measured,
            "step_ratio": predicted["step"] / measured["step"],
            "staleness_off": predicted["staleness"] - measured["staleness"],
            **{f"{role}_off": predicted[role] - measured[role] for role in ROLES}}
    seen["kept"] = (abs(seen["step_ratio"] - 1) <= 0.05 and abs(seen["staleness_off"]) <= 0.1
                    and all(abs(seen[f"{role}_off"]) <= 0.02 for role in ROLES))
    if a.json:
        print(json.dumps(seen), flush=True)
    else:
        idle = "".join(f"  {role} idle {100 * predicted[role]:5.1f} / {100 * measured[role]:5.1f} %" for role in ROLES)
        print(f"{name:28} step {predicted['step']:.4f} / {measured['step']:.4f} s ({seen['step_ratio']:.3f})"
              f"  staleness {predicted['staleness']:.3f} / {measured['staleness']:.3f}{idle}"
              f"  {'kept' if seen['kept'] else 'MISSED'}", flush=True)
    return seen["kept"]


def sizes(out, traces, settings, devices, a):
    settings = settings + ["schedule=async"]
    best = next(line for line in ask("size", traces, settings, "--devices", str(devices)) if line["event"] == "split")
    took = {}
    for engines in range(1, devices):
        took[engines] = run(out / f"size-{engines}", settings + [f"roles.engine.instances={engines}",
                                                                f"roles.trainer.ranks={devices - engines}"], 1)["step"]
    fastest = min(took, key=took.get)
    ratio = took[best["instances"]] / took[fastest]
    print(json.dumps({"size": devices, "chosen": best["instances"], "fastest": fastest, "ratio": ratio,
                      "steps": took}) if a.json else
          f"{devices} devices: dray size chooses {best['instances']} engines, {took[best['instances']]:.4f} s a step; "
          f"the fastest that was run has {fastest}, {took[fastest]:.4f} s: {ratio:.3f} times", flush=True)
    return ratio <= 1.05


def main():
    a = jobs.options(__doc__, slower=1.0, runs=10, out="", size=0, entries=[]).parse_args()
    made = None if a.out else tempfile.TemporaryDirectory(prefix="dray-simulate-")
    out = pathlib.Path(a.out or made.name)
    settings = pace(a.slower) + a.set
    traces = [out / schedule for schedule in ("sync", "one_step_async")]
    for number, trace in enumerate(traces):  # two seeds and many steps, because the fit has no other lengths
        run(trace, settings + [f"schedule={trace.name}", f"steps={(2 if a.quick else FIT) * STEPS}"], FIT_SEED + number)
    kept = True
    for name in [] if a.size else a.entries or ENTRIES:
        more = ENTRIES[name]
        line = ask("simulate", traces, settings + more)[0]
        predicted = {"step": line["step_seconds"]["mean"], "staleness": line["staleness_mean"]["mean"],
                     **{role: line["roles"][role]["idle"]["mean"] for role in ROLES}}
        runs = [run(out / f"{name}-{seed}", settings + more, seed) for seed in range(1, 1 + (2 if a.quick else a.runs))]
        kept = compare(name, predicted, runs, a) and kept
    if a.size:
        kept = sizes(out, traces, settings, a.size, a) and kept
    if a.strict and not kept:
        sys.exit(1)


if __name__ == "__main__":
    main()
