"""A step that asks for samples of the newest version (fresh_share), where all that there are are older and no prompts
are left: long answers keep every step open of which prompts are in the queue. The driver puts in those of one more.
The samples are made by a program that decides when each is there, so that it comes to this in step 6, always; they are
trained by the built-in trainer, and by one in Python, which knows nothing of it."""
from tiny_python import *

# Of 16 groups of two samples the first one of each of six steps takes long. So many others are made ahead of the trainer
# that steps take as many of the version before as they may, and none is too old. In step 6 those are taken; what is
# left then is two groups of version 4, and the long ones.
ROLLOUT = """
import json, os

GROUPS, AHEAD, STEPS = 16, 8, 6
TAKEN = 2 * ((STEPS - 1) * GROUPS + GROUPS // 2)


def claimed(queue):
    actors = [partition["tasks"]["actor"] for partition in queue.status()["partitions"]]
    return sum(actor["committed"] + actor["taken"] for actor in actors)


def newest(queue):
    return queue.status()["admission"]["version"]


def take(queue, task, rows):
    try:
        batch = queue.claim(task, rows, up_to=True, timeout=0.01)
        batch.task = task
        return batch
    except dray.DrayTimeout:
        return None


def give(batch, version):
    answer(batch, version)
    batch.commit()
    batch.free()


with dray.Role() as role:
    queue, slow, begun, made = role.queue, [], [], 0
    while claimed(queue) < TAKEN:
        version = newest(queue)
        looked = take(queue, "eval", 12)
        if looked is not None:
            give(looked, version)
        wanted = (version + 1) * GROUPS + AHEAD if version + 2 < STEPS else STEPS * (GROUPS - 1)
        batch = take(queue, "rollout", 2) if made + len(begun) < wanted else None
        if batch is not None:
            (slow if batch.slots[0] == 0 and len(slow) < STEPS else begun).append((batch, version))
        if made + len(begun) == wanted:  # before the trainer can go on
            for one in begun:
                give(*one)
            begun, made = [], wanted
    for batch, version in slow:
        give(batch, version)
    for number, batch in enumerate(role.batches(count=2)):
        if not number:
            with open(os.environ["DRAY_RUN"] + "/next", "w") as file:
                json.dump([batch.partition, claimed(queue) - TAKEN], file)
        answer(batch, newest(queue))
"""
SETTINGS = ("schedule=async", "staleness=1", "fresh_share=0.5", "steps=8", "rollout.prompts=16", "rollout.samples=2",
            "advantage.micro_batch=2", "reward.micro_batch=2", "reference.enabled=false", "eval.every=8",
            "eval.micro_batch=12", "actor.optimiser_steps=1", "actor.old_log_prob=rollout", "limits.wait_seconds=10")
for name, job in (("built-in", job_with("long", ROLLOUT, trainer="")), ("python", job_with("long", ROLLOUT))):
    folder = work / name
    done = run(folder, *words(SETTINGS), job=job)
    check(done.returncode == 0, f"{name}: {done.stderr}")
    after = (folder / "next").read_text() if (folder / "next").exists() else "nothing"
    check(after == '["step-000007", 0]', f"{name}: what came after the long samples: {after}")
    found = [(row["step"], row["samples"], row["staleness_max"]) for row in rows(folder)[1:]]
    for step in (2, 4, 6, 8):  # a checkpoint says of each group whether it is trained: what is not comes again
        feed = json.loads((folder / f"checkpoints/step-00000{step}/dray.json").read_text())["feed"]
        known = 16 * (feed["first"] - 1) + sum(len(one["trained"]) for one in feed["steps"])
        check(known == 16 * step, f"{name}: step {step}: {known} groups are trained: {feed}")
    check([row[:2] for row in found] == [(step, 32) for step in range(1, 9)] and max(row[2] for row in found) <= 1,
          f"{name}: steps of {found}")
finish()
