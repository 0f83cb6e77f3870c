"""TransferQueue's values in dray's shared memory: `backend.storage_backend: Dray`. `import dray.integrations.transfer_queue`
in each process that uses TransferQueue, before or after it; docs/transfer-queue.md shows how it is used."""
from __future__ import annotations

import importlib
import importlib.abc
import sys

from .upstream import Upstream, spec_of_others

NAME = "Dray"
TRIED = "0.1.11"  # the version of TransferQueue that this was tried with

# What the backend needs of TransferQueue: the arguments that it gives, or is given, by name.
UPSTREAM = Upstream("TransferQueue", "transfer_queue", TRIED, {
    ("transfer_queue.storage.managers.base", "StorageManagerFactory.register"): ["manager_type"],
    ("transfer_queue.storage.clients.base", "StorageClientFactory.register"): ["client_type"],
    ("transfer_queue.storage.bootstrap.provider", "StorageBootstrapProvider.register_provider"): ["name"],
    ("transfer_queue.storage.managers.base", "KVStorageManager.__init__"):
        ["self", "controller_info", "config", "zmq_context"],
    ("transfer_queue.storage.managers.base", "KVStorageManager.put_data"): ["self", "data", "metadata", "data_parser"],
    ("transfer_queue.storage.managers.base", "KVStorageManager.get_data"): ["self", "metadata"],
    ("transfer_queue.storage.managers.base", "KVStorageManager.clear_data"): ["self", "metadata"],
    ("transfer_queue.storage.managers.base", "KVStorageManager.notify_data_update"):
        ["self", "partition_id", "global_indexes", "field_schema", "custom_backend_meta"],
    ("transfer_queue.storage.clients.base", "StorageKVClient.put"): ["self", "keys", "values"],
    ("transfer_queue.storage.clients.base", "StorageKVClient.get"):
        ["self", "keys", "shapes", "dtypes", "custom_backend_meta"],
    ("transfer_queue.storage.clients.base", "StorageKVClient.clear"): ["self", "keys", "custom_backend_meta"],
    ("transfer_queue.metadata", "extract_field_schema"): ["data"],
})


class _Behind(importlib.abc.MetaPathFinder):
    """Registers the backend behind the import of transfer_queue, which this process may never need."""

    def find_spec(self, name, path=None, target=None):
        if name != "transfer_queue":
            return None
        spec = spec_of_others(self, name, path, target)
        if spec is not None:
            spec.loader = _Loader(self, spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """The loader of one look for the module."""

    def __init__(self, finder, loader):
        self._finder, self._loader = finder, loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:  # until here: who only asks whether the module is there imports nothing
            sys.meta_path.remove(self._finder)
            register()


def register() -> None:
    """Backend "Dray" in TransferQueue's three registries, now or when TransferQueue is imported."""
    if "transfer_queue" in sys.modules:
        importlib.import_module(__name__ + "_storage")
    elif not any(isinstance(finder, _Behind) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Behind())


register()
