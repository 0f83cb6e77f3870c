"""A program of a run's role in Python, as its argument names it, that appends what it commits to $DRAY_RECORD, as the
built-in ones do (lineage.py). Each rank says what it has of a batch."""
import json
import os
import runpy
import sys

from dray.role import Batch, Role
from dray.steps import Step

settle, take, set_column, set_tag = Role._settle, Step._take, Batch.set, Batch.set_tag


def remember_column(batch, name, values, *more):
    if name == "response_version":
        batch.made = values
    set_column(batch, name, values, *more)


def remember_tag(batch, key, values):
    if key == "version":
        batch.made_by = values
    set_tag(batch, key, values)


def taken(step):
    found = take(step)
    if found:
        step._next.of_step = step.number
    return found


def line_of(role, batch):
    trains, prompts = batch.task == "actor", batch.list("prompt")
    step = batch.of_step if trains else int(batch.tag("step")[0])
    tags = batch.tag("version") if trains else batch.made_by
    versions = batch.list("response_version") if trains else batch.made
    return {"task": batch.task, "pid": os.getpid(), "from": role.step, "step": step, "partition": batch.partition,
            "rows": [[int(batch.slots[i]), int(tags[i]), [int(token) for token in prompts[i]],
                      int(min(versions[i])), int(max(versions[i]))] for i in range(batch.rows) if batch.weights[i]]}


def recorded(role):
    """Rows that are committed cannot be read any more, and only those that are committed are written down."""
    lines = [line_of(role, batch) for batch in role._hand
             if batch.task in ("rollout", "actor") and batch._live and not batch._settled]
    settle(role)
    with open(os.environ["DRAY_RECORD"], "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


Role._settle, Step._take, Batch.set, Batch.set_tag = recorded, taken, remember_column, remember_tag
if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")
