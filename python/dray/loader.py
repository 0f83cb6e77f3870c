"""A loop over a queue's rows: StreamDataLoader."""
from __future__ import annotations

import copy
import ctypes as c
import functools
import pickle
import sys
from typing import Any, Iterable, Iterator, Optional

import numpy as np

from . import _library as _l
from ._library import DrayError, call, library
from .columns import Pins, Rows
from .queue import Queue, Session, claim_options


class Batch(Rows):
    """What the loop works on: see columns.Rows; set() its outputs before the next one is asked for.
    micro, micros, number: which micro-batch of how many, of which batch."""

    def __init__(self, loader: StreamDataLoader, load: _l.Load):
        self._loader, self._load = loader, load
        super().__init__(loader._pins, load.batch, load.first, load.rows, loader._framework,
                         loader._copy,
                         lambda: call("dray_loader_hold", loader._loader, c.byref(load)))
        self.micro, self.micros, self.number = load.micro, load.micros, load.number

    _KEPT = Rows._KEPT + ("micro", "micros", "number")

    def set(self, name: str, values: Any, offsets: Any = None) -> None:
        """An output column for the rows of this (micro-)batch: as Queue.insert takes them."""
        self._loader._set(self, name, values, offsets)

    def fail(self, reason: str) -> None:
        """Gives the rows back as a failed attempt."""
        self._loader._fail(self, reason)


def _worker():
    """Whether this is a worker of torch's DataLoader."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def _opened(options):
    return StreamDataLoader(**options)


@functools.lru_cache(maxsize=None)
def _dataset():
    """StreamDataLoader as torch knows it; without torch, as it is."""
    try:
        from torch.utils.data import IterableDataset
    except ImportError:
        return StreamDataLoader
    return type("StreamDataLoader", (StreamDataLoader, IterableDataset),
                {"__module__": __name__, "__doc__": StreamDataLoader.__doc__})


class StreamDataLoader:
    """Iterates over the batches of a task, claimed ahead and balanced; what the loop has finished
    (it asked for the next) is committed. Ends when the partition is finished, or the queue.

    columns: those to read ahead of the loop; others of the task are read when a batch is asked for
    them. Outputs are set with Batch.set. micro=True: yields micro-batches, of which `micros` belong
    together, the number that Megatron's forward_backward_func wants; num_microbatches() tells it
    before the first is asked for. framework: "numpy" or "torch"; copy: see columns.Rows. Further
    keywords are those of dray_claim_options: policy="lockstep", dp_rank, dp_size, peer, peers, token_cap, ...

    For torch's DataLoader (batch_size=None), where torch was imported before, or framework="torch", it
    is an IterableDataset. Each worker opens a session of its own and commits a batch when it hands it
    over, with the columns that are read ahead; so the task may write no columns. Its length is known,
    in batches, where the partition is named and sealed, and the rank claims all of it.

    A finished batch that could not be committed because its rows were taken back or cleared is left
    out and counted (counts()["lost"]); strict=True raises DrayError.
    One thread at a time, and not across fork: open one in each worker."""

    def __new__(cls, *arguments: Any, **more: Any) -> StreamDataLoader:
        if cls is StreamDataLoader and ("torch" in sys.modules or more.get("framework") == "torch"):
            cls = _dataset()
        return super().__new__(cls)

    def __init__(self, task: str, columns: Iterable[str], count: int, queue: str = "samples",
                 partition: Optional[str] = None, address: Optional[str] = None, ahead: int = 1,
                 ahead_rows: int = 0, ahead_bytes: int = 0, micro: bool = False,
                 framework: str = "numpy", copy: Optional[bool] = None, strict: bool = False,
                 timeout: float = 60.0, policy: str = "fifo", max_hold: float = 0.0, **claim: Any):
        self._closed = True
        _l.check_word("framework", framework, ("numpy", "torch"))
        if isinstance(columns, str):
            raise ValueError(f"columns: a list of names expected, found {columns!r}")
        self._columns, self._copy, self._strict = list(columns), copy, strict
        self._framework, self._peer = framework, claim.get("peer", 0)
        self._given, self._waiting, self._parts, self._failed, self._lost = None, [], {}, {}, 0
        self._again = dict(task=task, columns=self._columns, count=count, queue=queue,
                           partition=partition, address=address, ahead=ahead, ahead_rows=ahead_rows,
                           ahead_bytes=ahead_bytes, micro=micro, framework=framework, copy=copy,
                           strict=strict, timeout=timeout, policy=policy, max_hold=max_hold, **claim)
        self._queue, self._task, self._partition, self._count = queue, task, partition, count
        self._address, self._timeout = address, timeout
        options = claim_options(task, count, partition, policy, timeout, max_hold, **claim)
        self._session = Session(queue, address, rank=claim.get("dp_rank", 0), timeout=timeout)
        loader = c.c_void_p()
        try:
            call("dray_loader_open", self._session.queue,
                 _l.options(_l.LoaderOptions, claim=c.pointer(options), ahead=ahead, ahead_rows=ahead_rows,
                            ahead_bytes=ahead_bytes, micro=int(micro)), c.byref(loader))
        except (DrayError, ValueError):
            self._session.close()
            raise
        self._loader = loader
        self._pins = Pins(f"the loader of {task}", self._session,
                          lambda batch: library().dray_loader_unhold(loader, batch))
        self._closed = False

    # ---- iterating

    def __iter__(self) -> Iterator[Batch]:
        if _worker():
            return self._within_worker()
        return self

    def _within_worker(self):
        """A session of the worker's own. What was handed over is committed: the next one may be asked
        for only when all workers have ended, as DataLoader keeps their order."""
        with StreamDataLoader(**self._again) as own:
            for batch in iter(own.__next__, None):
                handed = pickle.loads(pickle.dumps(batch))
                try:
                    own.flush()
                except DrayError as error:  # its rows were taken back or cleared: it is left out
                    if error.name not in ("ESTALE", "EGONE") or self._strict:
                        raise
                    continue
                yield handed

    def __len__(self) -> int:
        """Batches of the partition, from its first to its last row."""
        if self._partition is None or self._again.get("dp_size", 1) > 1 or self._again["micro"] or \
                self._again.get("up_to"):
            raise TypeError("the length is known of whole batches of a partition that is named")
        with Queue(self._queue, self._address, timeout=self._timeout) as queue:
            found = [p for p in queue.status()["partitions"] if p["name"] == self._partition]
        if not found or not found[0]["sealed"]:
            raise TypeError(f"the length of partition {self._partition} is not known: it is not sealed")
        rows = found[0]["rows"] - found[0]["tasks"][self._task]["dead"]
        return -(-rows // self._count)

    def __bool__(self) -> bool:
        return True

    def __reduce__(self):
        return _opened, (self._again,)

    def __next__(self) -> Batch:
        self._finish()
        if not self._waiting:
            self._take()
        self._given = self._waiting.pop(0)
        return self._given

    def num_microbatches(self) -> int:
        """Of the batch that comes next (or is under way): what every rank of a lockstep group has
        the same number of; 0 at the end."""
        if self._waiting:
            return self._waiting[0].micros
        if self._given is not None and self._given.micro + 1 < self._given.micros:
            return self._given.micros
        self._finish()
        try:
            self._take()
        except StopIteration:
            return 0
        return self._waiting[0].micros

    def fileno(self) -> int:
        with self._pins.briefly():
            return self._session.fileno()

    def _check(self):
        if self._closed:
            raise DrayError(-15, "the loader is closed")

    def _take(self):
        self._check()
        while True:
            load = _l.Load()
            try:
                self._pins.call("dray_loader_next", self._loader, _l.WAIT_DEFAULT, c.byref(load))
                break
            except DrayError as error:
                if error.name == "EEND":
                    raise StopIteration from None
                lost = self.counts()["lost"]
                if error.name not in ("ESTALE", "EGONE") or self._strict or lost == self._lost:
                    raise
                self._lost = lost
        batch = Batch(self, load)
        try:
            for name in self._columns:
                batch[name]  # read now
        except Exception as error:
            self._unread(batch, error)
            raise
        self._waiting.append(batch)

    def _unread(self, batch, error):
        """Gives the rows of a batch that cannot be read back as a failed attempt: the loop never has it, and cannot."""
        self._given = batch
        try:
            self._fail(batch, f"{type(error).__name__}: {error}"[:200])
        except Exception:  # the error of the read is the one to be raised
            last = batch.micro + 1 == batch.micros
            self._given, self._failed = None, {} if last else self._failed

    def _finish(self):
        given, self._given = self._given, None
        if given is None:
            return
        try:
            self._settle(given, self._failed)
            self._pins.call("dray_loader_done", self._loader, c.byref(given._load))
            self._failed = {} if given.micro + 1 == given.micros else self._failed
            given._live = False
        except BaseException:  # it is still in the loop's hands, with its outputs
            self._given = given
            raise

    def _fail(self, batch, reason):
        if batch is not self._given:
            raise ValueError("this batch is not in the loop's hands any more")
        failed = {**self._failed, batch.micro: batch.rows}
        self._settle(batch, failed)
        self._pins.call("dray_loader_fail", self._loader, c.byref(batch._load), _l.reason(reason))
        self._failed = {} if batch.micro + 1 == batch.micros else failed
        self._given, batch._live = None, False

    def flush(self) -> None:
        """Finishes what the loop has, and commits it now."""
        self._check()
        self._finish()
        self._pins.call("dray_loader_flush", self._loader)

    def counts(self) -> dict:
        """Batches, rows, committed and lost ones, and how long the loop waited, so far."""
        counts = _l.LoaderCounts()
        self._pins.call("dray_loader_count", self._loader, c.byref(counts))
        return {name: getattr(counts, name) for name, _ in counts._fields_[1:]}

    def close(self) -> None:
        """Commits what was finished; what the loop still works on is given back."""
        if not self._closed:
            self._pins.close(self._end)

    def _end(self):
        self._closed = True
        for batch in self._waiting + [self._given]:
            if batch is not None:
                batch._live = False
        self._given, self._waiting = None, []
        library().dray_loader_close(self._loader)

    def __enter__(self) -> StreamDataLoader:
        return self

    def __exit__(self, kind, value, trace):
        if kind is None and not self._closed:
            self._finish()
        self.close()

    def __del__(self):
        self.close()

    # ---- outputs

    def _set(self, batch, name, values, offsets):
        if batch is not self._given:
            raise ValueError("this batch is not in the loop's hands any more")
        given = self._session.values(self._pins, name, values, offsets)
        given.for_rows(batch.rows)
        parts = self._parts.setdefault(name, {})
        for micro, other in parts.items():
            if micro != batch.micro:
                given.beside(other)
        given.keep()
        parts[batch.micro] = given

    def _settle(self, batch, failed):
        """With the last micro-batch: all outputs as one column each of the batch. `failed`: the rows of those
        micro-batches that failed, by number; where nothing was set for one, nothing is read of it either."""
        if batch.micro + 1 < batch.micros:
            return
        if not self._peer and len(failed) < batch.micros:
            self._hand_in(batch, failed)
        self._parts = {}

    def _hand_in(self, batch, failed):
        for name, parts in self._parts.items():
            for micro in failed.keys() - parts.keys():
                parts[micro] = next(iter(parts.values())).nothing(failed[micro])
            if sorted(parts) != list(range(batch.micros)):
                raise ValueError(f"{name} is set for micro-batches {sorted(parts)} of "
                                 f"{batch.micros}")
            put = [parts[i] for i in range(batch.micros)]
            whole = copy.copy(put[0])  # the parts stay as they are, to be set again after an error
            whole.raw = np.concatenate([part.raw for part in put])
            if whole.offsets is not None:
                joined = [np.zeros(1, dtype=np.uint64)]
                for part in put:
                    joined.append(part.offsets[1:] - part.offsets[0] + joined[-1][-1])
                whole.offsets = np.concatenate(joined).astype(np.uint64)
            self._pins.call("dray_batch_set", batch._batch, c.byref(whole.data()))
