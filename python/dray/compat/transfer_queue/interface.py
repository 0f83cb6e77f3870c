"""init and close, the calls by key, and checkpoints: what most programs use."""
from __future__ import annotations

import json
import logging
import os
import pathlib
import shutil
import urllib.parse
from typing import Any, Callable, Mapping, Optional, Sequence, Union

from tensordict import TensorDict

from ...server import serve
from ...tensordicts import one_row
from . import sampler as samplers
from .client import TransferQueueClient, twin
from .metadata import KVBatchMeta
from .settings import Settings

_log = logging.getLogger("dray.transfer_queue")
_TQ_CONTROLLER: Any = None  # the settings, from init to close
_client: Optional[TransferQueueClient] = None
_pid, _owner, _server = 0, False, None


def _plain(conf: Any) -> dict:
    """A configuration as dicts: omegaconf's, or dicts."""
    if conf is None:
        return {}
    if type(conf).__module__.startswith("omegaconf"):
        from omegaconf import OmegaConf
        conf = OmegaConf.to_container(conf, resolve=True)
    return {name: dict(of) if isinstance(of, Mapping) else of for name, of in dict(conf).items()}


def _sampler(given: Any) -> samplers.BaseSampler:
    if isinstance(given, str):
        kind = getattr(samplers, given, None)
        if not isinstance(kind, type) or not issubclass(kind, samplers.BaseSampler):
            raise ValueError(f"Could not find sampler {given}")
        return kind()
    if isinstance(given, type):
        given = given()
    if not isinstance(given, samplers.BaseSampler):
        raise ValueError(f"controller.sampler: a sampler expected, found a {type(given).__name__}")
    return given


_OPTIONS = ("address", "queue", "capacity_rows", "capacity_bytes", "timeout", "pickle")  # of backend.Dray


def _settings(conf: Any) -> Settings:
    conf = _plain(conf)
    backend, controller = conf.get("backend") or {}, conf.get("controller") or {}
    given = dict(backend.get("Dray") or {})
    if unknown := sorted(set(given) - set(_OPTIONS)):
        raise ValueError(f"backend.Dray: one of {', '.join(_OPTIONS)} expected, found {', '.join(unknown)}")
    rows = (backend.get("SimpleStorage") or {}).get("total_storage_size")
    if rows and "capacity_rows" not in given:
        given["capacity_rows"] = int(rows)
    return Settings(polling_mode=bool(controller.get("polling_mode", False)),
                    sampler=_sampler(controller.get("sampler") or "SequentialSampler"),
                    **{name: value for name, value in given.items() if value is not None})


# ---- init and close

def init(conf: Any = None) -> Any:
    """Makes the queue, or takes part in that which another process made: then conf does not count. The coordinator is that
    of backend.Dray.address or $DRAY_ADDRESS; where there is none, one is started with this process, and
    $DRAY_ADDRESS set for those that it starts. Returns conf."""
    global _TQ_CONTROLLER, _client, _pid, _owner, _server
    if _client is not None and _pid == os.getpid():
        return conf
    settings, metrics = _settings(conf), _plain(conf).get("metrics") or {}
    if not settings.address and not os.environ.get("DRAY_ADDRESS"):
        _server = serve(arguments=["--metrics", str(metrics.get("port") or 0)] if metrics.get("enabled") else ())
        settings.endpoint = _server.metrics and urllib.parse.urlsplit(_server.metrics).netloc
        _log.warning("dray: coordinator at %s; processes that this one does not start need it as DRAY_ADDRESS",
                     _server.address)
    elif metrics.get("enabled"):
        settings.endpoint = metrics.get("endpoint")
    client = TransferQueueClient(f"TransferQueueClient_{os.getpid()}", settings)
    with client.state.turn("init"):
        told = client.state.read("settings")
        _owner = told is None
        if _owner:
            client.state.write("settings", settings.told())
        else:
            client.settings = settings.heard(told)
    _client, _TQ_CONTROLLER, _pid = client, client.settings, os.getpid()
    return conf


def close() -> None:
    """Ends this process's part; in the process that made the queue, all that is in it goes, and a coordinator that init
    started ends."""
    global _TQ_CONTROLLER, _client, _owner, _server
    client, server, owner = _client, _server, _owner
    _client = _TQ_CONTROLLER = _server = None
    _owner = False
    if client is None or _pid != os.getpid():
        return
    try:
        if owner:
            for partition in client.get_partition_list():
                client.clear_partition(partition)
            client.state.remove()
    finally:
        client.close()
        if server is not None:
            server.close()


def get_client() -> TransferQueueClient:
    if _client is None or _pid != os.getpid():
        raise RuntimeError("TransferQueue is not initialized: call init() first")
    return _client


def client_of(config: Any) -> TransferQueueClient:
    """This process's; config says where another one's is."""
    global _client, _TQ_CONTROLLER, _pid
    if _client is None or _pid != os.getpid():
        settings = config if isinstance(config, Settings) else _settings(config)
        client = TransferQueueClient(f"TransferQueueClient_{os.getpid()}", settings)
        if told := client.state.read("settings"):
            client.settings = settings.heard(told)
        _client, _TQ_CONTROLLER, _pid = client, client.settings, os.getpid()
    return _client


def _joined() -> TransferQueueClient:
    """This process's client; a process that did not call init takes part in what another one made."""
    if _client is not None and _pid == os.getpid():
        return _client
    if not os.environ.get("DRAY_ADDRESS"):
        raise RuntimeError("TransferQueue is not initialized: call init() first, or set DRAY_ADDRESS")
    return client_of(None)


def get_metrics_endpoint() -> Optional[str]:
    """HOST:PORT of Prometheus' metrics, or None. The coordinator has them: `dray serve --metrics`."""
    return _joined().settings.endpoint


# ---- by key

def kv_batch_put(keys: Sequence[str], partition_id: str, fields: Optional[TensorDict] = None,
                 tags: Optional[Sequence[Mapping[str, Any]]] = None, data_parser: Optional[Callable] = None) -> KVBatchMeta:
    """Values and tags of rows, which are made where they are not there, in one step: who reads gets all of it, or what was
    before. .fields of what is returned: all that the rows have now."""
    if fields is None and tags is None:
        raise ValueError("Please provide at least one parameter of `fields` or `tags`.")
    if fields is not None and fields.batch_size[0] != len(keys):
        raise ValueError(f"`keys` with length {len(keys)} does not match the `fields` TensorDict with batch_size "
                         f"{fields.batch_size[0]}")
    if tags is not None and len(tags) != len(keys):
        raise ValueError(f"keys with length {len(keys)} does not match length of tags {len(tags)}")
    tags, names = _joined().kv_put(keys, partition_id, fields, tags, data_parser)
    return KVBatchMeta(keys=list(keys), tags=tags, partition_id=partition_id, fields=names)


def kv_put(key: str, partition_id: str, fields: Union[TensorDict, Mapping[str, Any], None] = None,
           tag: Optional[Mapping[str, Any]] = None, data_parser: Optional[Callable] = None) -> KVBatchMeta:
    """kv_batch_put of one row; a dict's values are the row's, without a first dimension."""
    if fields is None and tag is None:
        raise ValueError("Please provide at least one parameter of `fields` or `tag`.")
    if isinstance(fields, Mapping) and not isinstance(fields, TensorDict):
        fields = one_row(fields)
    return kv_batch_put([key], partition_id, fields, None if tag is None else [tag], data_parser)


def _names(names):
    return [names] if isinstance(names, str) else names


def kv_batch_get(keys: Union[str, Sequence[str]], partition_id: str,
                 select_fields: Union[str, Sequence[str], None] = None) -> TensorDict:
    """The rows' values, in memory of this process. select_fields None: those that all of the rows have. ValueError: the
    keys, or fields, are not there."""
    return _joined().kv_get(_names(keys), partition_id, _names(select_fields))


def kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: Union[str, Sequence[str], None] = None) -> TensorDict:
    if meta.partition_id is None:
        raise ValueError("Must provide partition_id in the input KVBatchMeta.")
    names = _names(select_fields)
    if names is not None and (unknown := [name for name in names if name not in (meta.fields or ())]):
        raise ValueError(f"select_fields: {', '.join(unknown)} not found in the metadata, which has {meta.fields}")
    return kv_batch_get(meta.keys, meta.partition_id, meta.fields if names is None else names)


def kv_list(partition_id: Optional[str] = None) -> dict:
    """{partition: {key: tag}}"""
    return _joined().kv_list(partition_id)


def kv_clear(keys: Union[str, Sequence[str]], partition_id: str) -> None:
    """Those that are there."""
    _joined().kv_clear(_names(keys), partition_id)


async_kv_put, async_kv_batch_put, async_kv_batch_get, async_kv_batch_get_by_meta, async_kv_list, async_kv_clear = map(
    twin, (kv_put, kv_batch_put, kv_batch_get, kv_batch_get_by_meta, kv_list, kv_clear))


# ---- checkpoints

_METADATA, _CONTROLLER = "metadata.json", "controller"


def save_checkpoint(checkpoint_dir: Union[str, pathlib.Path], *, include_storage: bool = True,
                    metadata: Optional[Mapping[str, Any]] = None) -> None:
    """All rows with their keys and tags, what was consumed, and the samplers' state, in a folder that is there whole or not
    at all. The rows are in memory: include_storage=False saves them, too."""
    if _TQ_CONTROLLER is None:
        raise RuntimeError("TransferQueue is not initialized. Call init() first.")
    if not include_storage:
        _log.warning("save_checkpoint: include_storage=False has no effect, the rows would be lost")
    folder = pathlib.Path(checkpoint_dir)
    new, old = (folder.with_name(folder.name + end) for end in (".tmp", ".old"))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        _client.save_controller_checkpoint(str(new / _CONTROLLER))
        _client.save_storage_checkpoint(str(new))
        with open(new / _METADATA, "w") as file:
            json.dump({"storage_saved": True, "user_metadata": dict(metadata or {})}, file, indent=2)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise


def load_checkpoint(checkpoint_dir: Union[str, pathlib.Path]) -> None:
    """What is there now is replaced. Rows get new indexes."""
    if _TQ_CONTROLLER is None:
        raise RuntimeError("TransferQueue is not initialized. Call init() first.")
    folder = pathlib.Path(checkpoint_dir)
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():  # a save ended between its two renames
        old.rename(folder)
    for path in (folder, folder / _METADATA, folder / _CONTROLLER):
        if not path.exists():
            raise FileNotFoundError(f"checkpoint {folder}: {path.name} is not there")
    _client.load_storage_checkpoint(str(folder))
    _client.load_controller_checkpoint(str(folder / _CONTROLLER))
