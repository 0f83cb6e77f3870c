"""Compares the steps of the clock job under several schedules with the closed forms of those schedules.

    bench/clock.py [--suite NAME] [--slower F] [--seeds N] [--out DIR] [--set KEY=VALUE ...] [--json] [--quick]
                   [--strict] [ENTRY...]

runs `dray study examples/clock.yaml` with the given entries (in the form of --schedules), or with those of a suite
(`equal` when neither is given). For each entry it prints the seconds of a step, as the mean over the steps between the
warm-up and the last one, the closed form of its schedule, the ratio of the two, the speed relative to the first entry,
the trainer's idle time (its waits as a share of all of its time), the closed form's idle time, and whether the entry
keeps its limits. An entry that belongs to no suite may take 1.05 times its closed form.

--slower multiplies the sleeps of a suite, for a machine that has other work. --json prints one object a line. --quick
uses one seed and few steps. --strict makes the exit status 1 when an entry misses a limit.

In the closed forms, R is the time of a step's rollout, and T that of its training. Both are computed from the job file
alone. The lengths are drawn with an implementation of Philox4x32-10 (Salmon et al., SC11) that is not the measured one.

    sync, stream: false        R + T
    sync                       R + (1 - 1/k) T, with k optimiser steps that need the trainer's log-probs;
                               R + T/m with one step over m micro-batches (T <= R)
    one_step_async, rolling,   max(R, T) when all responses have the same length. Otherwise it is the recursion that
    async                      defines the schedule (`pipeline`). The samples of step k can begin when version
                               k - 1 - staleness is ready, on the first engine that is free. The trainer takes one
                               micro-batch after the other as soon as each is complete, in the order of the slots or
                               of completion.

The suites are:

    equal      The rollout takes as long as the training. The suite compares one_step_async with sync, streamed or not.
    capacity   Lengths vary by 0.3, and the rollout's capacity is 1.15 times that of training. The suite measures the
               trainer's idle time.
    tail       One response in 100 is 100 times as long, with the same capacity. The suite measures async with cuts.
    rolling    2 and 3 engines take weights one after the other. The suite measures the pause of each (bench/pauses.py).
"""
import heapq
import json
import math
import pathlib
import subprocess
import sys
import tempfile

import jobs
import pauses

LOW = 0xFFFFFFFF
WARMUP = 4  # steps in which the loop fills; the last step, after which no prompts come, is left out, too


# ---- the engine's random lengths (src/engine/pace.c, src/base/random.c) ----------------------------

def philox(c, k):
    """Returns the first two words of the result as one number."""
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
    """Returns the tokens of the response in this slot of this step."""
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

def mean(values):
    return sum(values) / len(values)


def role_of(job, task):
    return next(role for role in job["roles"] if task in role["tasks"])


def batch_of(job):
    return job["rollout"]["prompts"] * job["rollout"]["samples"]


def engines_of(job):
    return role_of(job, "rollout").get("instances", 1)


def lengths(job, step):
    return [length(job, step, slot) for slot in range(batch_of(job))]


def parts(tokens, micro):
    """Returns the lengths of a step's closed micro-batches. A micro-batch is as long as its longest response."""
    return [max(tokens[first:first + micro]) for first in range(0, len(tokens), micro)]


def rollout_seconds(job, step):
    """Returns the seconds of a step's rollout. With closed batches, micro-batches are dealt to the engines in turn, and
    each engine works on one after the other. With continuous batching, it is the tokens of all rows divided by the
    number of rows that are generated at the same time."""
    tokens, micro, engines = lengths(job, step), job["rollout"]["micro_batch"], engines_of(job)
    if job["rollout"]["batching"] == "continuous":
        return sum(tokens) / (min(micro, len(tokens)) * engines) * job["clock"]["token_seconds"]
    took = parts(tokens, micro)
    return max(sum(took[i::engines]) for i in range(engines)) * job["clock"]["token_seconds"]


def train_seconds(job):
    return batch_of(job) * (job["clock"]["train_seconds"] + job["clock"]["log_prob_seconds"])


class Rollout:
    """The engines, or with continuous batching their slots. The next micro-batch or row goes to the first one that is
    free."""

    def __init__(self, job):
        continuous = job["rollout"]["batching"] == "continuous"
        self.job, self.micro = job, 1 if continuous else job["rollout"]["micro_batch"]
        slots = min(job["rollout"]["micro_batch"], batch_of(job)) if continuous else 1
        self.free = [0.0] * (engines_of(job) * slots)

    def make(self, step, begin):
        """Returns the time at which each group of the step is complete, when its samples may begin at `begin`: (time,
        step, first slot)."""
        ends, tokens, group = [], lengths(self.job, step), self.job["rollout"]["samples"]
        for took in parts(tokens, self.micro):
            ends.append(max(self.free[0], begin) + took * self.job["clock"]["token_seconds"])
            heapq.heapreplace(self.free, ends[-1])
        return [(max(ends[slot // self.micro] for slot in range(first, first + group)), step, first)
                for first in range(0, len(tokens), group)]


def train(job, groups, now):
    """Returns the time at which a step's training ends when it may begin at `now`. Optimiser steps after the first wait
    until all samples have the log-probs of the parameters before the first."""
    ready = [end for end, *_ in groups for _ in range(job["rollout"]["samples"])]
    first_part, micro = len(ready) // job["actor"]["optimiser_steps"], job["actor"]["micro_batch"]
    for first in range(0, len(ready), micro):
        now = max(now, max(ready[first:first + micro] if first < first_part else ready))
        now += len(ready[first:first + micro]) * train_seconds(job) / len(ready)
    return now


def pipeline(job):
    """Returns the time at which each step ends: [0, end of the first step, ...]."""
    behind = job["staleness"] + 1 if job["schedule"] == "async" else 2
    rollout, there, ends, made = Rollout(job), [], [0.0], 0
    for step in range(1, job["steps"] + 1):
        while made < min(step - 1 + behind, job["steps"]):
            made += 1
            there += rollout.make(made, ends[max(0, made - behind)])
        # `async` trains the groups that are complete first, the other schedules those of the step itself.
        there.sort(key=None if job["schedule"] == "async" else lambda group: group[1:])
        taken, there = there[:job["rollout"]["prompts"]], there[job["rollout"]["prompts"]:]
        ends.append(train(job, taken, ends[-1]))
    return ends


def closed_form(job):
    """Returns the seconds of a step, R and T, as means over the measured steps."""
    between = range(1 + WARMUP, job["steps"])
    rollout, training = mean([rollout_seconds(job, step) for step in between]), train_seconds(job)
    steps = job["actor"]["optimiser_steps"]
    if job["schedule"] != "sync":
        ends = pipeline(job)
        took = (ends[-2] - ends[WARMUP]) / len(between)
    elif job.get("stream") is False:
        took = rollout + training
    elif steps > 1:
        took = rollout + (1 - 1 / steps) * training
    else:
        took = rollout + training * job["actor"]["micro_batch"] / batch_of(job)
    return took, rollout, training


# ---- suites ---------------------------------------------------------------------------------------

CAPACITY = 1.15  # the capacity of rollout, divided by that of training
PACE = {"token_seconds": 0.01, "tokens": 8, "variation": 0.3, "correlation": 0.5, "tail": 1, "tail_share": 0}
SHAPE = {"prompts": 8, "samples": 4, "micro_batch": 8, "max_new_tokens": 1024, "batching": "closed"}
CUTS = "update=in_flight:rollout.partial_tokens=32"
LARGER = ["model.hidden_size=256", "model.intermediate_size=1024", "model.layers=2"]


def settings_of(clock, rollout):
    return [f"{part}.{key}={value}" for part, values in (("clock", clock), ("rollout", rollout))
            for key, value in values.items()]


def balanced(clock, rollout, steps):
    """Returns settings with which training takes on average CAPACITY times as long as rollout."""
    job = {"seed": 1, "clock": clock, "rollout": rollout, "roles": [{"tasks": ["rollout"]}]}
    took = mean([rollout_seconds(job, step) for step in range(1, steps + 1)])
    return settings_of(dict(clock, train_seconds=round(CAPACITY * took / batch_of(job), 7)), rollout)


def engines(count, token_seconds):
    return f"rolling:roles.engine.instances={count}:clock.token_seconds={token_seconds:g}"


def equal(slower):
    second = 0.01 * slower
    return ([f"clock.token_seconds={second}", f"clock.train_seconds={second}", "steps=24"],
            {"sync:stream=false": {"ratio": 1.05}, "sync": {"ratio": 1.05},
             "sync:actor.optimiser_steps=4": {"ratio": 1.05}, "one_step_async": {"ratio": 1.05, "faster": 1.8},
             engines(2, 2 * second): {"ratio": 1.05}, "async": {"ratio": 1.05}})


def capacity(slower):
    clock = dict(PACE, token_seconds=0.01 * slower)
    return (["steps=34", *balanced(clock, SHAPE, 100)],
            {"sync:stream=false": {}, "one_step_async": {"idle_off": 0.01}, "async:staleness=1": {"idle": 0.05},
             engines(2, 0.02 * slower): {}})


def tail(slower):
    clock = dict(PACE, token_seconds=0.01 * slower, tokens=4, tail=100, tail_share=0.01)
    return (["steps=12", *balanced(clock, dict(SHAPE, prompts=128, batching="continuous"), 24)],
            {"one_step_async": {}, "async:staleness=1": {}, f"async:staleness=1:{CUTS}": {"idle": 0.05}})


def rolling(slower):
    clock = dict(PACE, token_seconds=0.02 * slower, train_seconds=0.01 * slower)
    kept = {"pause_ms": 1, "out": 1}
    return (["steps=24", *LARGER, *settings_of(clock, SHAPE)],
            {engines(2, 0.02 * slower): kept, engines(3, 0.02 * slower): kept,
             engines(3, 0.004 * slower): dict(kept, out=2)})


SUITES = {"equal": equal, "capacity": capacity, "tail": tail, "rolling": rolling}


# ---- measuring ------------------------------------------------------------------------------------

def rows_between(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows[1 + WARMUP:-1]


def waits(rows, role):
    """Returns {cause: share of the role's time}."""
    whole, found = 0, {}
    for row in rows:
        time = row["time"][role]
        whole += row["step_seconds"] * time["processes"]
        for cause, seconds in time["wait"].items():
            found[cause] = found.get(cause, 0) + seconds
    return {cause: seconds / whole for cause, seconds in found.items()}


def read_pauses(folder, steps):
    """Returns, for each update after the warm-up of one run, its pause without the copy, the CPU time of that pause,
    and the time in it without a core. Also returns the largest number of engines that were out at the same time."""
    found = [update for update in pauses.updates(folder) if WARMUP <= update.version < steps]
    return [(update.pause - update.copy, update.cpu, update.queued) for update in found], pauses.out_at_once(found)


def read_entry(out, entry):
    seen = {"entry": entry["schedule"], "samples_per_s": entry["measures"]["samples_per_s"]["mean"]}
    runs, over, most = [], [], 0
    for run in entry["runs"]:
        folder = out / entry["schedule"] / f"seed-{run['seed']}"
        job, rows = dict(entry["settings"], seed=run["seed"]), rows_between(folder)
        form, rollout, training = closed_form(job)
        took = mean([row["step_seconds"] for row in rows])
        runs.append({"rollout_seconds": rollout, "train_seconds": training, "closed_form_seconds": form,
                     "step_seconds": took, "ratio": took / form,
                     "closed_form_idle": 1 - training / form, "trainer": waits(rows, role_of(job, "actor")["name"]),
                     "engine": waits(rows, role_of(job, "rollout")["name"])})
        if job["schedule"] == "rolling":
            more, out_at_once = read_pauses(folder, job["steps"])
            over, most = over + more, max(most, out_at_once)
    for key in runs[0]:
        if key in ("trainer", "engine"):
            causes = sorted({cause for one in runs for cause in one[key]})
            seen[f"{key}_waits"] = {cause: mean([one[key].get(cause, 0) for one in runs]) for cause in causes}
        else:
            seen[key] = mean([one[key] for one in runs])
    seen["ratio"] = seen["step_seconds"] / seen["closed_form_seconds"]
    seen["ratio_least"], seen["ratio_most"] = (bound(one["ratio"] for one in runs) for bound in (min, max))
    seen["trainer_idle"] = sum(seen["trainer_waits"].values())
    if over:
        for name, values in zip(("over_copy", "cpu", "queued"), zip(*over)):
            seen[f"pause_{name}_median_ms"] = 1e3 * sorted(values)[len(values) // 2]
            seen[f"pause_{name}_max_ms"] = 1e3 * max(values)
        seen["out_at_once"] = most
    return seen


LIMITS = {  # name: (the bounded figure, the sign, the text of the limit)
    "ratio": (lambda seen: seen["ratio"], "<=", "ratio {:.2f}"),
    "faster": (lambda seen: seen["faster"], ">=", "faster {:.1f}"),
    "idle": (lambda seen: seen["trainer_idle"], "<=", "idle {:.0%}"),
    "idle_off": (lambda seen: abs(seen["trainer_idle"] - seen["closed_form_idle"]), "<=", "idle off by {:.0%}"),
    "pause_ms": (lambda seen: seen["pause_over_copy_median_ms"], "<=", "pause: copy + {:g} ms"),
    "out": (lambda seen: seen["out_at_once"], "<=", "{} out"),
}


def judge(seen, limits):
    said, good = [], True
    for name, limit in limits.items():
        value, sign, text = LIMITS[name]
        kept = value(seen) <= limit if sign == "<=" else value(seen) >= limit
        good = good and kept
        said.append(text.format(limit) + (" kept" if kept else " MISSED"))
    seen["limits"], seen["kept"] = limits, good
    return "; ".join(said)


HEAD = (f"{'the clock job: seconds a step':62} {'R':>8} {'T':>8} {'closed':>8} {'took':>8}  ratio (spread)       "
        f" faster    idle  closed samples/s  limits")


def show(seen, said):
    print(f"{seen['entry']:62} {seen['rollout_seconds']:8.4f} {seen['train_seconds']:8.4f}"
          f" {seen['closed_form_seconds']:8.4f} {seen['step_seconds']:8.4f} {seen['ratio']:6.3f}"
          f" ({seen['ratio_least']:.3f} to {seen['ratio_most']:.3f}) {seen['faster']:6.3f}"
          f" {100 * seen['trainer_idle']:5.1f} % {100 * seen['closed_form_idle']:5.1f} %"
          f" {seen['samples_per_s']:8.0f}  {said}")
    if "out_at_once" in seen:
        said = [f"{what} {seen[f'pause_{name}_median_ms']:.2f} ms, most {seen[f'pause_{name}_max_ms']:.2f}"
                for name, what in (("over_copy", "pause - copy: median"), ("cpu", "CPU"), ("queued", "without a core"))]
        print(f"{'':62} {'; '.join(said)}; at most {seen['out_at_once']} out at once")


def main():
    parser = jobs.options(__doc__, slower=1.0, seeds=3, out="", entries=[])
    parser.add_argument("--suite", choices=sorted(SUITES))
    a = parser.parse_args()
    made = None if a.out else tempfile.TemporaryDirectory(prefix="dray-clock-")
    out = pathlib.Path(a.out or made.name)
    settings, limits = ([], {}) if a.entries and not a.suite else SUITES[a.suite or "equal"](a.slower)
    entries = a.entries or list(limits)
    command = jobs.command("study", "clock", out, settings + (["steps=12"] if a.quick else []) + a.set,
                           "--seeds", "1" if a.quick else str(a.seeds), "--schedules", ",".join(entries))
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
    if done.returncode:
        sys.exit(done.returncode)
    study = json.loads((out / "study.json").read_text())
    all_kept, first = True, None
    if not a.json:
        print(HEAD)
    for entry in study["schedules"]:
        seen = read_entry(out, entry)
        first = first or seen
        seen["faster"] = first["step_seconds"] / seen["step_seconds"]
        said = judge(seen, limits.get(entry["schedule"], {} if a.suite else {"ratio": 1.05}))
        all_kept = all_kept and seen["kept"]
        if a.json:
            print(json.dumps(seen))
        else:
            show(seen, said)
    if a.strict and not all_kept:
        sys.exit(1)


if __name__ == "__main__":
    main()
