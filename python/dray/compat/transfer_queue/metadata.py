"""What is known of rows without their values: BatchMeta by indexes, KVBatchMeta by keys."""
from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Optional, Sequence

import numpy as np
import torch

_log = logging.getLogger("dray.transfer_queue")


def extract_field_schema(data) -> dict:
    """{field: {dtype, shape of a row, is_nested, is_non_tensor, and of nested ones per_sample_shapes}}"""
    rows, schema = data.batch_size[0], {}
    for name, value in data.items() if rows else ():
        tensor = isinstance(value, torch.Tensor)
        nested = tensor and value.is_nested
        parts = value.unbind() if nested else value
        if len(parts) != rows:
            raise ValueError(f"field {name}: values of {rows} rows expected, found {len(parts)}")
        of = schema[name] = {"dtype": value.dtype if tensor else None, "shape": None, "is_nested": nested,
                             "is_non_tensor": not tensor}
        if tensor:
            of["shape"] = torch.Size(parts[0].shape) if nested or value.ndim > 1 else torch.Size([1])
        if nested:
            of["per_sample_shapes"] = [tuple(part.shape) for part in parts]
    return schema


def _equal(a, b):
    """Of values that may be arrays."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)


def _joined_info(kind, infos):
    """Of several batches: what one of them says counts for all, and no two may say different things."""
    if any(info.keys() != infos[0].keys() for info in infos):
        _log.warning("%s.concat: the batches' extra_info have different keys, all are kept", kind)
    joined = {}
    for info in infos:
        for key, value in info.items():
            if not _equal(joined.setdefault(key, value), value):
                raise ValueError(f"{kind}.concat: extra_info {key} has conflicting values: {joined[key]!r}, {value!r}")
    return joined


def _ranges(rows, chunks):
    """`chunks` ranges one after the other, the first ones of a row more."""
    if rows < chunks:
        _log.warning("%d rows in %d chunks: some have none", rows, chunks)
    each, more = divmod(rows, chunks)
    ends = [number * each + min(number, more) for number in range(chunks + 1)]
    return [range(*pair) for pair in zip(ends, ends[1:])]


def _order(indexes, rows):
    if len(indexes) != rows:
        raise ValueError(f"{len(indexes)} indexes, which does not match the batch size {rows}")
    if len(set(indexes)) != rows:
        raise ValueError("Contain duplicate indexes: the new order names a row twice")
    if any(place not in range(rows) for place in indexes):
        raise ValueError(f"the new order names a row that is not in [0, {rows})")


class _Sample:
    """One row of a BatchMeta, to be read."""

    def __init__(self, batch: BatchMeta, row: int):
        self._batch, self._row = batch, row

    global_index = property(lambda self: self._batch.global_indexes[self._row])
    partition_id = property(lambda self: self._batch.partition_ids[self._row])
    production_status = property(lambda self: int(self._batch.production_status[self._row]))
    custom_meta = property(lambda self: MappingProxyType(self._batch.custom_meta[self._row]))

    @property
    def fields(self) -> MappingProxyType:
        """{field: its schema}; shape is this row's."""
        found = {}
        for name, schema in self._batch.field_schema.items():
            of = {key: value for key, value in schema.items() if key != "per_sample_shapes"}
            if schema.get("per_sample_shapes") is not None:
                of["shape"] = schema["per_sample_shapes"][self._row]
            found[name] = MappingProxyType(of)
        return MappingProxyType(found)

    def __repr__(self) -> str:
        return (f"sample(global_index={self.global_index}, partition_id={self.partition_id!r}, "
                f"production_status={self.production_status}, fields={list(self._batch.field_schema)})")


class _Samples(Sequence):
    def __init__(self, batch: BatchMeta):
        self._batch = batch

    def __len__(self) -> int:
        return self._batch.size

    def __getitem__(self, row) -> _Sample:
        return _Sample(self._batch, range(len(self))[row])


class BatchMeta:
    """Rows by index, their partitions, the schema of their fields, and each row's tag (custom_meta).

    production_status: an int8 a row, 1: all the fields are there. What dray keeps of a row is in _custom_backend_meta,
    under names that begin with "_"."""
    __slots__ = ("global_indexes", "partition_ids", "field_schema", "production_status", "extra_info", "custom_meta",
                 "_custom_backend_meta")
    _ROWS = ("global_indexes", "partition_ids", "custom_meta", "_custom_backend_meta")  # lists of an entry a row

    def __init__(self, global_indexes: Sequence[int], partition_ids: Sequence[str], field_schema: Optional[dict] = None,
                 production_status: Optional[np.ndarray] = None, extra_info: Optional[dict] = None,
                 custom_meta: Optional[Sequence[dict]] = None, _custom_backend_meta: Optional[Sequence[dict]] = None):
        rows = len(global_indexes)
        self.global_indexes, self.partition_ids = list(global_indexes), list(partition_ids)
        self.field_schema = {name: dict(schema) for name, schema in (field_schema or {}).items()}
        self.production_status = np.zeros(rows, np.int8) if production_status is None \
            else np.array(production_status, np.int8)
        self.extra_info = dict(extra_info or {})
        self.custom_meta = [dict(tag) for tag in custom_meta or [{}] * rows]
        self._custom_backend_meta = [dict(kept) for kept in _custom_backend_meta or [{}] * rows]
        lists = {name: getattr(self, name) for name in (*self._ROWS, "production_status")}
        lists.update({f"per_sample_shapes of {name}": schema["per_sample_shapes"]
                      for name, schema in self.field_schema.items() if schema.get("per_sample_shapes") is not None})
        for name, values in lists.items():
            if len(values) != rows:
                raise ValueError(f"BatchMeta: {name} has {len(values)} entries, global_indexes {rows}")

    def __getstate__(self) -> tuple:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __setstate__(self, state: Sequence) -> None:
        for name, value in zip(self.__slots__, state):
            setattr(self, name, value)
        self.production_status = np.array(self.production_status, np.int8)  # Ray's are read-only

    size = property(lambda self: len(self.global_indexes))
    field_names = property(lambda self: sorted(self.field_schema))
    samples = property(_Samples)

    @property
    def is_ready(self) -> bool:
        return self.size > 0 and bool((self.production_status == 1).all())

    def __len__(self) -> int:
        return self.size

    def __str__(self) -> str:
        return (f"BatchMeta(size={self.size}, field_names={self.field_names}, is_ready={self.is_ready}, "
                f"global_indexes={self.global_indexes}, extra_info={self.extra_info})")

    def _schema(self, name):
        if name not in self.field_schema:
            raise KeyError(f"BatchMeta: no field {name}, it has {', '.join(self.field_names) or 'none'}")
        return self.field_schema[name]

    def get_dtypes(self, field_name: str) -> list:
        return [self._schema(field_name).get("dtype")] * self.size

    def get_shapes(self, field_name: str) -> list:
        schema = self._schema(field_name)
        each = schema.get("per_sample_shapes")
        return [schema.get("shape")] * self.size if each is None else list(each)

    # ---- extra_info, of the batch

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        self.extra_info[key] = value

    def get_all_extra_info(self) -> dict:
        return copy.deepcopy(self.extra_info)

    def update_extra_info(self, info_dict: dict) -> None:
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        return key in self.extra_info

    # ---- custom_meta, a tag a row

    def get_all_custom_meta(self) -> list:
        return copy.deepcopy(self.custom_meta)

    def update_custom_meta(self, custom_meta: Optional[Sequence[dict]]) -> None:
        if custom_meta is None:
            return
        if len(custom_meta) != self.size:
            raise ValueError(f"custom_meta has {len(custom_meta)} entries, the batch {self.size} rows")
        for tag, new in zip(self.custom_meta, custom_meta):
            tag.update(new)

    def clear_custom_meta(self) -> None:
        self.custom_meta = [{} for _ in range(self.size)]

    # ---- rows and fields

    def add_fields(self, tensor_dict, set_all_ready: bool = True) -> BatchMeta:
        """In place; returns this batch."""
        rows = tensor_dict.batch_size[0]
        if not rows:
            _log.warning("BatchMeta.add_fields: there are no rows, nothing is added")
            return self
        if rows != self.size:
            raise ValueError(f"add_fields: values of {self.size} rows expected, found {rows}")
        self.field_schema.update(extract_field_schema(tensor_dict))
        if set_all_ready:
            self.production_status[:] = 1
        return self

    def _chosen(self, rows):
        """A schema's entries of these rows."""
        return {name: {key: [value[row] for row in rows] if key == "per_sample_shapes" and value is not None
                       else copy.deepcopy(value) for key, value in schema.items()}
                for name, schema in self.field_schema.items()}

    def select_samples(self, sample_indices: Sequence[int]) -> BatchMeta:
        rows = list(sample_indices)
        if any(row not in range(self.size) for row in rows):
            raise ValueError(f"sample_indices: numbers in [0, {self.size}) expected, found {rows}")
        lists = {name: copy.deepcopy([getattr(self, name)[row] for row in rows]) for name in self._ROWS}
        return BatchMeta(field_schema=self._chosen(rows), production_status=self.production_status[rows],
                         extra_info=self.extra_info, **lists)

    def select_fields(self, field_names: Sequence[str]) -> BatchMeta:
        """Those of them that it has."""
        chosen = self.copy()
        chosen.field_schema = {name: chosen.field_schema[name] for name in field_names if name in self.field_schema}
        chosen._custom_backend_meta = [{name: value for name, value in kept.items() if name[0] == "_" or name in field_names}
                                       for kept in chosen._custom_backend_meta]
        return chosen

    def copy(self) -> BatchMeta:
        return BatchMeta(**{name: copy.deepcopy(getattr(self, name)) for name in self.__slots__})

    def __getitem__(self, item) -> BatchMeta:
        if isinstance(item, (int, np.integer)):
            if item not in range(-self.size, self.size):
                raise IndexError(f"BatchMeta has {self.size} rows, not row {item}")
            return self.select_samples([item % self.size])
        if isinstance(item, slice):
            return self.select_samples(range(self.size)[item])
        raise TypeError(f"BatchMeta: a row or a slice expected, found a {type(item).__name__}")

    def chunk(self, chunks: int) -> list:
        return [self.select_samples(rows) for rows in _ranges(self.size, chunks)]

    def chunk_by_partition(self) -> list:
        rows: dict = {}
        for row, partition in enumerate(self.partition_ids):
            rows.setdefault(partition, []).append(row)
        return [self.select_samples(each) for each in rows.values()]

    def union(self, other: Optional[BatchMeta]) -> BatchMeta:
        """The fields of both, of the same rows; what both have, as the other one says."""
        if not other or not self.size:
            return (other or self).copy()
        for name in ("global_indexes", "partition_ids"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(f"BatchMeta.union: {name} do not match: {getattr(self, name)}, {getattr(other, name)}")
        both, other = self.copy(), other.copy()
        both.field_schema.update(other.field_schema)
        both.extra_info.update(other.extra_info)
        both.production_status &= other.production_status
        for name in ("custom_meta", "_custom_backend_meta"):
            for mine, theirs in zip(getattr(both, name), getattr(other, name)):
                mine.update(theirs)
        return both

    @classmethod
    def concat(cls, data: Sequence[BatchMeta], validate: bool = True) -> BatchMeta:
        """One batch after the other. validate: they have the same fields, of the same dtypes."""
        data = [batch for batch in data if batch]
        if not data:
            _log.warning("BatchMeta.concat: there are no rows")
            return cls.empty()
        for number, batch in enumerate(data if validate else ()):
            if batch.field_names != data[0].field_names:
                raise ValueError(f"BatchMeta.concat: field_names mismatch: batch 0 has {data[0].field_names}, batch "
                                 f"{number} {batch.field_names}")
            for name in batch.field_names:
                dtypes = [each.field_schema[name].get("dtype") for each in (data[0], batch)]
                if dtypes[0] != dtypes[1]:
                    raise ValueError(f"BatchMeta.concat: field {name} dtype mismatch: {dtypes[0]} in batch 0, "
                                     f"{dtypes[1]} in batch {number}")
        lists = {name: [entry for batch in data for entry in getattr(batch, name)] for name in cls._ROWS}
        return cls(field_schema={name: cls._joined_schema(name, data) for name in data[0].field_schema},
                   production_status=np.concatenate([batch.production_status for batch in data]),
                   extra_info=_joined_info("BatchMeta", [batch.extra_info for batch in data]), **lists)

    @staticmethod
    def _joined_schema(name, data):
        schemas = [batch.field_schema.get(name, {}) for batch in data]
        nested = any(schema.get("is_nested") for schema in schemas)
        joined = {"dtype": schemas[0].get("dtype"), "shape": None if nested else schemas[0].get("shape"),
                  "is_nested": nested, "is_non_tensor": schemas[0].get("is_non_tensor", False)}
        if nested or any(schema.get("per_sample_shapes") for schema in schemas):
            joined["per_sample_shapes"] = [shape for batch, schema in zip(data, schemas) for shape in
                                           (schema.get("per_sample_shapes") or [schema.get("shape")] * batch.size)]
        return joined

    def reorder(self, indices: Sequence[int]) -> None:
        """In place."""
        _order(indices, self.size)
        for name in self._ROWS:
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in indices])
        self.production_status = self.production_status[list(indices)]
        self.field_schema = self._chosen(indices)

    @classmethod
    def empty(cls, extra_info: Optional[dict] = None) -> BatchMeta:
        return cls([], [], extra_info=extra_info)


@dataclass
class KVBatchMeta:
    """Rows of one partition by their keys, each with its tag, and which fields they have."""
    keys: list = field(default_factory=list)
    tags: list = field(default_factory=list)
    partition_id: Optional[str] = None
    fields: Optional[list] = None
    extra_info: Optional[dict] = field(default_factory=dict)

    def __post_init__(self):
        if len(self.keys) != len(self.tags):
            raise ValueError(f"keys and tags must have same length, but got {len(self.keys)} and {len(self.tags)}")
        for name in ("keys", "fields"):
            values = getattr(self, name)
            if values is not None and len(set(values)) != len(values):
                raise ValueError(f"Got duplicated {name}.")
        self.tags = [{} if type(tag) is dict and not tag else copy.deepcopy(tag) for tag in self.tags]
        self.extra_info = copy.deepcopy(self.extra_info)

    size = property(lambda self: len(self.keys))

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def _rows(self, rows):
        return KVBatchMeta([self.keys[row] for row in rows], [self.tags[row] for row in rows], self.partition_id,
                           self.fields, self.extra_info)

    def select_keys(self, keys_to_select: Sequence[str]) -> KVBatchMeta:
        if len(set(keys_to_select)) != len(keys_to_select):
            raise ValueError("Contain duplicate keys.")
        row = {key: number for number, key in enumerate(self.keys)}
        if unknown := [key for key in keys_to_select if key not in row]:
            raise RuntimeError(f"Keys {unknown} not found in current batch.")
        return self._rows([row[key] for key in keys_to_select])

    def reorder(self, indexes: Sequence[int]) -> None:
        """In place."""
        _order(indexes, self.size)
        self.keys, self.tags = [self.keys[row] for row in indexes], [self.tags[row] for row in indexes]

    def chunk(self, chunks: int) -> list:
        return [self._rows(rows) for rows in _ranges(self.size, chunks)]

    @classmethod
    def concat(cls, data: Sequence[KVBatchMeta]) -> KVBatchMeta:
        data = [batch for batch in data if batch]
        if not data:
            _log.warning("KVBatchMeta.concat: there are no rows")
            return cls()
        first = data[0]
        for batch in data:
            if batch.fields is not None and set(batch.fields) != set(first.fields or ()):
                raise ValueError(f"KVBatchMeta.concat: Field names do not match: {first.fields}, {batch.fields}")
            if batch.partition_id != first.partition_id:
                raise ValueError(f"KVBatchMeta.concat: Partition do not match: {first.partition_id}, "
                                 f"{batch.partition_id}")
        return cls([key for batch in data for key in batch.keys], [tag for batch in data for tag in batch.tags],
                   first.partition_id, first.fields,
                   _joined_info("KVBatchMeta", [batch.extra_info or {} for batch in data]) or None)
