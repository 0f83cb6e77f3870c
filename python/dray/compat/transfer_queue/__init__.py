"""TransferQueue's interface over dray: `import dray.compat.transfer_queue as tq` where `import transfer_queue as tq` was.
docs/transfer-queue.md shows how it is used."""
from __future__ import annotations

import importlib
import sys

from .client import AsyncTransferQueueClient, StorageKeyNotFoundError, TransferQueueClient
from .dataloader import StreamingDataLoader, StreamingDataset
from .interface import (async_kv_batch_get, async_kv_batch_get_by_meta, async_kv_batch_put, async_kv_clear, async_kv_list,
                        async_kv_put, close, get_client, get_metrics_endpoint, init, kv_batch_get, kv_batch_get_by_meta,
                        kv_batch_put, kv_clear, kv_list, kv_put, load_checkpoint, save_checkpoint)
from .metadata import BatchMeta, KVBatchMeta
from .sampler import BaseSampler, GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler, SequentialSampler

TRIED = __version__ = "0.1.11"  # the version whose interface this is

__all__ = ["init", "close", "get_metrics_endpoint", "kv_put", "kv_batch_put", "kv_batch_get", "kv_batch_get_by_meta",
           "kv_list", "kv_clear", "async_kv_put", "async_kv_batch_put", "async_kv_batch_get", "async_kv_batch_get_by_meta",
           "async_kv_list", "async_kv_clear", "KVBatchMeta", "save_checkpoint", "load_checkpoint", "StreamingDataset",
           "StreamingDataLoader", "get_client", "BatchMeta", "TransferQueueClient", "AsyncTransferQueueClient",
           "StorageKeyNotFoundError", "BaseSampler", "GRPOGroupNSampler", "SequentialSampler", "RankAwareSampler",
           "SeqlenBalancedSampler", "install"]

# Where TransferQueue has what, and where it is here.
_PLACES = {"": "", ".client": ".client", ".interface": ".interface", ".metadata": ".metadata", ".sampler": ".sampler",
           **{f".sampler.{name}": ".sampler" for name in ("base", "sequential_sampler", "grpo_group_n_sampler",
                                                          "rank_aware_sampler", "seqlen_balanced_sampler")},
           ".dataloader": ".dataloader", ".dataloader.streaming_dataset": ".dataloader",
           ".dataloader.streaming_dataloader": ".dataloader"}


def install() -> None:
    """From now on `import transfer_queue` in this process gets this module, also in code that is not to be changed.
    RuntimeError: the other one was imported before."""
    there = sys.modules.get("transfer_queue")
    if there is not None and there is not sys.modules[__name__]:
        raise RuntimeError("dray.compat.transfer_queue.install() is to be called before transfer_queue is imported, and "
                           f"{getattr(there, '__file__', there)} was")
    for theirs, ours in _PLACES.items():
        sys.modules["transfer_queue" + theirs] = importlib.import_module(__name__ + ours)
