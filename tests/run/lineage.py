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
DATA = words(("data.source=jsonl", "data.path=train.jsonl", "data.eval_path=held.jsonl"))


def known_schedules():
    table = subprocess.run([PROGRAM, "run", "--settings", "--json"], capture_output=True, text=True, check=True)
    settings = {line["key"]: line for line in map(json.loads, table.stdout.splitlines())}
    return settings["schedule"]["accepts"].split(", ")


class Bounds:
    """What a schedule promises, as its definition says it, for a staleness that is the job's."""

    def __init__(self, schedule, staleness=0):
        self.staleness = {"sync": 0, "one_step_async": 1, "rolling": 1, "async": staleness}[schedule]
        self.exact = schedule in ("sync", "one_step_async")

    def versions(self, step):
        """The oldest and the newest version that may make a token of what the step trains."""
        oldest = max(0, step - 1 - self.staleness)
        return oldest, oldest if self.exact else step - 1


def record_of(folder):
    return folder.with_name(folder.name + ".record")


def begin_record(folder):
    """The environment for a start of the run. What is recorded from here on is of this start."""
    with record_of(folder).open("a") as file:
        file.write('{"task": "start"}\n')
    return {"DRAY_RECORD": str(record_of(folder))}


def recorded(folder, *arguments, **options):
    return run(folder, *arguments, environment=begin_record(folder), **options)


def lines(folder):
    """What was recorded; a start says which step it went on from, if anything was recorded of it."""
    found, start = [], None
    for line in map(json.loads, record_of(folder).read_text().splitlines()):
        if line["task"] == "start":
            start = line
        elif start:
            found.append({**start, "from": line["from"]})
            start = None
        if line["task"] != "start":
            found.append(line)
    return found


def lineage(folder, last, task="actor"):
    """step -> rows (partition, slot, version, prompt, oldest and newest version of its tokens) that
    the checkpoint of step `last` is made of; of the task `critic` the value model's."""
    steps = collections.defaultdict(list)
    for line in lines(folder):
        if line["task"] == "start":  # what came after the checkpoint that this one went on from is void
            for step in [s for s in steps if s > line["from"]]:
                del steps[step]
        if line["task"] == task:
            steps[line["step"]] += [(line["partition"], slot, version, tuple(prompt), oldest, newest)
                                    for slot, version, prompt, oldest, newest in line["rows"]]
    return {step: steps[step] for step in steps if step <= last}


def newest(folder):
    """The step of the newest checkpoint; -1: there is none."""
    latest = folder / "checkpoints" / "latest"
    return int(os.readlink(latest).split("-")[1]) if latest.is_symlink() else -1


def check_lineage(folder, what, bounds, whole=None):
    """Each sample trained once, every prompt of the data once a pass, no version out of bounds: of the oldest token,
    as staleness is not judged by the last one (verl #7569)."""
    last = newest(folder)
    trained = lineage(folder, last)
    check(sorted(trained) == list(range(1, last + 1)), f"{what}: steps {sorted(trained)} of {last}")
    samples, prompts = collections.Counter(), collections.Counter()
    for step, trained_rows in trained.items():
        check(len(trained_rows) == BATCH, f"{what}: step {step} of {len(trained_rows)} samples")
        low, high = bounds.versions(step)
        wrong = [row for row in trained_rows if not low <= row[4] <= row[5] <= high or row[2] != row[4]]
        check(not wrong, f"{what}: step {step} trained versions (tag, oldest, newest token) "
                         f"{sorted({(row[2], *row[4:]) for row in wrong})}, expected {low} to {high}")
        # A run that goes on may put what is left of a step's prompts at other places.
        samples.update((*row[:2], row[3]) for row in trained_rows)
        prompts.update(row[3] for row in trained_rows)
    twice = [sample for sample, times in samples.items() if times != 1]
    check(not twice, f"{what}: trained twice: {twice}")
    odd = {prompt: times for prompt, times in prompts.items() if times != SAMPLES}
    if last == STEPS:  # a pass over the data
        check(len(prompts) == STEPS * PROMPTS and not odd, f"{what}: prompts lost or repeated: {odd}")
    else:
        check(all(times < SAMPLES for times in odd.values()), f"{what}: prompts repeated: {odd}")
    if whole:
        check(trained == lineage(whole, last), f"{what}: other samples than the undisturbed run's")


def check_bound(folder, what, bounds):
    """At no time are more samples made than those of the steps that are trained and of 1 + staleness more. That
    a step is trained may be recorded after samples that its version made: one more is allowed."""
    begun, trained, made = 0, 0, set()
    for line in lines(folder):
        if line["task"] == "start":  # samples that a journal has kept are not counted
            begun, trained, made = line["from"], line["from"] * BATCH, set()
        if line["task"] == "actor":
            trained += len(line["rows"])
        if line["task"] == "rollout":
            made.update((line["partition"], row[0]) for row in line["rows"])
            steps, done = begun + -(-len(made) // BATCH), trained // BATCH
            check(steps <= done + 1 + bounds.staleness + 1,
                  f"{what}: samples of {steps} steps were made when {done} were trained")
