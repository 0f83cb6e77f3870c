"""A storage manager of TransferQueue, its client and how it begins: whole columns in dray's shared memory."""
from __future__ import annotations

import asyncio
import os
from typing import Any, Optional

from .transfer_queue import NAME, UPSTREAM

UPSTREAM.check()

from tensordict import TensorDict
from transfer_queue.metadata import extract_field_schema
from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
from transfer_queue.storage.clients.base import StorageClientFactory, StorageKVClient
from transfer_queue.storage.managers.base import KVStorageManager, StorageManagerFactory

from ..compat.transfer_queue import saved
from ..compat.transfer_queue.settings import Settings
from ..pool import Pool
from ..server import serve
from ..tensordicts import column_of, columns_of, put_cells, rows_of, tensordict_of

VALUES = "values"  # the partition: a row a global index, a column a field
MOST = 65536       # rows of a put
_OPTIONS = ("address", "queue", "capacity_rows", "capacity_bytes", "timeout", "pickle")


def _settings(config: Any) -> Settings:
    """Of backend.Dray."""
    given = {name: value for name, value in dict(config or {}).items() if name != "client_name" and value is not None}
    if unknown := sorted(set(given) - set(_OPTIONS)):
        raise ValueError(f"backend.{NAME}: one of {', '.join(_OPTIONS)} expected, found {', '.join(unknown)}")
    return Settings(**{"queue": "transfer_queue.values", **given})


@StorageBootstrapProvider.register_provider(NAME)
def provide(conf: Any) -> dict:
    """In the process that makes TransferQueue's controller: which coordinator all use. backend.Dray.address, else
    $DRAY_ADDRESS, else one that is started here and ends with this process."""
    from omegaconf import OmegaConf, open_dict
    with open_dict(conf.backend):
        if conf.backend.get(NAME) is None:
            conf.backend[NAME] = OmegaConf.create({})
        of, server = conf.backend[NAME], None
        with open_dict(of):
            if not of.get("address"):
                server = None if os.environ.get("DRAY_ADDRESS") else serve()
                of.address = os.environ["DRAY_ADDRESS"]
    _settings(of)
    return {"server": server}


@StorageClientFactory.register("DrayStorageClient")
class DrayStorageClient(StorageKVClient):
    """Values by TransferQueue's keys, "index@field", and whole columns of them."""

    def __init__(self, config: Any):
        super().__init__(config)
        self._settings = _settings(config)
        self._queues = Pool(self._settings.open)

    def close(self) -> None:
        self._queues.close()

    @staticmethod
    def _fields(keys):
        """{field: [(the key's number, the row's key)]}"""
        fields: dict = {}
        for number, key in enumerate(keys):
            index, _, name = key.partition("@")
            fields.setdefault(name, []).append((number, index))
        return fields

    def put(self, keys: list, values: list) -> None:
        if len(keys) != len(values):
            raise ValueError(f"a value for each of {len(keys)} keys expected, found {len(values)}")
        with self._queues.one() as queue:
            for name, of in self._fields(keys).items():
                cells = [values[number] for number, _ in of]
                put_cells(lambda rows, columns: queue.put(VALUES, rows, columns), name, cells, [index for _, index in of],
                          self._settings.pickle)

    def get(self, keys: list, shapes=None, dtypes=None, custom_backend_meta=None) -> list:
        found = [None] * len(keys)
        for name, of in self._fields(keys).items():
            cells = rows_of(name, self.columns([index for _, index in of], [name])[name], len(of))
            for (number, _), cell in zip(of, cells):
                found[number] = cell
        return found

    def clear(self, keys: list, custom_backend_meta=None) -> None:
        """Whole rows: TransferQueue clears all of a row's fields at once."""
        rows = list(dict.fromkeys(key.partition("@")[0] for key in keys))
        with self._queues.one() as queue:
            for begin in range(0, len(rows), MOST):
                queue.clear(VALUES, rows[begin:begin + MOST])

    def put_columns(self, indexes: list, data: TensorDict) -> None:
        rows = [str(index) for index in indexes]
        with self._queues.one() as queue:
            if len(rows) <= MOST:
                queue.put(VALUES, rows, columns_of(data, self._settings.pickle))
                return
            parts = {name: rows_of(name, data.get(name), len(rows)) for name in data.keys()}
            for begin in range(0, len(rows), MOST):
                chunk = slice(begin, begin + MOST)
                queue.put(VALUES, rows[chunk], {name: column_of(name, of[chunk], self._settings.pickle)
                                                for name, of in parts.items()})

    def columns(self, indexes: list, fields: list) -> TensorDict:
        """This process's own memory, which may be written to."""
        with self._queues.one() as queue, queue.get(VALUES, [str(index) for index in indexes], fields, framework="torch",
                                                    copy=True) as batch:
            return tensordict_of(batch, fields, self._settings.pickle)

    def save(self, path: str) -> None:
        with self._queues.one() as queue:
            saved.write(path, saved.partitions(queue))

    def load(self, path: str) -> None:
        saved.check(path)
        with self._queues.one() as queue:
            if any(of["name"] == VALUES for of in queue.keyed()):
                queue.clear(VALUES)
            for kept in saved.read(path):
                saved.put(queue, kept)


@StorageManagerFactory.register(NAME)
class DrayStorageManager(KVStorageManager):
    """Whole columns into shared memory and out of it, instead of a message for each value."""

    def __init__(self, controller_info: Any, config: Any, zmq_context: Any = None):
        super().__init__(controller_info, {**dict(config or {}), "client_name": "DrayStorageClient"}, zmq_context)

    async def put_data(self, data: TensorDict, metadata: Any, data_parser: Optional[Any] = None) -> None:
        if data_parser is not None:
            raise NotImplementedError(f"storage_backend {NAME}: data_parser is not there; parse before the put")
        if data.batch_size[0] != metadata.size:
            raise ValueError(f"Batch size of data ({data.batch_size[0]}) does not match expected ({metadata.size})")
        if not metadata.size:
            return
        await asyncio.to_thread(self.storage_client.put_columns, metadata.global_indexes, data)
        await self.notify_data_update(metadata.partition_ids[0], metadata.global_indexes, extract_field_schema(data))

    async def get_data(self, metadata: Any) -> TensorDict:
        if not metadata.field_names:
            return TensorDict({}, batch_size=[metadata.size])
        return await asyncio.to_thread(self.storage_client.columns, metadata.global_indexes, metadata.field_names)

    async def clear_data(self, metadata: Any) -> None:
        await asyncio.to_thread(self.storage_client.clear, [str(index) for index in metadata.global_indexes])

    async def save_checkpoint(self, checkpoint_dir: str) -> None:
        await asyncio.to_thread(self.storage_client.save, saved.rows_file(checkpoint_dir))

    async def load_checkpoint(self, checkpoint_dir: str) -> None:
        await asyncio.to_thread(self.storage_client.load, saved.rows_file(checkpoint_dir))

    def close(self) -> None:
        super().close()
        if hasattr(self, "storage_client"):
            self.storage_client.close()
