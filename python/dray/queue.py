"""Reading a queue from a training loop: StreamDataLoader.

Columns become (values, offsets). Ragged ones have the rows' values one after the other, row i from
offsets[i] to offsets[i + 1]; columns of a fixed shape have values of (rows, *shape), and offsets
None. Values lie in shared memory, read-only, where the rows of a batch follow each other there
(nothing is copied then); elsewhere, and on request, they are a writable copy. Arrays stay what they
are for as long as anybody has them."""
import ctypes as c
import os
import threading
import weakref

import numpy as np

from . import _library as _l
from ._library import DrayError, call, library

NUMPY = {name: np.dtype(dtype) for name, dtype in {
    "F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "U64": "u8", "I32": "i4", "U32": "u4",
    "I16": "i2", "U16": "u2", "I8": "i1", "U8": "u1", "BOOL": "?"}.items()}
TORCH = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def _torch():
    import torch
    return torch


def _text(value):
    return None if value is None else value.encode()


class Queue:
    """A session with the coordinator, and a queue of it that exists. One thread at a time."""

    def __init__(self, name="samples", address=None, role="task", rank=0, timeout=60.0):
        self._context, self._queue = c.c_void_p(), c.c_void_p()
        options = _l.Options(address=_text(address), name=b"python", role=_text(role), rank=rank,
                             timeout_ns=int(timeout * 1e9))
        self._pid = os.getpid()
        call("dray_open", options, c.byref(self._context))
        try:
            call("dray_queue_open", self._context, name.encode(), None, c.byref(self._queue))
        except DrayError:
            self.close()
            raise

    def fileno(self):
        return library().dray_queue_fd(self._queue)

    def close(self):
        queue, context = self._queue, self._context
        self._queue = self._context = None
        if os.getpid() != self._pid:
            return
        if queue:
            library().dray_queue_close(queue)
        if context:
            library().dray_close(context)


class _Ending:
    """Batches that arrays look into are let go of when the last array is gone: by the loader's next
    call, for arrays may end in any thread, or, once the loader is closed, at once."""

    def __init__(self, loader, queue):
        self.loader, self.queue = loader, queue
        self.lock, self.pid = threading.RLock(), os.getpid()
        self.held, self.ended, self.closed = {}, [], False  # batch: arrays over it

    def hold(self, load):
        if load.batch not in self.held:
            call("dray_loader_hold", self.loader, c.byref(load))
        with self.lock:
            self.held[load.batch] = self.held.get(load.batch, 0) + 1

    def drop(self, batch):
        if os.getpid() != self.pid:
            return
        with self.lock:
            self.ended.append(batch)
            if self.closed:
                self.sweep()

    def sweep(self):
        with self.lock:
            while self.ended:
                batch = self.ended.pop()
                self.held[batch] -= 1
                if self.held[batch]:
                    continue
                del self.held[batch]
                if self.closed:
                    library().dray_batch_free(batch)
                else:
                    library().dray_loader_unhold(self.loader, batch)
            if self.closed and not self.held:
                self.queue.close()

    def close(self):
        if self.closed or os.getpid() != self.pid:
            return
        with self.lock:
            self.sweep()
            library().dray_loader_close(self.loader)
            self.closed = True
            self.sweep()


class Batch(dict):
    """{column: (values, offsets)} of what the loop works on; set() its outputs before the next one
    is asked for."""

    def __init__(self, loader, load):
        super().__init__()
        self._loader, self._load = loader, load
        self.micro, self.micros, self.number = load.micro, load.micros, load.number
        self.partition = library().dray_batch_partition(load.batch).decode()
        rows = range(load.first, load.first + load.rows)
        found = [library().dray_batch_row(load.batch, i).contents for i in rows]
        self.slots = np.array([row.slot for row in found], dtype=np.int64)
        self.groups = np.array([row.group for row in found], dtype=np.int64)
        self.attempts = np.array([row.attempt for row in found], dtype=np.int64)
        self.weights = np.array([library().dray_batch_weight(load.batch, i) for i in rows])

    @property
    def rows(self):
        return self._load.rows

    def tag(self, key, default=np.nan):
        """The tag of every row, `default` where there is none."""
        values = np.full(self.rows, default)
        for i in range(self.rows):
            value = c.c_double()
            try:
                call("dray_batch_tag", self._load.batch, self._load.first + i, key.encode(),
                     c.byref(value))
            except DrayError as error:
                if error.name != "ENOENT":
                    raise
                continue
            values[i] = value.value
        return values

    def set(self, name, values, offsets=None):
        """An output column for the rows of this (micro-)batch: (rows, ...) or ragged."""
        self._loader._set(self, name, values, offsets)

    def set_tag(self, key, values):
        for i, value in enumerate(values):
            call("dray_batch_set_tag", self._load.batch, self._load.first + i, key.encode(),
                 float(value))

    def fail(self, reason):
        """Gives the rows back as a failed attempt."""
        self._loader._fail(self, reason)


def _view(address, size, on_end):
    """Bytes of shared memory as an array, and on_end when the last array over them is gone."""
    memory = (c.c_ubyte * size).from_address(address)
    weakref.finalize(memory, on_end).atexit = False
    array = np.frombuffer(memory, dtype=np.uint8)
    array.flags.writeable = False
    return array


class StreamDataLoader:
    """Iterates over the batches of a task, claimed ahead and balanced; what the loop has finished
    (it asked for the next) is committed. Ends when the partition is finished, or the queue.

    columns: those to read (all that the task needs must be named by the caller); outputs are set
    with Batch.set. micro=True: yields micro-batches, of which `micros` belong together, the number
    that Megatron's forward_backward_func wants; num_microbatches() tells it before the first is
    asked for. framework: "numpy" or "torch". copy=True: writable copies. Further keywords are those
    of dray_claim_options: policy="lockstep", dp_rank, dp_size, peer, peers, token_cap, ...

    A finished batch that could not be committed because its rows were taken back or cleared is left
    out and counted (counts()["lost"]); strict=True raises DrayError.
    One thread at a time, and not across fork: open one in each worker."""

    def __init__(self, task, columns, count, queue="samples", partition=None, address=None,
                 ahead=1, ahead_rows=0, ahead_bytes=0, micro=False, framework="numpy", copy=False,
                 strict=False, timeout=60.0, policy="fifo", max_hold=0.0, **claim):
        if framework not in ("numpy", "torch"):
            raise ValueError("framework: 'numpy' or 'torch' expected, found %r" % (framework,))
        if policy not in _l.POLICIES:
            raise ValueError("policy: one of %s expected, found %r" % (_l.POLICIES, policy))
        self._columns, self._copy, self._strict = list(columns), copy, strict
        self._as_torch, self._peer = framework == "torch", claim.get("peer", 0)
        self._given, self._waiting, self._parts, self._lost = None, [], {}, 0
        self._closed = True
        claim = {key: _text(value) if isinstance(value, str) else value
                 for key, value in claim.items()}
        options = _l.Claim(task=task.encode(), partition=_text(partition), count=count,
                           policy=_l.POLICIES.index(policy), timeout_ns=int(timeout * 1e9),
                           max_hold_ns=int(max_hold * 1e9), **claim)
        self._queue = Queue(queue, address, rank=claim.get("dp_rank", 0), timeout=timeout)
        loader = c.c_void_p()
        try:
            call("dray_loader_open", self._queue._queue,
                 _l.LoaderOptions(claim=c.pointer(options), ahead=ahead, ahead_rows=ahead_rows,
                                  ahead_bytes=ahead_bytes, micro=int(micro)), c.byref(loader))
        except DrayError:
            self._queue.close()
            raise
        self._ending = _Ending(loader, self._queue)
        self._closed = False

    # ---- iterating

    def __iter__(self):
        return self

    def __next__(self):
        self._finish()
        if not self._waiting:
            self._take()
        self._given = self._waiting.pop(0)
        return self._given

    def num_microbatches(self):
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

    def fileno(self):
        return self._queue.fileno()

    def _check(self):
        if self._closed:
            raise DrayError(-15, "the loader is closed")
        self._ending.sweep()

    def _take(self):
        self._check()
        while True:
            load = _l.Load()
            try:
                call("dray_loader_next", self._ending.loader, _l.WAIT_DEFAULT, c.byref(load))
                break
            except DrayError as error:
                if error.name == "EEND":
                    raise StopIteration from None
                lost = self.counts()["lost"]
                if error.name not in ("ESTALE", "EGONE") or self._strict or lost == self._lost:
                    raise
                self._lost = lost
        batch = Batch(self, load)
        for name in self._columns:
            batch[name] = self._read(load, name)
        self._waiting.append(batch)

    def _finish(self):
        given, self._given = self._given, None
        if given is None:
            return
        try:
            if given.micro + 1 == given.micros and not self._peer:
                self._hand_in(given)
            call("dray_loader_done", self._ending.loader, c.byref(given._load))
        except DrayError:
            self._given = given
            raise

    def _fail(self, batch, reason):
        if batch is not self._given:
            raise ValueError("this batch is not in the loop's hands any more")
        self._hand_in(batch)
        call("dray_loader_fail", self._ending.loader, c.byref(batch._load), reason.encode())
        self._given = None

    def flush(self):
        """Finishes what the loop has, and commits it now."""
        self._check()
        self._finish()
        call("dray_loader_flush", self._ending.loader)

    def counts(self):
        counts = _l.Counts()
        call("dray_loader_count", self._ending.loader, c.byref(counts))
        return {name: getattr(counts, name) for name, _ in counts._fields_[1:]}

    def close(self):
        """Commits what was finished; what the loop has in its hands is given back."""
        if not self._closed:
            self._closed = True
            self._given, self._waiting = None, []
            self._ending.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None and not self._closed:
            self._finish()
        self.close()

    def __del__(self):
        self.close()

    # ---- columns

    def _read(self, load, name):
        column = _l.Column()
        call("dray_batch_column", load.batch, name.encode(), c.byref(column))
        size = library().dray_dtype_size(column.dtype)
        shape = list(column.shape[:column.ndim])
        ragged = bool(shape) and shape[0] < 0
        rows = range(load.first, load.first + load.rows)
        lengths = np.array([column.lengths[i] for i in rows], dtype=np.int64)
        cells = [column.cells[i] or 0 for i in rows]
        raw = self._bytes(load, cells, lengths * size)
        inner = shape[1:] if ragged else shape
        values = self._typed(raw, library().dray_dtype_name(column.dtype).decode(),
                             [-1 if ragged else load.rows] + inner)
        if not ragged:
            return values, None
        offsets = np.zeros(load.rows + 1, dtype=np.int64)
        unit = int(np.prod(inner, dtype=np.int64)) if inner else 1
        np.cumsum(lengths // max(unit, 1), out=offsets[1:])
        return values, _torch().from_numpy(offsets) if self._as_torch else offsets

    def _bytes(self, load, cells, sizes):
        """In place where the rows follow each other in memory."""
        total, at, follow = int(sizes.sum()), None, True
        for address, size in zip(cells, sizes):
            if size and at is not None and address != at:
                follow = False
            if size:
                at = address + int(size)
        if total and follow and not self._copy:
            first = next(address for address, size in zip(cells, sizes) if size)
            ending, batch = self._ending, load.batch
            ending.hold(load)
            return _view(first, total, lambda: ending.drop(batch))
        out, at = np.empty(total, dtype=np.uint8), 0
        for address, size in zip(cells, sizes):
            c.memmove(out.ctypes.data + at, address, int(size))
            at += int(size)
        return out

    def _typed(self, raw, dtype, shape):
        if self._as_torch:
            torch = _torch()
            import warnings
            with warnings.catch_warnings():  # torch has no read-only tensors
                warnings.simplefilter("ignore")
                tensor = torch.from_numpy(raw)
            kind = TORCH.get(dtype) or (str(NUMPY[dtype]) if dtype in NUMPY else "uint8")
            return tensor.view(getattr(torch, kind)).reshape(self._full(shape, raw, dtype))
        return raw.view(NUMPY.get(dtype, np.uint8)).reshape(self._full(shape, raw, dtype))

    @staticmethod
    def _full(shape, raw, dtype):
        """-1 said as a number: an empty array does not tell."""
        unit = int(np.prod(shape[1:], dtype=np.int64)) * (
            NUMPY[dtype].itemsize if dtype in NUMPY else 2 if dtype in ("BF16",) else 1)
        return [raw.size // unit if unit else 0] + shape[1:] if shape[0] < 0 else shape

    def _set(self, batch, name, values, offsets):
        if batch is not self._given:
            raise ValueError("this batch is not in the loop's hands any more")
        self._parts.setdefault(name, {})[batch.micro] = (values, offsets)

    def _hand_in(self, batch):
        """All micro-batches' outputs as one column of the batch."""
        for name, parts in self._parts.items():
            if sorted(parts) != list(range(batch.micros)):
                raise ValueError("%s is set for micro-batches %s of %d"
                                 % (name, sorted(parts), batch.micros))
            put = [_output(*parts[i]) for i in range(batch.micros)]
            raw = np.concatenate([part[0].reshape(-1).view(np.uint8) for part in put])
            _, dtype, shape, offsets = put[0]
            data = _l.ColumnData(name=name.encode(), dtype=dtype, ndim=len(shape),
                                 shape=(c.c_int64 * _l.MAX_DIMS)(*shape), values=raw.ctypes.data)
            if offsets is not None:
                whole = [np.zeros(1, dtype=np.uint64)]
                for part in put:
                    whole.append(part[3][1:] - part[3][0] + whole[-1][-1])
                joined = np.concatenate(whole).astype(np.uint64)
                data.offsets = joined.ctypes.data
            call("dray_batch_set", batch._load.batch, c.byref(data))
        self._parts = {}


def _output(values, offsets):
    """(array, dtype, shape of a row, offsets): of numpy's or torch's."""
    if hasattr(values, "detach"):
        torch = _torch()
        values = values.detach().cpu().contiguous()
        name = str(values.dtype)
        shape = list(values.shape)
        array = values.reshape(-1).view(torch.uint8).numpy() if values.numel() else \
            np.empty(0, dtype=np.uint8)
    else:
        array = np.ascontiguousarray(values)
        name, shape = str(array.dtype), list(array.shape)
    dtype = library().dray_dtype_parse(name.encode())
    if not dtype:
        raise TypeError("values of %s: no dtype of dray's" % name)
    if offsets is None:
        return array, dtype, shape[1:], None
    if hasattr(offsets, "numpy"):
        offsets = offsets.numpy()
    offsets = np.asarray(offsets).astype(np.uint64)
    return array, dtype, [0] + shape[1:], offsets
