"""TensorDicts (PyPI's tensordict) into columns of a queue, and rows of a queue as TensorDicts."""
from __future__ import annotations

import ctypes as c
import functools
from typing import Any, Mapping, Optional, Sequence

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict, is_non_tensor

from . import objects
from ._library import COLUMN_PART, ENOENT, MAX_DIMS, Column, ColumnPart, DrayError, Error, call, library, text
from .columns import _dtype, _torch_dtype, jagged
from .values import Objects

_UNLIKE = ("EDTYPE", "ESHAPE")


def columns_of(data: Any, pickle: bool = False, rows: Optional[int] = None) -> dict:
    """{field: values as Queue.put takes them} of a TensorDict, or with `rows` of a dict. Tensors go as they are; whatever
    else, and what rows of a column cannot be (of several shapes beyond the first dimension), as objects, an entry a
    row."""
    rows = data.batch_size[0] if rows is None else rows
    return {name: column_of(name, rows_of(name, data.get(name), rows), pickle) for name in data.keys()}


def column_of(name: str, parts: Any, pickle: bool = False) -> Any:
    """Of one field, whose rows are `parts`."""
    rows = len(parts)
    if isinstance(parts, torch.Tensor):
        return parts
    if rows and all(isinstance(part, torch.Tensor) for part in parts):
        first = parts[0]
        if all(_kept(part, part.ndim) and part.dtype == first.dtype and part.shape[1:] == first.shape[1:] for part in parts):
            if first.ndim:
                return list(parts)
            if all(part.ndim == 0 for part in parts):
                return torch.stack(list(parts))
    try:
        return Objects(objects.dumps(part, pickle) for part in parts)
    except TypeError as error:
        raise TypeError(f"field {name}: {error}") from None


def _kept(tensor, ndim):
    """Whether a column has such values, of so many dimensions a row."""
    return tensor.layout is torch.strided and ndim <= MAX_DIMS and not hasattr(tensor, "to_local") and \
        bool(library().dray_dtype_parse(str(tensor.dtype).rpartition(".")[2].encode()))


def rows_of(name: str, value: Any, rows: int) -> Any:
    """A tensor that can be a column, or an entry a row."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            plain = value.layout is torch.jagged and value._ragged_idx == 1 and value._lengths is None
            kept = plain and _kept(value.values(), value.ndim - 1)
            found = parts = value if kept else value.unbind()
        else:
            parts, found = value, value
            if not _kept(value, value.ndim - 1):
                found = list(value)
    elif is_non_tensor(value):
        parts = found = value.tolist() if isinstance(value, NonTensorStack) else _each(value.data, rows)
    else:
        parts = found = list(value)
    if len(parts) != rows:
        raise ValueError(f"field {name}: values of {rows} rows expected, found {len(parts)}")
    return found


def _each(data, rows):
    """Of NonTensorData: a value a row, or the same one for all."""
    if isinstance(data, (list, tuple, np.ndarray)) and len(data) == rows:
        return data.tolist() if isinstance(data, np.ndarray) and data.dtype.kind in "OSU" else list(data)
    return [data] * rows


def one_row(fields: Mapping[str, Any]) -> TensorDict:
    """A TensorDict of one row: tensors get their first dimension."""
    return TensorDict({name: value.unsqueeze(0) if isinstance(value, torch.Tensor) and not value.is_nested
                       else value if isinstance(value, torch.Tensor) else NonTensorStack(value)
                       for name, value in fields.items()}, batch_size=[1])


def tensordict_of(batch: Any, fields: Sequence[str], pickle: bool = False) -> TensorDict:
    """The fields of a batch (Queue.get with framework="torch") as this process's own writable memory. Tensors of one
    dimension or more a row are nested tensors of the jagged layout, whether their lengths differ or not; of what that
    layout cannot hold, of the strided one; objects, and rows that nothing holds together, a NonTensorStack."""
    found, size = {name: _field(batch, name, pickle) for name in fields}, torch.Size([batch.rows])
    make = _unchecked() if all(isinstance(field, torch.Tensor) for field in found.values()) else None
    return make(found, batch_size=size) if make else TensorDict(found, batch_size=size)


@functools.lru_cache(maxsize=None)
def _unchecked():
    """How TensorDict's own operations make their results: without asking each field for its shape, which takes a nested
    tensor 30 us. None: this tensordict has nothing like it."""
    fields, size = {"a": torch.arange(2)}, torch.Size([2])
    try:
        made, wanted = TensorDict._new_unsafe(fields, batch_size=size), TensorDict(fields, batch_size=size)
        alike = type(made) is TensorDict and made.batch_size == size and (made == wanted).all() and not made.is_locked
    except (AttributeError, TypeError, RuntimeError):
        return None
    return TensorDict._new_unsafe if alike else None


def _field(batch, name, pickle):
    try:
        found = batch[name]
    except DrayError as error:
        if error.name not in _UNLIKE:
            raise
        cells = batch.cells(name)
        if any(cell is None for cell in cells):
            raise DrayError(ENOENT, f"column {name}: a value in each row expected, some rows have none") from None
        return together([_cell(cell, pickle) for cell in cells])
    if batch._contents[name]:
        return together([objects.loads(cell, pickle) for cell in batch.list(name)])
    if found.is_nested or found.ndim == 1:
        return found
    rows, each = found.shape[:2]
    return jagged(found.view(rows * each, *found.shape[2:]),
                  *batch.offsets_of(each, lambda: (torch.arange(rows + 1) * each, each, each)))


def has(batch: Any, name: str) -> np.ndarray:
    """A bool a row: whether it has a value in the column."""
    found, column = np.ones(batch.rows, bool), Column()
    key, part, error = text(name), ColumnPart(), Error()
    with batch._pins:
        suspects = range(batch.rows)
        if not library().dray_batch_column(batch._batch, key, c.byref(column), c.byref(error)):
            cells = np.frombuffer(c.string_at(column.cells, 8 * batch.rows), np.uint64)
            suspects = np.flatnonzero(cells == 0)  # an empty value may be nowhere, too
        for row in suspects:
            found[row] = library().dray_batch_cell(batch._batch, key, row, c.byref(part), c.byref(error)) != ENOENT
    return found


def schema_of(batch: Any, name: str) -> Optional[dict]:
    """What BatchMeta says of a field, where all rows have it. None: some have not."""
    rows = batch.rows
    if not has(batch, name).all():
        return None
    try:
        with batch._pins:
            room = batch._pins.room(rows)
            call("dray_batch_read", batch._batch, text(name), 0, rows, *room.at, 0)
            dtype, content, ndim, _, *shape = COLUMN_PART.unpack_from(room.part)[:4 + MAX_DIMS]
            offsets = room.offsets[:rows + 1].copy()
    except DrayError as error:
        if error.name not in _UNLIKE:
            raise
        cells = batch.cells(name)
        return _schema(getattr(cells[0], "dtype", None), None, [getattr(cell, "shape", ()) for cell in cells])
    if content:
        return {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
    name, shape = _dtype(dtype), tuple(shape[:ndim])
    dtype = _torch_dtype(name)
    if not shape or shape[0] >= 0:
        return _schema(dtype, torch.Size(shape or (1,)), None)
    shapes = [(int(each), *shape[1:]) for each in np.diff(offsets)]
    return _schema(dtype, torch.Size(shapes[0]), shapes)


def _schema(dtype, shape, shapes):
    found = {"dtype": dtype, "shape": shape, "is_nested": shapes is not None, "is_non_tensor": dtype is None}
    if shapes is not None:
        found["per_sample_shapes"] = [tuple(each) for each in shapes]
    return found


def put_cells(put: Any, name: str, cells: Sequence[Any], rows: Sequence[int], pickle: bool = False,
              dumped: bool = False) -> None:
    """put(rows, {name: values}) as often as the cells differ in dtype or in shape beyond their first dimension. dumped:
    objects are bytes already."""
    alike: dict = {}
    for row, cell in zip(rows, cells):
        kind = (cell.dtype, cell.ndim, cell.shape[1:]) if isinstance(cell, torch.Tensor) else None
        alike.setdefault(kind, []).append((row, cell))
    for kind, group in alike.items():
        of = [cell for _, cell in group]
        put([row for row, _ in group], {name: Objects(of) if dumped and kind is None else column_of(name, of, pickle)})


def _cell(cell, pickle):
    return objects.loads(cell, pickle) if isinstance(cell, bytes) else cell


def together(cells: Sequence[Any]) -> Any:
    """Of a cell a row what a TensorDict holds: a tensor, a nested one, or a NonTensorStack. Tensors of several dtypes are
    the last: torch's strided layout converts all of them to the first one's."""
    if all(isinstance(cell, torch.Tensor) for cell in cells) and len({cell.dtype for cell in cells}) == 1:
        if all(cell.ndim == 0 for cell in cells):
            return torch.stack(cells)
        for layout in (torch.jagged, torch.strided):
            try:
                return torch.nested.as_nested_tensor(cells, layout=layout)
            except (RuntimeError, TypeError):
                pass
    return NonTensorStack(*cells)
