"""The calls by index and by key, over partitions of a queue whose rows are put, read and cleared without claims."""
from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import time
import uuid
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

import numpy as np
import torch
from tensordict import TensorDict

from ... import objects
from ..._library import ETIMEDOUT, DrayError, DrayTimeout
from ...columns import ROW
from ...lease import Lease
from ...pool import Pool
from ...tensordicts import columns_of, has, rows_of, schema_of, tensordict_of, together
from ...weights import Context
from . import saved
from .metadata import BatchMeta
from .sampler import SequentialSampler
from .settings import Settings, State

_NO_TAG = objects.dumps({})  # what most rows have
_PLACEHOLDER = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}


class StorageKeyNotFoundError(KeyError):
    """A row was cleared before it was read."""


class _Tags:
    """What samplers ask of a partition."""

    def __init__(self, tags: Mapping[int, dict]):
        self._tags = tags

    def get_custom_meta(self, global_indices: Iterable[int]) -> dict:
        return {index: self._tags[index] for index in global_indices if index in self._tags}


def tag_of(blob: Optional[bytes]) -> dict:
    return {} if blob is None or blob == _NO_TAG else objects.loads(blob)


def address_of(batch: Any) -> list:
    """What _custom_backend_meta keeps of each row."""
    return [{"_row": [int(row["slot"]), int(row["generation"])]} for row in batch]


class AsyncTransferQueueClient:
    """One process's. controller_info: Settings; the default is the queue at $DRAY_ADDRESS, as the process that called
    init set it up. Each call below has a twin, async_..., for coroutines. Any thread may call."""

    def __init__(self, client_id: str = "", controller_info: Optional[Settings] = None):
        self.client_id = client_id
        self.settings = controller_info if isinstance(controller_info, Settings) else Settings()
        self._queues, self.state = Pool(lambda: self.settings.open()), State(self.settings)
        self._unsettled, self._alive = {}, None  # what get_meta(ack=True) gave, and the lease that says that we live
        if not isinstance(controller_info, Settings):
            if told := self.state.read("settings"):
                self.settings = self.settings.heard(told)

    def initialize_storage_manager(self, manager_type: str = "", config: Any = None) -> None:
        """Nothing: the values are where the keys are."""

    def close(self) -> None:
        self._queues.close()
        self.state.close()
        if self._alive is not None:
            self._alive.close()

    # ---- what is there

    @contextlib.contextmanager
    def _got(self, partition, keys=None, columns=(), **more):
        """A batch; None: what is asked for is not there."""
        with self._queues.one() as queue:
            try:
                batch = queue.get(partition, keys, columns, framework="torch", copy=True, **more)
            except DrayError as error:
                if error.name != "EAGAIN":
                    raise
                batch = None
            if batch is None:
                yield None
            else:
                with batch:
                    yield batch

    def _there(self, partition):
        """{index: ROW} of the partition's rows."""
        with self._got(partition, partial=True) as batch:
            return {} if batch is None else dict(zip(batch.at["id"].tolist(), batch.at))

    def _meta(self, partition, batch, fields, ready=None):
        """The BatchMeta of a batch. fields None: those that all rows have. ready: None to look."""
        found = {name: schema_of(batch, name) for name in (batch.columns if fields is None else fields)
                 if fields is None or name in batch.columns}
        schema = {name: of for name, of in found.items() if of is not None}
        if ready is None:
            ready = np.ones(batch.rows, np.int8)
            for name in () if fields is None else fields:
                if name not in schema:
                    ready &= self._has(batch, name)
            schema.update({name: dict(_PLACEHOLDER) for name, of in found.items() if of is None and fields is not None})
        return BatchMeta(batch.at["id"].tolist(), [partition] * batch.rows, schema, ready, None,
                         [tag_of(blob) for blob in batch.tags], address_of(batch.at))

    @staticmethod
    def _has(batch, name):
        """An int8 a row."""
        return (has(batch, name) if name in batch.columns else np.zeros(batch.rows)).astype(np.int8)

    def _addresses(self, meta):
        """ROW of a batch of one partition."""
        at = np.zeros(meta.size, ROW)
        missing = [row for row, kept in enumerate(meta._custom_backend_meta) if "_row" not in kept]
        if missing:
            there = self._there(meta.partition_ids[0])
            for row in missing:
                if meta.global_indexes[row] not in there:
                    raise StorageKeyNotFoundError(f"partition {meta.partition_ids[0]}: row {meta.global_indexes[row]} is "
                                                  "not there")
                meta._custom_backend_meta[row].update(address_of([there[meta.global_indexes[row]]])[0])
        for row, kept in enumerate(meta._custom_backend_meta):
            at[row]["slot"], at[row]["generation"] = kept["_row"]
        return at

    @staticmethod
    def _by_partition(meta):
        """[(the rows' numbers, their BatchMeta)] of each partition."""
        numbers: dict = {}
        for number, partition in enumerate(meta.partition_ids):
            numbers.setdefault(partition, []).append(number)
        return [(each, meta if len(numbers) == 1 else meta.select_samples(each)) for each in numbers.values()]

    # ---- rows by index

    def get_meta(self, data_fields: Sequence[str], batch_size: int, partition_id: str, mode: str = "fetch",
                 task_name: Optional[str] = None, sampling_config: Optional[Mapping[str, Any]] = None,
                 ack: bool = False) -> BatchMeta:
        """mode "fetch": rows that have the fields and that the task has not consumed, chosen by the sampler; they are
        consumed at once. ack=True: until ack(meta) they are this process's; where it dies before, they are fetched again,
        with ack=True, in the batch that they were in. "force_fetch": all rows of the partition. "insert": new rows."""
        fields = list(data_fields)
        if mode == "insert":
            with self._queues.one() as queue:
                at = queue.put(partition_id, rows=batch_size)
            return BatchMeta(at["id"].tolist(), [partition_id] * batch_size,
                             {name: dict(_PLACEHOLDER) for name in fields}, None, None, None, address_of(at))
        if mode == "force_fetch":
            with self._got(partition_id, columns=fields, partial=True) as batch:
                return BatchMeta.empty() if batch is None else self._meta(partition_id, batch, fields)
        if mode != "fetch":
            raise ValueError(f"mode: insert, fetch or force_fetch expected, found {mode!r}")
        if not task_name:
            raise ValueError("task_name: expected with mode fetch, found none")
        if ack:
            return self._fetch_to_settle(fields, batch_size, partition_id, task_name, sampling_config)
        return self._fetch(fields, batch_size, partition_id, task_name, sampling_config)

    def _fetch(self, fields, count, partition, task, config):
        wait = 0.0 if self.settings.polling_mode else self.settings.patience
        if type(self.settings.sampler) is SequentialSampler:
            with self._got(partition, columns=fields, task=task, count=count, timeout=wait) as batch:
                return BatchMeta.empty() if batch is None else self._meta(partition, batch, fields)
        end = time.monotonic() + wait
        while (meta := self._sampled(fields, count, partition, task, dict(config or {}))) is None:
            left = end - time.monotonic()
            if left <= 0 and not wait:
                return BatchMeta.empty()
            if left <= 0:
                raise DrayTimeout(ETIMEDOUT, f"partition {partition}: the sampler chooses none of the rows that are ready for "
                                  f"{task}, {count} expected within {wait:g} s")
            with self._got(partition, columns=fields, task=task, peek=True, count=count, timeout=left):
                pass
            time.sleep(min(left, 0.05))  # enough are ready, and the sampler may want others
        return meta

    def _sampled(self, fields, count, partition, task, config):
        """None: there are not enough."""
        sampler, key = self.settings.sampler, "sampler"
        config = {"task_name": task, "partition_id": partition, **config}
        with self.state.turn(key):
            if (kept := self.state.read(key)) is not None:
                sampler.load_checkpoint(kept)
            ready, tags = {}, {}  # by slot: rows that were put one after the other have numbers that follow each other
            with self._got(partition, columns=fields, task=task, peek=True) as batch:
                if batch is not None:
                    ready = dict(zip(batch.at["slot"].tolist(), batch.at))
                    tags = {slot: tag_of(blob) for slot, blob in zip(ready, batch.tags)}
            if len(ready) < count and not sampler.has_cached_result(partition, task, config):
                return None
            chosen, consumed = sampler(list(ready), count, partition=_Tags(tags), **config)
            if not len(chosen):
                return None
            if fresh := [ready[slot] for slot in consumed if slot in ready]:
                with self._got(partition, at=np.array(fresh, ROW), task=task):
                    self.state.write(key, sampler.save_checkpoint())
        there = ready if all(slot in ready for slot in chosen) else \
            {int(row["slot"]): row for row in self._there(partition).values()}
        if gone := [slot for slot in chosen if slot not in there]:
            raise StorageKeyNotFoundError(f"partition {partition}: the rows in slots {gone}, which the sampler chose, were "
                                          "cleared")
        with self._got(partition, columns=fields, at=np.array([there[slot] for slot in chosen], ROW)) as batch:
            return self._meta(partition, batch, fields)

    # ---- rows that are fetched again where their process dies

    def _fetch_to_settle(self, fields, count, partition, task, config):
        prefix = f"ack {json.dumps([partition, task])} "
        for key in self.state.keys():
            if key.startswith(prefix) and key not in self._unsettled and (found := self._taken_over(key, partition, fields)):
                return found
        meta = self._fetch(fields, count, partition, task, config)
        if meta.size:
            key = prefix + uuid.uuid4().hex
            self._unsettled[key] = self._lease(key)
            self.state.write(key, [[int(number) for number in of["_row"]] for of in meta._custom_backend_meta])
            meta.set_extra_info("ack", key)
        return meta

    def _lease(self, key):
        if self._alive is None:
            self._alive = Context(self.settings.address, timeout=self.settings.timeout)
        return Lease(self._alive, self.state.lease_name(hashlib.sha256(key.encode()).hexdigest()), timeout=0)

    def _taken_over(self, key, partition, fields):
        """Of a batch whose process has died. None: it lives, or was acknowledged."""
        try:
            lease = self._lease(key)
        except DrayError as error:
            if error.name not in ("ETIMEDOUT", "EBUSY"):
                raise
            return None
        rows = self.state.read(key)
        at = np.zeros(len(rows or ()), ROW)
        at["slot"], at["generation"] = zip(*rows) if rows else ((), ())
        with self._got(partition, columns=fields, at=at, partial=True) if rows else contextlib.nullcontext() as batch:
            if batch is not None:
                self._unsettled[key] = lease
                meta = self._meta(partition, batch, fields)
                meta.set_extra_info("ack", key)
                return meta
        if rows:
            self.state.remove(key)  # its rows were cleared
        lease.release()
        return None

    def ack(self, metadata: BatchMeta) -> None:
        """What get_meta(ack=True) gave is done with. Twice is fine."""
        key = metadata.get_extra_info("ack")
        lease = self._unsettled.pop(key, None)
        if lease is not None:
            self.state.remove(key)
            lease.release()

    def put(self, data: TensorDict, metadata: Optional[BatchMeta] = None, partition_id: Optional[str] = None,
            data_parser: Optional[Callable] = None) -> BatchMeta:
        """Into the rows of metadata, whose tags go with them, or into new rows of the partition. Returns their BatchMeta,
        to which the fields were added."""
        if metadata is None:
            if partition_id is None:
                raise ValueError("partition_id must be provided if metadata is not given")
            with self._queues.one() as queue:
                at = queue.put(partition_id, None, self._columns(data, data_parser), rows=data.batch_size[0])
            metadata = BatchMeta(at["id"].tolist(), [partition_id] * len(at), None, None, None, None, address_of(at))
            return metadata.add_fields(data)
        if not metadata.size:
            raise ValueError("metadata cannot be none or empty")
        if data.batch_size[0] != metadata.size:
            raise ValueError(f"metadata of {data.batch_size[0]} rows expected, found {metadata.size}")
        parts = self._by_partition(metadata)
        for numbers, meta in parts:
            part = data if len(parts) == 1 else \
                {name: [rows_of(name, data.get(name), metadata.size)[row] for row in numbers] for name in data.keys()}
            with self._queues.one() as queue:
                queue.put(meta.partition_ids[0], None, self._columns(part, data_parser, len(numbers)),
                          [objects.dumps(tag) if tag else None for tag in meta.custom_meta], at=self._addresses(meta))
        return metadata.add_fields(data)

    def _columns(self, data, parser=None, rows=None):
        if parser is not None:
            rows = data.batch_size[0] if rows is None else rows
            data = {name: rows_of(name, data.get(name), rows) for name in data.keys()}
            data = {name: of if isinstance(of, torch.Tensor) and not of.is_nested else list(of) for name, of in data.items()}
            parser(data)
        return columns_of(data, self.settings.pickle, rows)

    def get_data(self, metadata: BatchMeta) -> TensorDict:
        """The fields that metadata names, in its order. StorageKeyNotFoundError: a row was cleared."""
        fields, parts = metadata.field_names, []
        if not fields or not metadata.size:
            return TensorDict({}, batch_size=[metadata.size])
        for numbers, meta in self._by_partition(metadata):
            try:
                with self._queues.one() as queue, queue.get(meta.partition_ids[0], None, fields, at=self._addresses(meta),
                                                            framework="torch", copy=True) as batch:
                    parts.append((numbers, tensordict_of(batch, fields, self.settings.pickle)))
            except DrayError as error:
                if error.name in ("ESTALE", "EAGAIN"):
                    raise StorageKeyNotFoundError(str(error)) from None
                raise
        if len(parts) == 1:
            return parts[0][1]
        joined = {}
        for name in fields:
            cells = [None] * metadata.size
            for numbers, part in parts:
                for number, cell in zip(numbers, rows_of(name, part.get(name), len(numbers))):
                    cells[number] = cell
            joined[name] = together(cells)
        return TensorDict(joined, batch_size=[metadata.size])

    def set_custom_meta(self, metadata: BatchMeta) -> None:
        for _, meta in self._by_partition(metadata):
            with self._queues.one() as queue:
                queue.put(meta.partition_ids[0], tags=[objects.dumps(tag) for tag in meta.custom_meta],
                          at=self._addresses(meta))

    def clear_partition(self, partition_id: str) -> None:
        with self._queues.one() as queue:
            try:
                queue.clear(partition_id)
            except DrayError as error:
                if error.name != "ENOENT":
                    raise
        if type(self.settings.sampler) is not SequentialSampler:
            with self.state.turn("sampler"):
                if (kept := self.state.read("sampler")) is not None:
                    self.settings.sampler.load_checkpoint(kept)
                    self.settings.sampler.clear_cache(partition_id)
                    self.state.write("sampler", self.settings.sampler.save_checkpoint())

    def clear_samples(self, metadata: BatchMeta) -> None:
        for _, meta in self._by_partition(metadata):
            with self._queues.one() as queue:
                queue.clear(meta.partition_ids[0], at=self._addresses(meta))

    # ---- how far a partition is

    def get_consumption_status(self, task_name: str, partition_id: str) -> tuple:
        """(indexes, int8 a row: 1 where the task has consumed it), or (None, None): there is no such partition."""
        there = list(self._there(partition_id))
        if not there:
            return None, None
        with self._got(partition_id, task=task_name, peek=True) as batch:
            left = set() if batch is None else set(batch.at["id"].tolist())
        return torch.tensor(there), torch.tensor([index not in left for index in there], dtype=torch.int8)

    def get_production_status(self, data_fields: Sequence[str], partition_id: str) -> tuple:
        """(indexes, int8 a row: 1 where it has all of the fields), or (None, None)."""
        with self._got(partition_id, columns=list(data_fields), partial=True) as batch:
            if batch is None:
                return None, None
            ready = np.ones(batch.rows, np.int8)
            for name in data_fields:
                ready &= self._has(batch, name)
            return torch.from_numpy(batch.at["id"].astype(np.int64)), torch.from_numpy(ready)

    def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        status = self.get_consumption_status(task_name, partition_id)[1]
        return status is not None and bool(status.all())

    def check_production_status(self, data_fields: Sequence[str], partition_id: str) -> bool:
        with self._queues.one() as queue:
            for of in queue.keyed():
                if of["name"] == partition_id:
                    return all(of["columns"].get(name, 0) == of["rows"] for name in data_fields)
        return False

    def reset_consumption(self, partition_id: str, task_name: Optional[str] = None) -> bool:
        """Whether there is such a partition."""
        with self._queues.one() as queue:
            queue.reset(partition_id, task_name)
        return partition_id in self.get_partition_list()

    def get_partition_list(self) -> list:
        with self._queues.one() as queue:
            return [of["name"] for of in queue.keyed()]

    # ---- rows by key

    def kv_retrieve_meta(self, keys: Any, partition_id: str, create: bool = False) -> BatchMeta:
        """Of the keys that are there; create: of all, those that are not there are made."""
        keys = [keys] if isinstance(keys, str) else list(keys)
        if create:
            with self._queues.one() as queue:
                queue.put(partition_id, keys)
        with self._got(partition_id, keys, None, partial=True) as batch:
            return BatchMeta.empty() if batch is None else self._meta(partition_id, batch, None)

    def kv_retrieve_keys(self, global_indexes: Any, partition_id: str) -> list:
        """None: a row without a key, or none."""
        with self._got(partition_id, partial=True) as batch:
            keys = {} if batch is None else dict(zip(batch.at["id"].tolist(), (key or None for key in batch.row_keys)))
        return [keys.get(index) for index in ([global_indexes] if isinstance(global_indexes, int) else global_indexes)]

    def kv_list(self, partition_id: Optional[str] = None) -> dict:
        """{partition: {key: tag}} of those that have keys."""
        with self._queues.one() as queue:
            found = queue.list() if partition_id is None else {partition_id: queue.list(partition_id)}
        return {partition: {key: tag_of(blob) for key, blob in keys.items() if key}
                for partition, keys in found.items() if any(keys)}

    def kv_put(self, keys: Sequence[str], partition_id: str, data: Optional[TensorDict], tags: Optional[Sequence[dict]],
               data_parser: Optional[Callable] = None) -> tuple:
        """Values and tags in one step; a tag's entries are added to those that the row has. (tags, fields that all of the
        rows have now)"""
        columns = {} if data is None else self._columns(data, data_parser)
        tags, known, had = [dict(tag or {}) for tag in tags or [{}] * len(keys)], {}, []
        with self._got(partition_id, list(keys), None, partial=True) as there:
            if there is not None:
                known = {key: tag_of(blob) for key, blob in zip(there.row_keys, there.tags)}
                if len(known) == len(keys):
                    had = [name for name in there.columns if has(there, name).all()]
        merged = [{**known.get(key, {}), **tag} for key, tag in zip(keys, tags)]
        with self._queues.one() as queue:
            queue.put(partition_id, list(keys), columns,
                      [(objects.dumps(new) if new else _NO_TAG) if tag or key not in known else None
                       for key, tag, new in zip(keys, tags, merged)])
        return merged, sorted({*had, *columns})

    def kv_get(self, keys: Sequence[str], partition_id: str, fields: Optional[Sequence[str]]) -> TensorDict:
        """fields None: those that all of the rows have. ValueError: keys or fields are not there."""
        with self._got(partition_id, list(keys), None if fields is None else list(fields), partial=True) as batch:
            if batch is None:
                raise ValueError(f"partition {partition_id}: keys or partition were not found!")
            if fields is None:
                return tensordict_of(batch, [name for name in batch.columns if has(batch, name).all()], self.settings.pickle)
            try:
                return tensordict_of(batch, fields, self.settings.pickle)
            except DrayError as error:
                if error.name != "ENOENT":
                    raise
            lacking = [name for name in fields if name not in batch.columns or not has(batch, name).all()]
            raise ValueError(f"partition {partition_id}: some fields are not ready in all the requested keys: "
                             f"{', '.join(lacking)}")

    def kv_clear(self, keys: Sequence[str], partition_id: str) -> None:
        with self._queues.one() as queue:
            queue.clear(partition_id, list(keys))

    # ---- checkpoints

    def save_controller_checkpoint(self, path: str) -> None:
        """Settings, and the samplers' state."""
        saved.write(path, [{"settings": self.settings.told(), "sampler": self.state.read("sampler")}])

    def load_controller_checkpoint(self, path: str) -> None:
        for kept in saved.read(path):
            if kept["sampler"] is None:
                self.state.remove("sampler")
            else:
                self.state.write("sampler", kept["sampler"])

    def save_storage_checkpoint(self, checkpoint_dir: str) -> None:
        """The rows, which need no claim to be read: what is put meanwhile may be in it or not."""
        with self._queues.one() as queue:
            saved.write(saved.rows_file(checkpoint_dir), saved.partitions(queue))

    def load_storage_checkpoint(self, checkpoint_dir: str) -> None:
        """All partitions are replaced by those of the file, which is checked before."""
        path = saved.rows_file(checkpoint_dir)
        saved.check(path)
        with self._queues.one() as queue:
            for of in queue.keyed():
                queue.clear(of["name"])
            for kept in saved.read(path):
                saved.put(queue, kept)


_TWINS = ("get_meta", "set_custom_meta", "put", "get_data", "clear_partition", "clear_samples", "get_consumption_status",
          "get_production_status", "check_consumption_status", "check_production_status", "reset_consumption",
          "get_partition_list", "kv_retrieve_meta", "kv_retrieve_keys", "kv_list", "save_controller_checkpoint",
          "load_controller_checkpoint", "save_storage_checkpoint", "load_storage_checkpoint")


def twin(call: Callable) -> Callable:
    """The same as a coroutine: the loop goes on meanwhile."""
    @functools.wraps(call)
    async def awaited(*arguments, **more):
        return await asyncio.to_thread(call, *arguments, **more)
    awaited.__name__ = awaited.__qualname__ = "async_" + call.__name__
    return awaited


for _name in _TWINS:
    setattr(AsyncTransferQueueClient, "async_" + _name, twin(getattr(AsyncTransferQueueClient, _name)))


class TransferQueueClient(AsyncTransferQueueClient):
    """The same; TransferQueue has two classes."""
