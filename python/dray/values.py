"""What goes into a queue's column: numpy's and torch's arrays, and lists of strings, bytes, numbers
and arrays, checked and laid out as the library takes them."""
from __future__ import annotations

import copy
import ctypes as c
from typing import Any

import numpy as np

from . import _library as _l
from ._library import library

TENSOR, STRING, BYTES, OBJECT = 0, 1, 2, 3  # dray_content
_BYTES = (bytes, bytearray, memoryview)
_MASKED = "masked arrays lose their mask; fill it"


def _torch():
    import torch
    return torch


def _is_torch(values):
    return hasattr(values, "detach") and hasattr(values, "layout")


class Objects(list):
    """A column's rows, serialised: bytes each. The content says so to who reads them."""


class Values:
    """One column for some rows, as the library takes it. `values`: see Queue.insert."""

    def __init__(self, name: str, values: Any, offsets: Any = None):
        self.name, self.content, self.offsets, self.hint = name, TENSOR, None, ""
        if isinstance(values, tuple):
            self.hint = "; a tuple is (values, offsets), rows come in a list"
            if offsets is not None or len(values) != 2:
                raise TypeError(f"column {name}: {len(values)} entries{self.hint}")
            values, offsets = values
        if offsets is None:
            values, offsets = self._joined(values)
        self.raw, self.dtype, shape = self._flat(values)
        self.rows = shape[0]
        if offsets is not None:
            self.offsets = self._checked(offsets, shape[0])
            self.rows, shape[0] = len(self.offsets) - 1, 0
            self.shape = shape
        else:
            self.shape = shape[1:]
        if len(self.shape) > _l.MAX_DIMS:
            raise ValueError(f"column {name}: a row's value has {len(self.shape)} dimensions, "
                             f"{_l.MAX_DIMS} are possible")

    def one_shape(self) -> bool:
        """Whether rows are tensors, all of one shape."""
        return self.offsets is None and self.content == TENSOR and len(self.shape) > 0

    def cut(self) -> None:
        """Rows of one shape become those of a column whose rows differ in length, and happen to be alike."""
        self.offsets = np.arange(self.rows + 1, dtype=np.uint64) * np.uint64(self.shape[0])
        self.shape[0] = 0

    def keep(self) -> None:
        """Copies what may be the caller's memory, who is free to write to it from now on."""
        self.raw = self.raw.copy()
        self.offsets = None if self.offsets is None else self.offsets.copy()

    def for_rows(self, rows: int) -> None:
        """ValueError: it has values for more or fewer."""
        if self.rows != rows:
            raise ValueError(f"{self.name} has values for {self.rows} rows, not for {rows}")

    def beside(self, other: Values) -> None:
        """That the rows of both can be those of one column (ValueError). Where one of them has rows of different
        lengths, so has the other."""
        ragged = self.offsets is not None or other.offsets is not None
        if self._form(ragged) != other._form(ragged):
            raise ValueError(f"column {self.name}: rows of {other._form(other.offsets is not None)} expected, as the "
                             f"others of the batch, found {self._form(self.offsets is not None)}")
        for each in (self, other):
            if ragged and each.offsets is None:
                each.cut()

    def nothing(self, rows: int) -> Values:
        """Values of this column for other rows, which nobody will read: zeros, or rows of length 0."""
        nothing = copy.copy(self)
        nothing.rows = rows
        if self.offsets is None:
            nothing.raw = np.zeros(self.raw.size // max(1, self.rows) * rows, self.raw.dtype)
        else:
            nothing.raw, nothing.offsets = self.raw[:0], np.zeros(rows + 1, np.uint64)
        return nothing

    def _form(self, ragged):
        lengths = ["?", *self.shape[1:]] if ragged and self.shape else self.shape
        return f"{library().dray_dtype_name(self.dtype).decode()} [{', '.join(map(str, lengths))}]" \
               f"{('', ' strings', ' bytes', ' objects')[self.content]}"

    def data(self) -> _l.ColumnData:
        """Borrows the arrays of this object."""
        return _l.ColumnData(_l.text(self.name), self.dtype, self.content, len(self.shape),
                             (c.c_int64 * _l.MAX_DIMS)(*self.shape),
                             None if self.offsets is None else self.offsets.ctypes.data,
                             self.raw.ctypes.data if self.raw.size else None, self.raw.size)

    # ---- offsets

    def _checked(self, offsets, count):
        """As the library takes them: from 0, not decreasing, to the end of the values."""
        found = np.asarray(offsets.detach().cpu() if _is_torch(offsets) else offsets)
        if found.ndim != 1 or not found.size:
            raise ValueError(f"column {self.name}: offsets of one dimension, rows + 1 of them, "
                             f"expected, found shape {found.shape}{self.hint}")
        if found.dtype.kind not in "iu":
            raise TypeError(f"column {self.name}: offsets are whole numbers, found {found.dtype}"
                            f"{self.hint}")
        if found[0] != 0:
            raise ValueError(f"column {self.name}: offsets begin at 0, found {found[0]}{self.hint}")
        if found[-1] != count:
            raise ValueError(f"column {self.name}: offsets end at {found[-1]}, "
                             f"{'behind' if found[-1] > count else 'before'} the end of the "
                             f"{count} values{self.hint}")
        back = np.flatnonzero(found[1:] < found[:-1])
        if back.size:
            row = int(back[0])
            raise ValueError(f"column {self.name}: offsets go back after row {row}, from "
                             f"{found[row]} to {found[row + 1]}{self.hint}")
        return np.ascontiguousarray(found, dtype=np.uint64)

    # ---- rows

    def _joined(self, values):
        """Lists, and torch's nested tensors, as one array and offsets (None: not ragged)."""
        if getattr(values, "is_nested", False):
            return self._nested(values)
        if isinstance(values, np.ndarray) and values.dtype.kind in "OUS":
            values = values.tolist()
        if isinstance(values, (str, *_BYTES)):
            raise TypeError(f"column {self.name}: a list of rows expected, found one {type(values).__name__}")
        if not isinstance(values, list):
            return values, None
        if values and isinstance(values[0], str):
            return self._text(values, str, STRING)
        if values and isinstance(values[0], _BYTES):
            return self._text(values, _BYTES, OBJECT if isinstance(values, Objects) else BYTES)
        if values and (isinstance(values[0], (list, tuple)) or getattr(values[0], "ndim", 0)):
            return self._arrays(values)
        if values and _is_torch(values[0]):
            self._same(values, {i: value.dtype for i, value in enumerate(values) if _is_torch(value)})
            return _torch().stack(values), None
        return self._numbers(values), None

    def _numbers(self, values):
        """A list of numbers, or of lists or arrays of them, as an array."""
        if _has_mask(values):
            raise TypeError(f"column {self.name}: {_MASKED}")
        found = np.asarray(values)
        self._exact(found, found.dtype == np.float64 and found.size and _whole(values))
        return found

    def _exact(self, found, whole):
        """Refuses integers of which numpy makes floats: negative ones beside some of 2^63 and more."""
        if whole and found.dtype == np.float64:
            raise ValueError(f"column {self.name}: integers that fit int64 or uint64 expected, found "
                             f"{found.min():.0f} and {found.max():.0f}, of which numpy makes float64")

    def _text(self, values, kinds, content):
        for i, value in enumerate(values):
            if not isinstance(value, kinds):
                raise TypeError(f"column {self.name}: row {i} is {value!r:.40}, a "
                                f"{type(value).__name__}; row 0 is a {type(values[0]).__name__}")
        self.content = content
        parts = [v.encode() for v in values] if kinds is str else [bytes(v) for v in values]
        return np.frombuffer(b"".join(parts), dtype=np.uint8), _ends(parts)

    def _nested(self, values):
        """As it is where the rows are one after the other, else row by row."""
        if getattr(values, "_lengths", 0) is None and getattr(values, "_ragged_idx", 0) == 1:
            joined, offsets = values.values(), values.offsets().detach().cpu()
            if int(offsets[0]) == 0 and int(offsets[-1]) == len(joined):
                return joined, offsets
        return self._arrays(list(values.detach().unbind()))

    def _same(self, values, dtypes):
        """All rows have the dtype of the first of them."""
        first = next(iter(dtypes.values()), None)
        for i, value in enumerate(values):
            if i in dtypes and dtypes[i] != first:
                raise TypeError(f"column {self.name}: row {i} is of {dtypes[i]}, an earlier one of "
                                f"{first}")

    def _arrays(self, rows):
        """Ragged: an array, tensor or list of numbers a row. Empty ones have no dtype to differ."""
        parts = [self._array(i, row, rows[0]) for i, row in enumerate(rows)]
        filled = {i: part for i, part in enumerate(parts) if len(part)} or {0: parts[0]}
        first, like = next(iter(filled.items()))
        for i, part in filled.items():
            if part.shape[1:] != like.shape[1:]:
                raise ValueError(f"column {self.name}: row {i} has shape {tuple(part.shape)}, row "
                                 f"{first} {tuple(like.shape)}: they may differ in the first "
                                 "dimension alone")
        self._same(rows, {i: part.dtype for i, part in filled.items() if hasattr(rows[i], "dtype")})
        join = _torch().cat if _is_torch(parts[0]) else np.concatenate
        joined = join(list(filled.values()))
        self._exact(joined, all(getattr(part.dtype, "kind", "") in "iu" for part in filled.values()))
        return joined, _ends(parts)

    def _array(self, i, row, first):
        if isinstance(row, (list, tuple)) and (not len(row) or isinstance(first, (list, tuple))):
            part = first[:0] if not len(row) and hasattr(first, "dtype") else self._numbers(row)
        elif type(row) is type(first) or _is_torch(row) and _is_torch(first):
            part = row
        else:
            part = None
        if part is None or not getattr(part, "ndim", 0) or isinstance(part, np.ma.MaskedArray) or \
                isinstance(part, np.ndarray) and part.dtype.kind in "OUS":
            raise TypeError(f"column {self.name}: row {i} is {row!r:.40}, a {type(row).__name__}; "
                            f"row 0 is a {type(first).__name__}, of numbers")
        return part

    # ---- bytes

    def _flat(self, values):
        """(bytes, dtype, shape) of numpy's or torch's."""
        if _is_torch(values):
            torch = _torch()
            if values.layout is not torch.strided or hasattr(values, "to_local"):
                raise TypeError(f"column {self.name}: a plain tensor expected, found one that is "
                                f"{'sharded' if hasattr(values, 'to_local') else 'sparse'}")
            values = values.detach().resolve_conj().resolve_neg().cpu().contiguous()
            name = str(values.dtype)
            raw = values.reshape(-1).view(torch.uint8).numpy() if values.numel() and values.ndim \
                else np.empty(0, dtype=np.uint8)
        else:
            if isinstance(values, np.ma.MaskedArray):
                raise TypeError(f"column {self.name}: {_MASKED}")
            values = np.asarray(values)
            name = str(values.dtype)
            raw = None
        dtype = library().dray_dtype_parse(name.encode())
        if not dtype:
            raise TypeError(f"column {self.name}: values of {name}: no dtype of dray's{self.hint}")
        if not values.ndim:
            raise ValueError(f"column {self.name}: values of (rows, ...) expected, found one number{self.hint}")
        if raw is None:
            raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return raw, dtype, list(values.shape)


def _has_mask(values):
    """Whether a list holds masked arrays, or masked numbers, which numpy would make NaN of."""
    kinds = set(map(type, values))
    return any(issubclass(kind, np.ma.MaskedArray) for kind in kinds) or \
        any(issubclass(kind, (list, tuple)) for kind in kinds) and \
        any(_has_mask(value) for value in values if isinstance(value, (list, tuple)))


def _whole(values):
    """Whether a list, or list of lists, holds integers alone."""
    return all(_whole(v) if isinstance(v, (list, tuple)) else isinstance(v, (int, np.integer)) for v in values)


def _ends(parts):
    return np.cumsum([0] + [len(part) for part in parts])
