"""Columns of a queue as arrays: what rows hold comes out as numpy's or torch's, mostly in place, and
goes in as numpy's, torch's, or as lists of strings, bytes, numbers and arrays."""
from __future__ import annotations

import ctypes as c
import os
import threading
import warnings
import weakref
from typing import Any, Callable, Optional, Sequence

import numpy as np

from . import _library as _l
from ._library import DrayError, call, library

NUMPY = {name: np.dtype(dtype) for name, dtype in {
    "F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "U64": "u8", "I32": "i4", "U32": "u4",
    "I16": "i2", "U16": "u2", "I8": "i1", "U8": "u1", "BOOL": "?",
    "BF16": "u2", "F8_E4M3": "u1", "F8_E5M2": "u1"}.items()}  # the last ones' bits: numpy lacks them
TORCH = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
TENSOR, STRING, BYTES = 0, 1, 2  # dray_content


def _torch():
    import torch
    return torch


# ---- in ------------------------------------------------------------------------------------------

class Values:
    """One column for some rows, as the library takes it. `values`: see Queue.insert."""

    def __init__(self, name: str, values: Any, offsets: Any = None):
        self.name, self.content = name, TENSOR
        if offsets is None and isinstance(values, tuple) and len(values) == 2:
            values, offsets = values
        values, offsets = self._joined(values, offsets)
        self.raw, self.dtype, self.shape = _flat(values)
        self.rows = self.shape[0] if self.shape else 0
        self.shape, self.offsets = self.shape[1:], None
        if offsets is not None:
            self.offsets = np.ascontiguousarray(
                offsets.numpy() if hasattr(offsets, "numpy") else offsets).astype(np.uint64)
            self.rows, self.shape = len(self.offsets) - 1, [0] + self.shape

    def _joined(self, values, offsets):
        """Lists, and torch's jagged tensors, as one array and offsets."""
        if offsets is not None:
            return values, offsets
        if getattr(values, "is_nested", False):
            return values.values(), values.offsets()
        if isinstance(values, np.ndarray) and values.dtype.kind in "OUS":
            values = values.tolist()
        if not isinstance(values, (list, tuple)):
            return values, None
        if values and isinstance(values[0], (str, bytes, bytearray)):
            self.content = STRING if isinstance(values[0], str) else BYTES
            parts = [v.encode() if isinstance(v, str) else bytes(v) for v in values]
            joined = np.frombuffer(b"".join(parts) or b" ", dtype=np.uint8)[:sum(map(len, parts))]
        elif values and (hasattr(values[0], "__len__") and getattr(values[0], "ndim", 1) > 0):
            parts = [v if hasattr(v, "dtype") else np.asarray(v) for v in values]
            filled = [p for p in parts if len(p)] or parts[:1]
            joined = _torch().cat(filled) if hasattr(parts[0], "detach") else \
                np.concatenate([np.asarray(p) for p in filled])
        else:
            return np.asarray(values), None
        return joined, np.cumsum([0] + [len(p) for p in parts])

    def data(self) -> _l.ColumnData:
        """Borrows the arrays of this object."""
        data = _l.ColumnData(name=self.name.encode(), dtype=self.dtype, content=self.content,
                             ndim=len(self.shape), shape=(c.c_int64 * _l.MAX_DIMS)(*self.shape),
                             values=self.raw.ctypes.data)
        if self.offsets is not None:
            data.offsets = self.offsets.ctypes.data
        return data


def _flat(values):
    """(bytes, dtype, shape) of numpy's or torch's."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().contiguous()
        name, shape = str(values.dtype), list(values.shape)
        raw = values.reshape(-1).view(_torch().uint8).numpy() if values.numel() else \
            np.empty(0, dtype=np.uint8)
    else:
        array = np.ascontiguousarray(values)
        name, shape = str(array.dtype), list(np.shape(values))
        raw = array.reshape(-1).view(np.uint8)
    dtype = library().dray_dtype_parse(name.encode())
    if not dtype:
        raise TypeError(f"values of {name}: no dtype of dray's")
    if len(shape) > _l.MAX_DIMS:
        raise ValueError(f"values of {len(shape)} dimensions: {_l.MAX_DIMS} are possible")
    return raw, dtype, shape


# ---- out -----------------------------------------------------------------------------------------

class Pins:
    """Batches that arrays look into are let go of when the last array is gone: by their owner's next
    call, for arrays may end in any thread, or, once the owner is closed, at once."""

    def __init__(self, session: Any, unhold: Callable[[int], Any]):
        self.session, self.unhold = session, unhold
        self.lock, self.pid = threading.RLock(), os.getpid()
        self.held, self.ended, self.closed = {}, [], False  # batch: those who hold it

    def hold(self, batch: int, begin: Optional[Callable[[], Any]] = None) -> None:
        if batch not in self.held and begin:
            begin()
        with self.lock:
            self.held[batch] = self.held.get(batch, 0) + 1

    def drop(self, batch: int) -> None:
        if os.getpid() != self.pid:
            return
        with self.lock:
            self.ended.append(batch)
            if self.closed:
                self.sweep()

    def sweep(self) -> None:
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
                    self.unhold(batch)
            if self.closed and not self.held:
                self.session.close()

    def close(self, end: Callable[[], Any] = lambda: None) -> None:
        if self.closed or os.getpid() != self.pid:
            return
        with self.lock:
            self.sweep()
            end()
            self.closed = True
            self.sweep()


class Rows(dict):
    """Rows of a batch, {column: (values, offsets)}; a column is read when it is first asked for.

    Ragged columns have the rows' values one after the other, row i from offsets[i] to
    offsets[i + 1]; columns of a fixed shape have values of (rows, *shape), and offsets None. Values
    lie in shared memory, read-only, where the rows follow each other there (nothing is copied then);
    elsewhere, and on request, they are a writable copy. Arrays stay what they are for as long as
    anybody has them. numpy gets BF16 as the bits (uint16), and FP8 as uint8.

    partition: their name; slots, groups, attempts: an entry a row; weights: 0 for padding, else 1."""

    def __init__(self, pins: Pins, batch: int, first: int, rows: int, framework: str = "numpy",
                 copy: bool = False, begin: Optional[Callable[[], Any]] = None):
        super().__init__()
        self._pins, self._batch, self._first, self._count = pins, batch, first, rows
        self._as_torch, self._copy, self._begin = framework == "torch", copy, begin
        self._contents, self._live = {}, True
        self.partition = library().dray_batch_partition(batch).decode()
        found = [library().dray_batch_row(batch, first + i).contents for i in range(rows)]
        self.slots = np.array([row.slot for row in found], dtype=np.int64)
        self.groups = np.array([row.group for row in found], dtype=np.int64)
        self.attempts = np.array([row.attempt for row in found], dtype=np.int64)
        self.weights = np.array([library().dray_batch_weight(batch, first + i)
                                 for i in range(rows)])

    @property
    def rows(self) -> int:
        return self._count

    def _check(self):
        """Of rows that were let go of, only the columns that were read can be looked at."""
        if not self._live:
            raise DrayError(-15, "this batch was let go of")

    def __missing__(self, name: str):
        self[name] = self._read(name)
        return self[name]

    def list(self, name: str) -> list:
        """The column with one entry a row: str of strings, bytes of bytes, else an array each, which
        is a view of the column; numbers of columns that have one a row."""
        values, offsets = self[name]
        content = self._contents[name]
        if offsets is None:
            return values.tolist() if values.ndim == 1 else list(values)
        ends = [int(at) for at in offsets]
        if content == TENSOR:
            return [values[ends[i]:ends[i + 1]] for i in range(self.rows)]
        whole = values.numpy().tobytes() if self._as_torch else values.tobytes()
        parts = [whole[ends[i]:ends[i + 1]] for i in range(self.rows)]
        return [p.decode() for p in parts] if content == STRING else parts

    def padded(self, name: str, value: float = 0, length: Optional[int] = None):
        """(array of (rows, longest, ...), lengths) of a ragged column; `value` behind its end."""
        values, offsets = self[name]
        if offsets is None:
            raise ValueError(f"{name} is not ragged")
        lengths = offsets[1:] - offsets[:-1]
        longest = int(lengths.max()) if self.rows else 0
        if length is not None and length < longest:
            raise ValueError(f"{name}: a row has {longest} elements, which {length} cannot hold")
        shape = [self.rows, longest if length is None else length] + [int(n) for n in values.shape[1:]]
        out = _torch().full(shape, value, dtype=values.dtype) if self._as_torch else \
            np.full(shape, value, dtype=values.dtype)
        for i in range(self.rows):
            out[i, :int(lengths[i])] = values[int(offsets[i]):int(offsets[i + 1])]
        return out, lengths

    def tag(self, key: str, default: float = np.nan) -> np.ndarray:
        """The tag of every row, `default` where there is none."""
        self._check()
        values = np.full(self.rows, default)
        for i in range(self.rows):
            value = c.c_double()
            try:
                call("dray_batch_tag", self._batch, self._first + i, key.encode(), c.byref(value))
            except DrayError as error:
                if error.name != "ENOENT":
                    raise
                continue
            values[i] = value.value
        return values

    def set_tag(self, key: str, values: Sequence[float]) -> None:
        self._check()
        for i, value in enumerate(values):
            call("dray_batch_set_tag", self._batch, self._first + i, key.encode(), float(value))

    def _read(self, name):
        self._check()
        column = _l.Column()
        call("dray_batch_column", self._batch, name.encode(), c.byref(column))
        self._contents[name] = column.content
        size = library().dray_dtype_size(column.dtype)
        shape = list(column.shape[:column.ndim])
        ragged = bool(shape) and shape[0] < 0
        rows = range(self._first, self._first + self._count)
        lengths = np.array([column.lengths[i] for i in rows], dtype=np.int64)
        cells = [column.cells[i] or 0 for i in rows]
        raw = self._bytes(cells, lengths * size)
        inner = shape[1:] if ragged else shape
        values = self._typed(raw, library().dray_dtype_name(column.dtype).decode(),
                             [-1 if ragged else self._count] + inner)
        if not ragged:
            return values, None
        offsets = np.zeros(self._count + 1, dtype=np.int64)
        unit = int(np.prod(inner, dtype=np.int64)) if inner else 1
        np.cumsum(lengths // max(unit, 1), out=offsets[1:])
        return values, _torch().from_numpy(offsets) if self._as_torch else offsets

    def _bytes(self, cells, sizes):
        """In place where the rows follow each other in memory."""
        total, at, follow = int(sizes.sum()), None, True
        for address, size in zip(cells, sizes):
            if size and at is not None and address != at:
                follow = False
            if size:
                at = address + int(size)
        if total and follow and not self._copy:
            first = next(address for address, size in zip(cells, sizes) if size)
            pins, batch = self._pins, self._batch
            pins.hold(batch, self._begin)
            return _view(first, total, lambda: pins.drop(batch))
        out, at = np.empty(total, dtype=np.uint8), 0
        for address, size in zip(cells, sizes):
            c.memmove(out.ctypes.data + at, address, int(size))
            at += int(size)
        return out

    def _typed(self, raw, dtype, shape):
        if self._as_torch:
            torch = _torch()
            with warnings.catch_warnings():  # torch has no read-only tensors
                warnings.simplefilter("ignore")
                tensor = torch.from_numpy(raw)
            kind = TORCH.get(dtype) or str(NUMPY[dtype])
            return tensor.view(getattr(torch, kind)).reshape(self._full(shape, raw, dtype))
        return raw.view(NUMPY[dtype]).reshape(self._full(shape, raw, dtype))

    @staticmethod
    def _full(shape, raw, dtype):
        """-1 said as a number: an empty array does not tell."""
        unit = int(np.prod(shape[1:], dtype=np.int64)) * NUMPY[dtype].itemsize
        return [raw.size // unit if unit else 0] + shape[1:] if shape[0] < 0 else shape


def _view(address, size, on_end):
    """Bytes of shared memory as an array, and on_end when the last array over them is gone."""
    memory = (c.c_ubyte * size).from_address(address)
    weakref.finalize(memory, on_end).atexit = False
    array = np.frombuffer(memory, dtype=np.uint8)
    array.flags.writeable = False
    return array
