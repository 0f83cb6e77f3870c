"""slime's prompts out of a queue of dray's, into which any processes put them."""
from __future__ import annotations

import copy
import json
import os
from pathlib import Path

from slime.rollout.data_source import DataSource as _Base
from slime.utils.types import Sample

from .. import objects
from .._declared import EEND, ENOENT
from .._library import DrayError, DrayTimeout
from ..queue import Queue

TIMEOUT = 600.0
_KNOWN = ("prompt", "messages", "label", "metadata")  # columns


def _write(path, data):
    """On the disk when this returns, as a whole: what it stands for is then let go of, for good where the queue has a
    journal."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    for folder in (path.parent, path.parent.parent):  # the latter has a name for the former, which may be new
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class DataSource(_Base):
    """--data-source-path dray.integrations.slime.DataSource. $DRAY_ADDRESS, $DRAY_QUEUE (samples) and $DRAY_TASK (rollout) say
    where prompts are: a row each, of the columns that the task needs among `prompt` (text) or `messages` (JSON), `label`
    and `metadata` (JSON). Groups that slime gives back come first.

    With --save, what was handed out is the queue's again where this process dies before the next save(), which stores
    what slime had given back; without, it is done with when it is handed out."""

    def __init__(self, args):
        self.args, self._given_back, self._held = args, [], []
        self._group, self._index = 0, 0
        self._task = os.environ.get("DRAY_TASK", "rollout")
        self._queue = Queue(os.environ.get("DRAY_QUEUE", "samples"), session="slime's data source", timeout=TIMEOUT)
        tasks = self._queue.status()["tasks_out"]
        if self._task not in tasks:
            raise ValueError(f"queue {self._queue.name}: a task {self._task} expected ($DRAY_TASK), found {', '.join(tasks)}")

    def get_samples(self, num_samples: int) -> list:
        """As many groups, or fewer, of n_samples_per_prompt samples; waits until there is one. DrayError (EEND): the
        queue has ended; DrayTimeout: nothing came for 600 s."""
        groups = self._given_back[:num_samples]
        if len(groups) < num_samples:
            groups += self._claimed(num_samples - len(groups), 0.0 if groups else TIMEOUT)
        self._given_back = self._given_back[num_samples:]
        return groups

    def _claimed(self, count, timeout):
        try:
            batch = self._queue.claim(self._task, count, up_to=True, timeout=timeout)
        except (TimeoutError, DrayError) as error:
            if timeout == 0 and (isinstance(error, TimeoutError) or error.code == EEND):
                return []
            raise
        try:
            columns = {}
            for name in _KNOWN:
                try:
                    columns[name] = batch.list(name)
                except DrayError as error:
                    if error.code != ENOENT:
                        raise
            if not columns.keys() & {"prompt", "messages"}:
                raise ValueError(f"task {self._task} of queue {self._queue.name}: the column prompt or messages expected "
                                 f"among what it needs, found {', '.join(columns) or 'neither'}")
            made = [self._group_of({name: values[row] for name, values in columns.items()}) for row in range(batch.rows)]
        except BaseException:
            batch.free()
            raise
        if getattr(self.args, "save", None):
            self._held.append(batch)
        else:
            batch.commit()
        return made

    def _group_of(self, row):
        prompt = json.loads(row["messages"]) if "messages" in row else row["prompt"]
        label = row.get("label")
        label = None if isinstance(label, str) and not label else label  # a number may be 0
        first = Sample(prompt=prompt, label=label, metadata=json.loads(row.get("metadata") or "{}"))
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = copy.deepcopy(first)
            sample.group_index, sample.index = self._group, self._index
            self._index += 1
            group.append(sample)
        self._group += 1
        return group

    def add_samples(self, samples: list) -> None:
        """Groups that were not finished: they are handed out again, first of all."""
        for group in samples:
            if len(group) != self.args.n_samples_per_prompt:
                raise ValueError(f"add_samples: groups of {self.args.n_samples_per_prompt} samples expected, found one of "
                                 f"{len(group)}")
        self._given_back += samples

    def _path(self, folder, rollout_id):
        return Path(folder) / "rollout" / f"dray_data_source_{rollout_id}"

    def save(self, rollout_id) -> None:
        if not getattr(self.args, "save", None):
            return
        path = self._path(self.args.save, rollout_id)
        state = {"group": self._group, "index": self._index,
                 "given_back": [[sample.to_dict() for sample in group] for group in self._given_back]}
        _write(path, objects.dumps(state))
        held, self._held, failure = self._held, [], None
        for batch in held:  # all of them: one that is let go of without a commit is handed out again
            try:
                batch.commit()
            except DrayTimeout as error:
                self._held.append(batch)  # for the next save()
                failure = failure or error
            except DrayError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def load(self, rollout_id=None) -> None:
        """What slime had given back at that rollout. DrayError (EPROTO) and others name a file that is not as save wrote
        it; none changes nothing, as slime loads before its first checkpoint, too."""
        if getattr(self.args, "load", None) is None:
            return
        path = self._path(self.args.load, rollout_id)
        if path.is_file():
            state = objects.loads(path.read_bytes())
            self._given_back = [[Sample.from_dict(sample) for sample in group] for group in state["given_back"]]
            self._group, self._index = state["group"], state["index"]

    def __len__(self) -> int:
        """Prompts that the queue has."""
        return sum(partition["rows"] for partition in self._queue.status()["partitions"])
