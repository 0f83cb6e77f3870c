"""Samples are the same whether the engine closes its micro-batches, lets rows come and go, or cuts them, also
where it is killed meanwhile."""
import shlex

from jobs import *

GRADER = """
import json, sys
with open(sys.argv[1], "a") as seen:
    for line in sys.stdin:
        row = json.loads(line)
        print(json.dumps(row, sort_keys=True), file=seen, flush=True)
        print(len(row["response"]) / 8, flush=True)
"""
grader = work / "grader.py"
grader.write_text(GRADER)


def samples(name, *settings, **options):
    seen = work / f"{name}.seen"
    asked = shlex.join([sys.executable, str(grader), str(seen)])
    # The weights stay as they are, so that the last bits of a batch's logits have no consequences.
    settings += ("actor.lr=1e-30", "rollout.max_new_tokens=6", "reward.rule=command",
                 f"reward.command={asked}")
    done = run(work / name, *words(settings), **options)
    check(done.returncode == 0, f"{name}: {done.stderr}")
    check([row["samples"] for row in rows(work / name) if row["step"]] == [16] * 6, name)
    return sorted(seen.read_text().splitlines())


closed = samples("closed")
check(len(closed) == 6 * 16 + 3 * 12, f"{len(closed)} samples were graded")
check(len(set(closed)) > 48, "samples are hardly different")
for name, more, options in (
        ("continuous", (), {}),
        ("fifo", ("queue.policy=fifo", "rollout.micro_batch=7"), {}),
        ("group", ("queue.policy=group", "actor.micro_batch=8"), {}),
        ("killed", (), {"fault": "engine:0:committed:2:kill"}),
):
    found = samples(name, "rollout.batching=continuous", *more, **options)
    check(found == closed, f"{name}: other samples")

ahead = "schedule=one_step_async"
for name, more, options in (
        ("ahead", ("rollout.batching=continuous",), {}),
        ("cut", ("rollout.partial_tokens=3",), {}),
        ("cut in continuous", ("rollout.partial_tokens=2", "rollout.batching=continuous"), {}),
        ("cut and killed", ("rollout.partial_tokens=1", "queue.max_attempts=2"),
         {"fault": "engine:1:generated:3:kill"}),
):
    found = samples(name, ahead, *more, **options)
    check(found == closed, f"{name}: other samples")

bad = work / "bad.yaml"
bad.write_text(TINY.replace("micro_batch: 4}", "partial_tokens: 3}", 1))
done = run(work / "bad", job=bad)
check(done.returncode == 2 and "bad.yaml:8" in done.stderr and
      "rollout.partial_tokens: expected 0 with schedule sync" in done.stderr, done.stderr)

finish()
