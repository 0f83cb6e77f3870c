"""Checkpoints: a file of objects, one after the other, each with its length and a sum of its bytes. No pickle."""
from __future__ import annotations

import hashlib
import os
import pathlib
import struct
from typing import Any, Iterable, Iterator

import numpy as np

from ... import objects
from ..._library import DrayError
from ...columns import ROW
from ...tensordicts import put_cells

_MAGIC, _HEAD = b"dray rows 1\n", struct.Struct("<Q32s")
_ROWS = 4096  # of a partition at once


def rows_file(folder: str) -> str:
    return os.path.join(folder, "rows")


def write(path: str, values: Iterable[Any]) -> None:
    """On the disk when this returns."""
    with open(path, "wb") as file:
        file.write(_MAGIC)
        for value in values:
            data = objects.dumps(value)
            file.write(_HEAD.pack(len(data), hashlib.sha256(data).digest()))
            file.write(data)
        file.write(_HEAD.pack(0, bytes(32)))
        file.flush()
        os.fsync(file.fileno())


def _parts(path):
    with open(path, "rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{path}: a checkpoint of rows expected, its first bytes are others")
        while True:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                raise ValueError(f"{path}: it ends at byte {file.tell()} without its end mark: it is not whole")
            size, digest = _HEAD.unpack(head)
            if not size:
                return
            if size > os.fstat(file.fileno()).st_size:
                raise ValueError(f"{path}: a part of {size} bytes is longer than the file")
            data = file.read(size)
            if hashlib.sha256(data).digest() != digest:
                raise ValueError(f"{path}: the part that ends at byte {file.tell()} is not what was written")
            yield data


def read(path: str) -> Iterator[Any]:
    """ValueError: it is not whole, or not what was written."""
    return map(objects.loads, _parts(path))


def check(path: str) -> None:
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"{path} is not there")
    for _ in _parts(path):
        pass


def partitions(queue: Any) -> Iterator[dict]:
    """All keyed partitions of a queue, so many rows at once."""
    for of in queue.keyed():
        name = of["name"]
        try:
            with queue.get(name, columns=(), partial=True) as batch:
                rows = batch.at.copy()
            consumed = {task: _consumed(queue, name, task, rows) for task in of["tasks"]}
            for begin in range(0, len(rows), _ROWS):
                yield _chunk(queue, name, rows[begin:begin + _ROWS], consumed)
        except DrayError as error:
            if error.name not in ("EAGAIN", "ESTALE"):  # else it was cleared meanwhile
                raise


def _consumed(queue, partition, task, rows):
    """The rows' ids."""
    try:
        with queue.get(partition, columns=(), task=task, peek=True) as batch:
            left = set(batch.at["id"].tolist())
    except DrayError as error:
        if error.name != "EAGAIN":
            raise
        left = set()
    return set(rows["id"].tolist()) - left


def _chunk(queue, partition, rows, consumed):
    with queue.get(partition, at=rows, partial=True, framework="torch", copy=True) as batch:
        columns = {}
        for name in batch.columns:
            cells = batch.cells(name)
            there = [row for row, cell in enumerate(cells) if cell is not None]
            columns[name] = [there, [cells[row] for row in there]]
        ids = batch.at["id"].tolist()
        return {"partition": partition, "rows": batch.rows, "keys": list(batch.row_keys), "tags": list(batch.tags),
                "columns": columns, "consumed": {task: [row for row, index in enumerate(ids) if index in of]
                                                 for task, of in consumed.items()}}


def put(queue: Any, kept: dict) -> None:
    """Rows as new ones: under their keys, where they have one."""
    partition, keys = kept["partition"], kept["keys"]
    at = np.zeros(kept["rows"], ROW)
    named, nameless = ([row for row, key in enumerate(keys) if bool(key) is wanted] for wanted in (True, False))
    if named:
        at[named] = queue.put(partition, [keys[row] for row in named], tags=[kept["tags"][row] for row in named])
    if nameless:
        at[nameless] = queue.put(partition, rows=len(nameless), tags=[kept["tags"][row] for row in nameless])
    for name, (there, cells) in kept["columns"].items():
        put_cells(lambda rows, columns: queue.put(partition, None, columns, at=at[rows]), name, cells, there, dumped=True)
    for task, rows in kept["consumed"].items():
        if rows:
            queue.get(partition, columns=(), at=at[rows], task=task).free()
