"""The clock job against its closed forms: what schedules should take, and what they take.

    bench/clock.py [--suite NAME] [--slower F] [--seeds N] [--out DIR] [--set KEY=VALUE ...] [--json] [--quick]
                   [--strict] [ENTRY...]

runs `dray study examples/clock.yaml` over the entries (as of --schedules), or those of a suite (below; without either
`equal`), and prints for each: seconds a step between the warm-up and the last step, the closed form of its schedule,
their ratio, how much faster than the first entry it is, what the trainer's idle time is (its waits, of all of its time)
and what the closed form says of it, and the entry's limit: 1.05 times the closed form where a suite says nothing else.

--slower: a suite's sleeps are that many times as long, for a machine that does other things, too. --json: one object a
line. --quick: one seed and few steps. --strict: exit status 1 where an entry misses its limit.

R: a step's rollout, T: its training, both computed from the job file alone: lengths are drawn here again, by
Philox4x32-10 (Salmon et al., SC11), another implementation than the one that is measured.

    sync, stream: false        R + T
    sync                       R + (1 - 1/k) T, with k optimiser steps that need the trainer's log-probs;
                               R + T/m with one step over m micro-batches (T <= R)
    one_step_async, rolling,   max(R, T) where all responses are of one length. Else the recursion that defines the
    async                      schedule: samples of step k are begun when version k - 1 - staleness is there, by the
                               engine that is free first; a trainer takes one micro-batch after the other, in the order
                               of the slots or of completion, as soon as it is there (`pipeline`)

Suites:

    equal      rollout time = training time; one_step_async against sync with stream: false, and streamed sync
    capacity   lengths vary by 0.3, rollout capacity is 1.15 times training: the trainer's idle time
    tail       one response in 100 is 100 times as long, capacity as before: async with cuts
    rolling    2 and 3 engines that take weights in turns, and how long each pauses for that (bench/pauses.py)
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
WARMUP = 4  # steps in which the loop fills; the last one, behind which no prompts come, is left out, too


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
    """The closed micro-batches of a step: each takes as long as its longest."""
    return [max(tokens[first:first + micro]) for first in range(0, len(tokens), micro)]


def rollout_seconds(job, step):
    """Closed: each engine's micro-batches behind each other, as if they were dealt in turn. Continuous: tokens of
    all rows, divided by the rows that are under way at once."""
    tokens, micro, engines = lengths(job, step), job["rollout"]["micro_batch"], engines_of(job)
    if job["rollout"]["batching"] == "continuous":
        return sum(tokens) / (min(micro, len(tokens)) * engines) * job["clock"]["token_seconds"]
    took = parts(tokens, micro)
    return max(sum(took[i::engines]) for i in range(engines)) * job["clock"]["token_seconds"]


def train_seconds(job):
    return batch_of(job) * (job["clock"]["train_seconds"] + job["clock"]["log_prob_seconds"])


class Rollout:
    """Engines, or with continuous batching their slots, of which the one that is free first takes what comes next."""

    def __init__(self, job):
        continuous = job["rollout"]["batching"] == "continuous"
        self.job, self.micro = job, 1 if continuous else job["rollout"]["micro_batch"]
        slots = min(job["rollout"]["micro_batch"], batch_of(job)) if continuous else 1
        self.free = [0.0] * (engines_of(job) * slots)

    def make(self, step, begin):
        """When each group of the step is there, if its samples may be begun at `begin`."""
        ends, tokens, group = [], lengths(self.job, step), self.job["rollout"]["samples"]
        for took in parts(tokens, self.micro):
            ends.append(max(self.free[0], begin) + took * self.job["clock"]["token_seconds"])
            heapq.heapreplace(self.free, ends[-1])
        return [(max(ends[slot // self.micro] for slot in range(first, first + group)), step, first)
                for first in range(0, len(tokens), group)]


def train(job, groups, now):
    """When a step's training ends that may begin at `now`. The optimiser's second step and those behind it wait until
    all samples have their log-probs of the parameters before the first."""
    ready = [end for end, *_ in groups for _ in range(job["rollout"]["samples"])]
    first_part, micro = len(ready) // job["actor"]["optimiser_steps"], job["actor"]["micro_batch"]
    for first in range(0, len(ready), micro):
        now = max(now, max(ready[first:first + micro] if first < first_part else ready))
        now += len(ready[first:first + micro]) * train_seconds(job) / len(ready)
    return now


def pipeline(job):
    """When each step ends: [0, first step's end, ...]."""
    behind = job["staleness"] + 1 if job["schedule"] == "async" else 2
    rollout, there, ends, made = Rollout(job), [], [0.0], 0
    for step in range(1, job["steps"] + 1):
        while made < min(step - 1 + behind, job["steps"]):
            made += 1
            there += rollout.make(made, ends[max(0, made - behind)])
        # `async` trains what is complete first, the others the step's own.
        there.sort(key=None if job["schedule"] == "async" else lambda group: group[1:])
        taken, there = there[:job["rollout"]["prompts"]], there[job["rollout"]["prompts"]:]
        ends.append(train(job, taken, ends[-1]))
    return ends


def closed_form(job):
    """Seconds a step in the steps that count, R and T."""
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

CAPACITY = 1.15  # of rollout, over training's
PACE = {"token_seconds": 0.01, "tokens": 8, "variation": 0.3, "correlation": 0.5, "tail": 1, "tail_share": 0}
SHAPE = {"prompts": 8, "samples": 4, "micro_batch": 8, "max_new_tokens": 1024, "batching": "closed"}
CUTS = "update=in_flight:rollout.partial_tokens=32"
LARGER = ["model.hidden_size=256", "model.intermediate_size=1024", "model.layers=2"]


def settings_of(clock, rollout):
    return [f"{part}.{key}={value}" for part, values in (("clock", clock), ("rollout", rollout))
            for key, value in values.items()]


def balanced(clock, rollout, steps):
    """Settings with which training takes CAPACITY times as long as rollout, on average."""
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
    """{cause: share of the role's time}."""
    whole, found = 0, {}
    for row in rows:
        time = row["time"][role]
        whole += row["step_seconds"] * time["processes"]
        for cause, seconds in time["wait"].items():
            found[cause] = found.get(cause, 0) + seconds
    return {cause: seconds / whole for cause, seconds in found.items()}


def look_at_pauses(folder, steps):
    """Of updates after the warm-up: pauses without the copies, their CPU time, and their time without a core; and the
    most engines out at once, in one run."""
    found = [update for update in pauses.updates(folder) if WARMUP <= update.version < steps]
    return [(update.pause - update.copy, update.cpu, update.queued) for update in found], pauses.out_at_once(found)


def look_at(out, entry):
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
            more, out_at_once = look_at_pauses(folder, job["steps"])
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


LIMITS = {  # name: (what is bounded, the sign, how the limit is written)
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
        seen = look_at(out, entry)
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
