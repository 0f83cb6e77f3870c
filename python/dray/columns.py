"""Columns of a queue as arrays of numpy or torch: the direction from the queue. values.py has the other
direction."""
from __future__ import annotations

import ctypes as c
import functools
import math
import os
import threading
import time
import warnings
import weakref
from typing import Any, Callable, Optional, Sequence

import numpy as np

from . import _library as _l
from ._library import DrayError, call, library
from .values import STRING, TENSOR, _torch

NUMPY = {name: np.dtype(dtype) for name, dtype in {
    "F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "U64": "u8", "I32": "i4", "U32": "u4",
    "I16": "i2", "U16": "u2", "I8": "i1", "U8": "u1", "BOOL": "?",
    "BF16": "u2", "F8_E4M3": "u1", "F8_E5M2": "u1"}.items()}  # numpy lacks the last three: their bits
TORCH = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


ROW = np.dtype([("slot", "u4"), ("generation", "u4"), ("attempt", "u4"), ("group", "u4"), ("id", "u8")])


_SMALL = 1 << 14  # bytes up to which a copy is faster than reading in place
_LARGE = 1 << 20  # bytes from which pages are copied when they are written to


class _Room:
    """The memory that the library fills when it reads a column. It is used again for each read."""

    def __init__(self, rows: int):
        self.part = _l.ColumnPart()
        self.offsets = np.empty(rows + 1, dtype=np.int64)
        values = np.empty(_SMALL, dtype=np.uint8)
        self.at = c.byref(self.part), _address(self.offsets), _address(values)
        self.values = memoryview(values)


class Pins(_l.Use):
    """The users of a session and of its batches. A batch is freed when its claim and the last array over its
    memory have been freed, in any thread: at once, or at the end of a call that is under way."""

    def __init__(self, name: str, session: Any, unhold: Callable[[int], Any]):
        super().__init__(name)
        self.session, self.unhold, self.pid = session, unhold, os.getpid()
        self.sweepers = 0
        self.held, self.ended = {}, []  # {batch: the number of its holders}
        self.lent = {}  # {loan: the batch that it holds, until it is taken back}
        self._room = None

    def room(self, rows: int) -> _Room:
        """The memory for a read. Call it within `with pins:`; it is valid until the end of the block."""
        if self._room is None or self._room.offsets.size <= rows:
            self._room = _Room(max(rows, 255))
        return self._room

    def _enter(self):
        if not self.using.acquire(False):
            self._wait_for_sweeper()
        self.user = threading.get_ident()
        if self.ended:
            self._let_go()

    def __exit__(self, *_) -> None:
        super().__exit__()
        if self.ended:
            self.sweep()

    def call(self, name: str, *arguments: Any) -> None:
        with self:
            call(name, *arguments)

    def _wait_for_sweeper(self):
        """Waits for a thread that frees batches, which takes a short time."""
        for _ in range(2000):
            sweeping = self.sweepers
            if self.using.acquire(False):
                return
            if not sweeping:
                break
            time.sleep(0.0005)
        self._refuse(self.user == threading.get_ident())

    def hold(self, batch: int, begin: Optional[Callable[[], Any]] = None) -> None:
        """Adds a holder of the batch. Call it within `with pins:`."""
        if batch not in self.held and begin:
            begin()
        self.held[batch] = self.held.get(batch, 0) + 1

    def lend(self, batch: int, begin: Optional[Callable[[], Any]] = None) -> object:
        """The same as hold() for memory of dray_batch_own, which stays when the batch is freed. Returns the
        argument for take_back()."""
        self.hold(batch, begin)
        loan = object()
        self.lent[loan] = batch
        return loan

    def take_back(self, loan: object) -> None:
        """Ends the hold when the memory has been freed."""
        batch = self.lent.pop(loan, None)
        if batch is not None:  # take_oldest_back() has not ended it
            self.drop(batch)

    def take_oldest_back(self) -> None:
        """Ends all such holds of the oldest batch. Its bytes are copied then, so that the queue can use their memory
        again."""
        oldest = next(iter(self.lent.values()), None)
        for loan, batch in list(self.lent.items()):
            if batch == oldest and self.lent.pop(loan, None) is not None:
                self.ended.append((batch, False))
        self.sweep()

    def drop(self, batch: int, give_back: bool = False) -> None:
        """Removes a holder. give_back: gives the rows back to the queue even if views of them are still in use."""
        if os.getpid() == self.pid:
            self.ended.append((batch, give_back))
            self.sweep()

    def sweep(self) -> None:
        with self.counting:
            self.sweepers += 1
        try:
            while self.ended and self.using.acquire(False):
                try:
                    self._let_go()
                finally:
                    self.using.release()
        finally:
            with self.counting:
                self.sweepers -= 1

    def _let_go(self):
        while self.ended:
            batch, give_back = self.ended.pop()
            self.held[batch] -= 1
            if self.held[batch]:
                if give_back and not self.closed:
                    library().dray_batch_give_back(batch, None)
                continue
            del self.held[batch]
            if self.closed:
                library().dray_batch_free(batch)
            else:
                self.unhold(batch)
        if self.closed and not self.held:
            self.session.close()

    def close(self, end: Callable[[], Any] = lambda: None) -> None:
        if not self.closed and os.getpid() == self.pid:
            try:
                self.end(lambda: self._end(end))
            finally:
                self.sweep()

    def _end(self, end):
        end()
        self.closed = True
        self._let_go()


class Rows(dict):
    """Rows of a batch, {column: values}; a column is read when it is first asked for.

    torch: a tensor of (rows, *shape); of a ragged column a nested tensor of the jagged layout, of which
    padded() makes a plain one. numpy: the tuple (values, offsets). Ragged columns have the rows' values one
    after the other, row i from offsets[i] to offsets[i + 1]; columns of a fixed shape have values of
    (rows, *shape), and offsets None. ragged() gives such a tuple in torch's tensors, too. Arrays keep their
    values for as long as they exist. numpy gets BF16 as the bits (uint16), and FP8 as uint8.

    copy=True: a writable copy. For rows with keys (Queue.get), a column of a MiB or more is copied page by page,
    when it is written to, and uses the queue's memory until its last array has been freed; while the queue holds
    more than a quarter of its capacity, such columns are copied at once. copy=False: values are used in place,
    without a copy, if the rows are adjacent in shared memory; otherwise they are copied. Values in place cannot
    be changed: numpy's arrays are read-only; torch has no read-only tensors, and a process that writes into one
    gets a SIGSEGV. copy=None: as False for numpy, except that a few KiB are copied (and are read-only, too), and
    as True for torch.

    partition: the partition's name; slots, groups, attempts: one entry per row; weights: 0 for padding, else 1."""

    _keyed = False

    def __init__(self, pins: Pins, batch: int, first: int, rows: int, framework: str = "numpy",
                 copy: Optional[bool] = None, begin: Optional[Callable[[], Any]] = None,
                 padded: bool = True):
        super().__init__()
        self._pins, self._batch, self._first, self._count = pins, batch, first, rows
        self._as_torch, self._begin = framework == "torch", begin
        self._copy = self._as_torch if copy is None else copy
        self._small = 0 if copy is not None else _SMALL
        self._contents, self._offsets, self._live = {}, {}, True
        self.partition = library().dray_batch_partition(batch).decode()
        self._rows = c.string_at(library().dray_batch_row(batch, first), rows * ROW.itemsize) \
            if rows else b""
        if padded:
            self.weights = np.empty(rows)
            call("dray_batch_weights", batch, first, rows, _address(self.weights))

    @functools.cached_property
    def weights(self) -> np.ndarray:
        return np.ones(self._count)

    @functools.cached_property
    def _found(self) -> np.ndarray:
        return np.frombuffer(self._rows, ROW) if self._rows else np.empty(0, ROW)

    @functools.cached_property
    def slots(self) -> np.ndarray:
        return self._found["slot"].astype(np.int64)

    @functools.cached_property
    def groups(self) -> np.ndarray:
        return self._found["group"].astype(np.int64)

    @functools.cached_property
    def attempts(self) -> np.ndarray:
        return self._found["attempt"].astype(np.int64)

    _KEPT = ("partition", "slots", "groups", "attempts", "weights", "_count", "_as_torch", "_contents")

    def __reduce__(self):
        """Pickles (or copies) the columns that were read. The result has no batch of the queue."""
        kept = {name: getattr(self, name) for name in self._KEPT}
        return _detached, (type(self), kept, {k: _own(v) for k, v in self.items()})

    @property
    def rows(self) -> int:
        return self._count

    def _check(self):
        """Fails when the rows were freed: then only columns that were read before can be used."""
        if not self._live:
            raise DrayError(-15, "this batch was let go of")

    def __bool__(self) -> bool:
        """True, even while no column has been read, so that `if batch:` works."""
        return True

    def __missing__(self, name: str):
        self[name] = self._read(name)
        return self[name]

    def ragged(self, name: str) -> tuple:
        """(values, offsets) of a column, in either framework; offsets is None for a column of a fixed shape."""
        found = self[name]
        if isinstance(found, (tuple, list)):  # torch's DataLoader makes lists of tuples
            return tuple(found)
        return (found.values(), found.offsets()) if found.is_nested else (found, None)

    def to(self, *arguments: Any, columns: Optional[Sequence[str]] = None, **more: Any) -> Rows:
        """The columns as torch's tensors, moved by Tensor.to with these arguments. columns None: those that were
        read already, as a loader does. The result outlives the batch. Strings and bytes stay on the host."""
        return self._moved(columns, lambda tensor: tensor.to(*arguments, **more))

    def pin_memory(self, columns: Optional[Sequence[str]] = None) -> Rows:
        """The columns (as for to()) in pinned memory. to(device, non_blocking=True) copies from there while the GPU
        works."""
        return self._moved(columns, lambda tensor: tensor.pin_memory())

    def to_tensordict(self, columns: Optional[Sequence[str]] = None) -> Any:
        """A TensorDict (PyPI's tensordict) of the columns (as for to()), without strings and bytes."""
        from tensordict import TensorDict
        tensors = self._tensors(columns)
        return TensorDict({n: t for n, t in tensors.items() if self._contents[n] == TENSOR}, batch_size=[self.rows])

    def _tensors(self, columns):
        if not self._as_torch:
            raise ValueError('the batch has numpy\'s arrays: claim it with framework="torch"')
        return {name: self[name] for name in (columns or list(self))}

    def _moved(self, columns, move):
        tensors = self._tensors(columns)
        return _detached(type(self), {name: getattr(self, name) for name in self._KEPT},
                         {n: move(t) if self._contents[n] == TENSOR else t for n, t in tensors.items()})

    def list(self, name: str) -> list:
        """The column as a list with one entry per row: str for strings, bytes for bytes, a number if the column has
        one per row, else an array, which is a view of the column."""
        values, offsets = self.ragged(name)
        content = self._contents[name]
        if offsets is None:
            return values.tolist() if values.ndim == 1 else list(values)
        ends = [int(at) for at in offsets]
        if content == TENSOR:
            return [values[ends[i]:ends[i + 1]] for i in range(self.rows)]
        whole = np.asarray(values).tobytes()
        parts = [whole[ends[i]:ends[i + 1]] for i in range(self.rows)]
        return [p.decode() for p in parts] if content == STRING else parts

    def padded(self, name: str, value: float = 0, length: Optional[int] = None):
        """(array of (rows, longest, ...), lengths) of a ragged column, with `value` behind the end of each row."""
        values, offsets = self.ragged(name)
        if offsets is None:
            raise ValueError(f"{name} is not ragged")
        lengths = offsets[1:] - offsets[:-1]
        longest = int(lengths.max()) if self.rows else 0
        if length is not None and length < longest:
            raise ValueError(f"{name}: a row has {longest} elements, which {length} cannot hold")
        shape = [self.rows, longest if length is None else length] + [int(n) for n in values.shape[1:]]
        out = _torch().full(shape, value, dtype=values.dtype, device=values.device) \
            if hasattr(values, "detach") else \
            np.full(shape, value, dtype=values.dtype)
        for i in range(self.rows):
            out[i, :int(lengths[i])] = values[int(offsets[i]):int(offsets[i + 1])]
        return out, lengths

    def tag(self, key: str, default: float = np.nan) -> np.ndarray:
        """The tag of every row, or `default` for rows without it."""
        self._check()
        values = np.full(self.rows, default, dtype=np.float64)
        self._pins.call("dray_batch_tags", self._batch, _l.text(key), self._first, self.rows,
                        values.ctypes.data)
        return values

    def pieces(self, name: str, index: int) -> list:
        """The pieces in which a row's value of a ragged column was committed (Claim.leave_open), first to
        last: (elements, version). The version is None for a commit without the tag `version`."""
        self._check()
        if not 0 <= index < self.rows:
            raise IndexError(f"row {index} of {self.rows}")
        room = 0
        count = c.c_uint32(4)
        while room < count.value:
            room = count.value
            found = (_l.Piece * room)()
            self._pins.call("dray_batch_pieces", self._batch, _l.text(name), self._first + index, found, room, c.byref(count))
        return [(piece.elements, None if piece.version < 0 else piece.version) for piece in found[:count.value]]

    def set_tag(self, key: str, values: Sequence[float]) -> None:
        """Sets a tag of every row, which is committed with its outputs."""
        self._check()
        if len(values) != self.rows:
            raise ValueError(f"tag {key} has {len(values)} values, not {self.rows}")
        given = np.ascontiguousarray(values, dtype=np.float64)
        self._pins.call("dray_batch_set_tags", self._batch, _l.text(key), self._first, self.rows,
                        given.ctypes.data)

    def _read(self, name):
        self._check()
        with self._pins:
            room, key = self._pins.room(self._count), _l.text(name)
            call("dray_batch_read", self._batch, key, self._first, self._count, *room.at,
                 _SMALL if self._copy else self._small)
            dtype, content, ndim, copied, *shape, total, at = _l.COLUMN_PART.unpack_from(room.part)
            ragged = ndim > 0 and shape[0] < 0
            offsets = room.offsets[:self._count + 1].copy() if ragged else None
            raw = self._bytes(key, total, room.values if copied else None, at)
        self._contents[name] = content
        shape = shape[:ndim] if ragged else [self._count] + shape[:ndim]
        values = self._typed(raw, _dtype(dtype), shape)
        if not self._as_torch:
            return values, offsets
        return values if offsets is None else jagged(values, *self.offsets_of(offsets.tobytes(), lambda: _bounds(offsets)))

    def offsets_of(self, key: Any, make: Callable[[], tuple]) -> tuple:
        """Offsets and bounds as jagged() takes them. Columns with the same row lengths share them, so that torch
        can combine such columns."""
        if key not in self._offsets:
            self._offsets[key] = make()
        return self._offsets[key]

    def _cell(self, name, index):
        part = _l.ColumnPart()
        with self._pins:
            code = library().dray_batch_cell(self._batch, _l.text(name), index, c.byref(part), c.byref(_l.Error()))
            if code == _l.ENOENT:
                return None
            if code:  # again, to raise it with its message
                call("dray_batch_cell", self._batch, _l.text(name), index, c.byref(part))
            dtype, content, ndim, _, *shape, total, at = _l.COLUMN_PART.unpack_from(part)
            if not total:
                raw = np.empty(0, np.uint8)
            elif self._copy or content != TENSOR:
                raw = np.frombuffer(bytearray(c.string_at(at, total)), np.uint8)
            else:
                raw = self._lasting(at, total, False)
        if content != TENSOR:
            return raw.tobytes().decode() if content == STRING else raw.tobytes()
        return self._typed(raw, _dtype(dtype), shape[:ndim] or [1]).reshape(shape[:ndim])

    def _bytes(self, key, total, copied, at):
        """The column's bytes: in place if that is wanted and the rows are adjacent in memory, else a copy."""
        if not total:
            return np.empty(0, np.uint8)
        if copied is not None:
            found = copied[:total]
            return np.frombuffer(bytearray(found) if self._copy else found.tobytes(), np.uint8)
        if at and not self._copy:
            return self._lasting(at, total, False)
        if at and self._keyed and total >= _LARGE and (own := self._own(key)):
            return self._lasting(own, total, True)
        out = np.empty(total, dtype=np.uint8)
        call("dray_batch_gather_rows", self._batch, key, self._first, self._count, _address(out),
             total, None)
        if not self._copy:
            out.flags.writeable = False
        return out

    def _own(self, key):
        """The address of a private mapping of the column; None when it must be copied."""
        found = c.c_void_p()
        call("dray_batch_own", self._batch, key, self._first, self._count, c.byref(found))
        return found.value

    def _lasting(self, at, total, own):
        """The bytes at the address. They hold the batch until the last array over them has been freed."""
        pins, batch = self._pins, self._batch
        if own:
            loan = pins.lend(batch, self._begin)

            def end():
                library().dray_own_free(at)
                pins.take_back(loan)
        else:
            pins.hold(batch, self._begin)

            def end():
                pins.drop(batch)
        return _view(at, total, end, own)

    def _typed(self, raw, dtype, shape):
        if self._as_torch:
            torch = _torch()
            if raw.flags.writeable:
                tensor = torch.from_numpy(raw)
            else:
                with warnings.catch_warnings():  # torch has no read-only tensors
                    warnings.simplefilter("ignore")
                    tensor = torch.from_numpy(raw)
            kind = _torch_dtype(dtype)
            shape = self._full(shape, raw, dtype)
            return tensor.view(kind).reshape(shape) if raw.size else torch.empty(shape, dtype=kind)
        values = raw.view(NUMPY[dtype])
        return values if len(shape) == 1 else values.reshape(self._full(shape, raw, dtype))

    @staticmethod
    def _full(shape, raw, dtype):
        """The shape with a number in place of -1, which reshape cannot infer for an empty array."""
        unit = math.prod(shape[1:]) * NUMPY[dtype].itemsize
        return [raw.size // unit if unit else 0] + shape[1:] if shape[0] < 0 else shape


def _bounds(offsets):
    """Torch's offsets, and the least and largest length of a row."""
    lengths = np.diff(offsets)
    return _torch().from_numpy(offsets), *((int(lengths.min()), int(lengths.max())) if lengths.size else (0, 0))


def jagged(values: Any, offsets: Any, least: int, most: int) -> Any:
    """A nested tensor of rows with lengths from `least` to `most`. It is constructed as torch's own operations
    construct their results, in a fourth of the time of nested_tensor_from_jagged, which makes a view for autograd.
    nested_tensor_from_jagged is used if this torch's class is not the known one."""
    torch = _torch()
    make = _nested_class()
    if make is None:
        return torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=least, max_seqlen=most)
    return make(values, offsets, _metadata_cache={"min_seqlen": _length(least), "max_seqlen": _length(most)})


@functools.lru_cache(maxsize=64)
def _length(number):
    """A length in the form in which nested tensors keep it: a tensor of shape (number, 0)."""
    return _torch().zeros(number, 0)


@functools.lru_cache(maxsize=None)
def _nested_class():
    """Torch's class of nested tensors; None when it behaves differently from the known one."""
    torch = _torch()
    try:
        from torch.nested._internal.nested_tensor import NestedTensor
        found = NestedTensor(torch.arange(3.0), torch.tensor([0, 1, 3]),
                             _metadata_cache={"min_seqlen": torch.zeros(1, 0), "max_seqlen": torch.zeros(2, 0)})
        wanted = torch.nested.nested_tensor_from_jagged(torch.arange(3.0), torch.tensor([0, 1, 3]), min_seqlen=1, max_seqlen=2)
        alike = all(torch.equal(mine, theirs) for mine, theirs in zip(found.unbind(), wanted.unbind())) and \
            found._get_min_seqlen() == wanted._get_min_seqlen() and found._get_max_seqlen() == wanted._get_max_seqlen()
    except (ImportError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError):
        return None
    return NestedTensor if alike else None


def _detached(kind, kept, columns):
    rows = kind.__new__(kind)
    rows.__dict__.update(kept, _live=False)
    rows.update(columns)
    return rows


def _own(column):
    """A copy of a column in memory of its own, so that a pickle has only the bytes of the column."""
    if not isinstance(column, (tuple, list)):
        return column.clone()
    values, offsets = column
    return (values.copy() if isinstance(values, np.ndarray) else values.clone()), offsets


@functools.lru_cache(maxsize=None)
def _dtype(number):
    """The name of a dray_dtype."""
    return library().dray_dtype_name(number).decode()


@functools.lru_cache(maxsize=None)
def _torch_dtype(name):
    return getattr(_torch(), TORCH.get(name) or str(NUMPY[name]))


def _address(array):
    return array.__array_interface__["data"][0]


def _view(address, size, on_end, writable):
    """Bytes of memory as an array. on_end is called when the last array over them has been freed."""
    memory = (c.c_ubyte * size).from_address(address)
    weakref.finalize(memory, on_end).atexit = False
    return np.frombuffer(memory if writable else memoryview(memory).toreadonly(), dtype=np.uint8)
