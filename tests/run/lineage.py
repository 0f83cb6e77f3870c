"""What runs have trained, from what their roles recorded (DRAY_RECORD): a checker over all samples in
the lineage of the last checkpoint. Used by the tests beside it."""
import collections
import random

from jobs import *

STEPS, PROMPTS, SAMPLES = 6, 4, 4
BATCH = PROMPTS * SAMPLES
numbers = random.Random(5).sample(range(10, 100), STEPS * PROMPTS + 12)
for name, part in (("train", numbers[12:]), ("held", numbers[:12])):
    (work / f"{name}.jsonl").write_text("".join(
        json.dumps({"prompt": f"{n}=", "answer": str(n)[::-1]}) + "\n" for n in part))
DATA = [word for setting in ("data.source=jsonl", "data.path=train.jsonl", "data.eval_path=held.jsonl")
        for word in ("--set", setting)]
# How far behind the trainer's version the samples of step k may be: oldest and newest version.
VERSIONS = {"sync": lambda k: (k - 1, k - 1),
            "one_step_async": lambda k: (max(0, k - 2), max(0, k - 2))}


def record_of(folder):
    return folder.with_name(folder.name + ".record")


def recorded(folder, *arguments, **options):
    return run(folder, *arguments, environment={"DRAY_RECORD": str(record_of(folder))}, **options)


def lines(folder):
    return [json.loads(line) for line in record_of(folder).read_text().splitlines()]


def lineage(folder, last):
    """step -> rows [partition, slot, version, prompt] that the checkpoint of step `last` is made of."""
    steps, pid = collections.defaultdict(list), None
    for line in lines(folder):
        if line["task"] != "actor":
            continue
        if line["pid"] != pid:  # what came after the checkpoint that this one went on from is void
            pid = line["pid"]
            for step in [s for s in steps if s > line["from"]]:
                del steps[step]
        steps[line["step"]] += [[line["partition"], slot, version, tuple(prompt)]
                                for slot, version, prompt in line["rows"]]
    return {step: steps[step] for step in steps if step <= last}


def newest(folder):
    return int(os.readlink(folder / "checkpoints" / "latest").split("-")[1])


def check_lineage(folder, what, schedule="sync", whole=None):
    """Each sample trained once, every prompt of the data once a pass, no version out of bounds."""
    last = newest(folder)
    trained = lineage(folder, last)
    check(sorted(trained) == list(range(1, last + 1)), f"{what}: steps {sorted(trained)} of {last}")
    samples, prompts = collections.Counter(), collections.Counter()
    for step, trained_rows in trained.items():
        check(len(trained_rows) == BATCH, f"{what}: step {step} of {len(trained_rows)} samples")
        low, high = VERSIONS[schedule](step)
        for partition, slot, version, prompt in trained_rows:
            samples[partition, slot] += 1
            prompts[prompt] += 1
            check(low <= version <= high, f"{what}: step {step} trained version {version}")
    twice = [sample for sample, times in samples.items() if times != 1]
    check(not twice, f"{what}: trained twice: {twice}")
    if last == STEPS:  # a pass over the data
        check(len(prompts) == STEPS * PROMPTS and set(prompts.values()) == {SAMPLES},
              f"{what}: prompts lost or repeated: {sorted(prompts.values())}")
    if whole:
        check(trained == lineage(whole, last), f"{what}: other samples than the undisturbed run's")


def check_bound(folder, what, open_steps):
    """At no time were more samples made than the steps that may be open take."""
    made, done, pid = collections.Counter(), 0, None
    for line in lines(folder):
        if line["task"] == "actor" and line["pid"] != pid:
            pid, done = line["pid"], line["from"]
        if line["task"] == "actor":
            done = max(done, line["step"] - 1)  # all before it are trained
        if line["task"] == "rollout":
            check(line["step"] <= done + open_steps + 1,
                  f"{what}: samples of step {line['step']} were made when {done} were trained")
