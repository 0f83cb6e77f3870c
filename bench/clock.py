"""The clock job against its closed forms: what schedules should take, and what they take.

    bench/clock.py [--seeds N] [--out DIR] [--set KEY=VALUE ...] [--json] [--quick] [--strict] [ENTRY...]

runs `dray study examples/clock.yaml` over the entries (as of --schedules) and prints, for each, seconds a
step after the warm-up, the closed form of its schedule, and their ratio, with --json one object a line.
--quick: one seed and few steps. --strict: exit status 1 where a step takes more than 1.05 of its closed
form. R: a step's rollout, T: its
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

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOW = 0xFFFFFFFF
WARMUP = 4  # steps in which the loop fills


# ---- what the engine draws (src/engine/pace.c, src/base/random.c) ---------------------------------

def philox(c, k):
    """The first two words of the result, as one number."""
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 & LOW, p0 >> 32 ^ c[3] ^ k[1], p0 & LOW]
        k = [k[0] + 0x9E3779B9 & LOW, k[1] + 0xBB67AE85 & LOW]
    return c[1] << 32 | c[0]


def unit(seed, stream, i):
    word = philox([i & LOW, i >> 32, stream & LOW, stream >> 32], [seed & LOW, seed >> 32])
    return (word >> 11) * 2.0**-53


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

def measured(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return sum(row["step_seconds"] for row in rows[1 + WARMUP:]) / len(rows[1 + WARMUP:])


def look_at(out, entry):
    rows = []
    for run in entry["runs"]:
        folder = out / entry["schedule"] / f"seed-{run['seed']}"
        job = dict(entry["settings"], seed=run["seed"])
        rows.append((*closed_form(job), measured(folder)))
    form, rollout, train, took = (sum(r[i] for r in rows) / len(rows) for i in range(4))
    ratios = [r[3] / r[0] for r in rows]
    return {"entry": entry["schedule"], "rollout_seconds": rollout, "train_seconds": train,
            "closed_form_seconds": form, "step_seconds": took, "ratio": took / form,
            "ratio_least": min(ratios), "ratio_most": max(ratios),
            "trainer_idle": entry["measures"].get("idle.trainer", {}).get("mean"),
            "samples_per_s": entry["measures"]["samples_per_s"]["mean"]}


def show(seen, first):
    idle = "-" if seen["trainer_idle"] is None else f"{100 * seen['trainer_idle']:.1f} %"
    print(f"{seen['entry']:40} {seen['rollout_seconds']:8.4f} {seen['train_seconds']:8.4f}"
          f" {seen['closed_form_seconds']:8.4f} {seen['step_seconds']:8.4f} {seen['ratio']:6.3f}"
          f" ({seen['ratio_least']:.3f} to {seen['ratio_most']:.3f})"
          f" {first['step_seconds'] / seen['step_seconds']:6.3f} {idle:>8} {seen['samples_per_s']:8.0f}")


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out")
    parser.add_argument("--set", action="append", default=[])
    for flag in ("--json", "--quick", "--strict"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("entries", nargs="*", default=["sync:actor.optimiser_steps=4", "sync"])
    return parser.parse_args()


def main():
    a = parse()
    made = None if a.out else tempfile.TemporaryDirectory(prefix="dray-clock-")
    out = pathlib.Path(a.out or made.name)
    program = os.environ.get("DRAY_PROGRAM") or str(ROOT / "build/release/dray")
    command = [program, "study", str(ROOT / "examples/clock.yaml"), "--out", str(out),
               "--seeds", "1" if a.quick else str(a.seeds), "--schedules", ",".join(a.entries)]
    for setting in (["steps=12"] if a.quick else []) + a.set:
        command += ["--set", setting]
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(done.returncode)
    study = json.loads((out / "study.json").read_text())
    seen = [look_at(out, entry) for entry in study["schedules"]]
    if not a.json:
        print(f"{'the clock job: seconds a step':40} {'R':>8} {'T':>8} {'closed':>8} {'took':>8}  ratio"
              f" (spread)         faster    idle samples/s")
    for one in seen:
        if a.json:
            print(json.dumps(one))
        else:
            show(one, seen[0])
    if a.strict and any(one["ratio"] > 1.05 for one in seen):
        sys.exit(1)


if __name__ == "__main__":
    main()
