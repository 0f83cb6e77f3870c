"""Compares the schedules of the tool job: how much an asynchronous one gains when responses wait for a tool.

    bench/tool.py [--rounds N] [--steps N] [--set KEY=VALUE ...] [--json] [--strict] [ENTRY...]

runs examples/tool.yaml once for each round and entry. An entry is a schedule with settings: "async:update=anew". The
entries are interleaved. For each it prints the medians of these figures:

    steps/s, samples/s  after the warm-up
    calls               the calls of the tool for a sample
    waiting             the mean number of rows that wait for the tool
    limit               steps per second when nothing but the tool takes time, with all rows in flight, or when nothing
                        but the processors do, with both cores; the smaller of the two
    cpu                 the share of two cores that the whole run takes

The last line compares the fastest `async` with the fastest `sync`, with the ratios of each round. --json prints an
object a line. --strict makes the exit status 1 when that ratio is below 1.6, or when a `sync` takes more than 60 % of
two cores. Other work on the machine affects the result."""
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import jobs
from clock import WARMUP

CORES = 2
ENTRIES = ["sync", "sync:rollout.batching=closed", "sync:stream=false", "sync:actor.optimiser_steps=4",
           "sync:roles.engine.ranks=2:roles.trainer.ranks=2", "async:update=in_flight", "async:update=anew"]


def used():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run(out, entry, extra):
    schedule, *settings = entry.split(":")
    command = jobs.command("run", "tool", out, (f"schedule={schedule}", *settings, *extra))
    before, begin = used(), time.monotonic()
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(done.returncode)
    return read_run(out, entry, (used() - before) / (time.monotonic() - begin) / CORES)


def read_run(out, entry, share):
    job = json.loads((out / "config.json").read_text())
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()][1 + WARMUP:]
    seconds, samples = (sum(row[key] for row in rows) for key in ("step_seconds", "samples"))
    turns = sum(row["turns_mean"] * row["samples"] for row in rows) / samples
    answer = (job["tool"]["min_seconds"] + job["tool"]["max_seconds"]) / 2
    busy = sum(role["cpu"] for row in rows for role in row["time"].values())
    waits = samples * turns * answer / job["rollout"]["micro_batch"]
    return {"entry": entry, "steps_per_s": len(rows) / seconds, "samples_per_s": samples / seconds, "turns": turns,
            "waiting": samples * turns * answer / seconds, "limit_steps_per_s": len(rows) / max(waits, busy / CORES),
            "cpu_share": share}


def summary(rounds):
    """Returns the medians of each entry over the rounds, and the ratios between the fastest entries of both kinds."""
    entries = [{key: statistics.median(one[i][key] for one in rounds) if key != "entry" else first[key]
                for key in first} for i, first in enumerate(rounds[0])]

    def fastest(kind, of):
        return max(one["samples_per_s"] for one in of if one["entry"].startswith(kind))

    kinds = {one["entry"].partition(":")[0] for one in entries}
    if not {"sync", "async"} <= kinds:
        return entries, None
    ratios = [fastest("async", one) / fastest("sync", one) for one in rounds]
    return entries, {"ratio": fastest("async", entries) / fastest("sync", entries), "ratios": ratios}


def show(entries, ratio):
    print(f"{'the tool job':50} steps/s samples/s  calls waiting   limit  cpu")
    for one in entries:
        print(f"{one['entry']:50} {one['steps_per_s']:7.3f} {one['samples_per_s']:9.1f} {one['turns']:6.2f}"
              f" {one['waiting']:7.1f} {one['limit_steps_per_s']:7.3f} {one['cpu_share']:4.0%}")
    if ratio:
        print(f"async / sync, the fastest: {ratio['ratio']:.2f}"
              f" ({', '.join(f'{one:.2f}' for one in ratio['ratios'])} by round)")


def main():
    a = jobs.options(__doc__, "json strict", rounds=1, steps=40, entries=ENTRIES).parse_args()
    every = [f"{key}={a.steps}" for key in ("steps", "eval.every", "checkpoint.every")]
    with tempfile.TemporaryDirectory(prefix="dray-tool-") as work:
        rounds = [[run(pathlib.Path(work) / f"{i}-{k}", entry, every + a.set) for k, entry in enumerate(a.entries)]
                  for i in range(a.rounds)]
    entries, ratio = summary(rounds)
    if a.json:
        for one in entries + ([ratio] if ratio else []):
            print(json.dumps(one))
    else:
        show(entries, ratio)
    busy = any(one["entry"].startswith("sync") and one["cpu_share"] > 0.6 for one in entries)
    if a.strict and (busy or not ratio or ratio["ratio"] < 1.6):
        sys.exit(1)


if __name__ == "__main__":
    main()
