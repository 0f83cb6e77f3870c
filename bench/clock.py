"""The clock job against its closed forms: what schedules should take, and what they take.

    bench/clock.py [--seeds N] [--steps N] [--out DIR] [--set KEY=VALUE ...] ENTRY...

runs `dray study examples/clock.yaml` over the entries (as of --schedules) and prints, for each, seconds a
step after the warm-up, the closed form of its schedule, and their ratio. R: a step's rollout, T: its
training, both computed from the job file alone: lengths are drawn here again, by Philox4x32-10 (Salmon et
al., SC11), another implementation than the one that is measured.

    sync, stream: false        R + T
    sync                       R + (1 - 1/k) T, with k optimiser steps that need the trainer's log-probs;
                               R + T/m with one step over m micro-batches (T <= R)
    one_step_async, rolling,   max(R, T): each step's own for one_step_async, of their means for the others
    async
"""
import argparse
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy

ROOT = pathlib.Path(__file__).resolve().parent.parent
WARMUP = 4  # steps in which the loop fills


# ---- what the engine draws (src/engine/pace.c, src/base/random.c) ---------------------------------

def philox(counter, key):
    """Counters as arrays of four words, keys of two; the first two words of the result."""
    c, k = [numpy.uint64(x) for x in counter], [numpy.uint64(x) for x in key]
    low, shift = numpy.uint64(0xFFFFFFFF), numpy.uint64(32)
    for _ in range(10):
        p0, p1 = numpy.uint64(0xD2511F53) * c[0], numpy.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> shift) ^ c[1] ^ k[0], p1 & low, (p0 >> shift) ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + numpy.uint64(0x9E3779B9)) & low, (k[1] + numpy.uint64(0xBB67AE85)) & low]
    return c[1] << shift | c[0]


def unit(seed, stream, i):
    low = 0xFFFFFFFF
    word = philox((i & low, i >> 32, stream & low, stream >> 32), (seed & low, seed >> 32))
    return int(word >> numpy.uint64(11)) * 2.0**-53


def normal(seed, stream, i):
    u, v = 1 - unit(seed, stream, 2 * i), unit(seed, stream, 2 * i + 1)
    return math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)


def length(job, step, slot):
    """Tokens of the response in this slot of this step."""
    c, draws, stream = job["clock"], 1 << 20, step << 32 | slot
    group = step << 32 | slot // job["rollout"]["samples"]
    rho, variance = c["correlation"], math.log(1 + c["variation"] ** 2)
    z = (math.sqrt(rho) * normal(~job["seed"] & (2**64 - 1), group, draws) +
         math.sqrt(1 - rho) * normal(job["seed"], stream, draws))
    tokens = c["tokens"] * math.exp(math.sqrt(variance) * z - variance / 2)
    if unit(job["seed"], stream, 4 * draws) < c["tail_share"]:
        tokens *= c["tail"]
    return min(max(1, math.floor(tokens + 0.5)), job["rollout"]["max_new_tokens"])


# ---- closed forms ---------------------------------------------------------------------------------

def role_of(job, task):
    return next(role for role in job["roles"] if task in role["tasks"])


def rollout_seconds(job, step):
    """Each engine's micro-batches behind each other, as if they were dealt in turn."""
    batch = job["rollout"]["prompts"] * job["rollout"]["samples"]
    micro, engines = job["rollout"]["micro_batch"], role_of(job, "rollout").get("instances", 1)
    sums = [0] * engines
    for i, first in enumerate(range(0, batch, micro)):
        sums[i % engines] += max(length(job, step, slot)
                                 for slot in range(first, min(first + micro, batch)))
    return max(sums) * job["clock"]["token_seconds"]


def closed_form(job):
    """Seconds a step after the warm-up, R and T."""
    batch = job["rollout"]["prompts"] * job["rollout"]["samples"]
    steps, parts = job["steps"], job["actor"]["optimiser_steps"]
    rollout = [rollout_seconds(job, step) for step in range(1, steps + 1)]
    train = batch * (job["clock"]["train_seconds"] + job["clock"]["log_prob_seconds"])
    after = rollout[WARMUP:]
    mean = sum(after) / len(after)
    if job["schedule"] == "one_step_async":
        took = sum(max(r, train) for r in after) / len(after)
    elif job["schedule"] != "sync":
        took = max(mean, train)
    elif job.get("stream") is False:
        took = mean + train
    elif parts > 1:
        took = mean + (1 - 1 / parts) * train
    else:
        took = mean + train * job["actor"]["micro_batch"] / batch
    return took, mean, train


# ---- measuring ------------------------------------------------------------------------------------

def resolved(folder):
    """config.yaml of a run: JSON, or the block YAML that dray writes."""
    import yaml
    return yaml.safe_load((folder / "config.yaml").read_text())


def measured(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return sum(row["step_seconds"] for row in rows[1 + WARMUP:]) / len(rows[1 + WARMUP:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="3")
    parser.add_argument("--out")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("entries", nargs="+")
    a = parser.parse_args()
    out = pathlib.Path(a.out or tempfile.mkdtemp(prefix="dray-clock-"))
    program = os.environ.get("DRAY_PROGRAM") or str(ROOT / "build/release/dray")
    command = [program, "study", str(ROOT / "examples/clock.yaml"), "--seeds", a.seeds, "--out", str(out),
               "--schedules", ",".join(a.entries)]
    for setting in a.set:
        command += ["--set", setting]
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(done.returncode)
    study = json.loads((out / "study.json").read_text())
    print(f"{'':44} {'R':>8} {'T':>8} {'closed':>8} {'took':>8} {'ratio':>6}  (spread)   idle of the trainer")
    for entry in study["schedules"]:
        rows = []
        for run in entry["runs"]:
            folder = out / entry["schedule"] / f"seed-{run['seed']}"
            rows.append((*closed_form(resolved(folder)), measured(folder)))
        form, rollout, train, took = (sum(r[i] for r in rows) / len(rows) for i in range(4))
        ratios = [r[3] / r[0] for r in rows]
        idle = entry["measures"].get("idle.trainer", {}).get("mean", float("nan"))
        print(f"{entry['schedule']:44} {rollout:8.4f} {train:8.4f} {form:8.4f} {took:8.4f} {took / form:6.3f}"
              f"  ({min(ratios):.3f} to {max(ratios):.3f})  {100 * idle:.1f} %")


if __name__ == "__main__":
    main()
