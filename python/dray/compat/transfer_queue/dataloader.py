"""Batches as an iterable: StreamingDataset, and torch's DataLoader over it."""
from __future__ import annotations

import os
import time
from typing import Any, Callable, Iterator, Optional, Sequence

import torch
from tensordict import TensorDict

PAUSE = float(os.environ.get("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", "1"))  # seconds, where nothing is ready


def default_fetch_batch_fn(tq_client, data_fields, batch_size, partition_id, task_name, sampling_config, batch_index):
    """(TensorDict, BatchMeta) of the next rows, consumed; (None, BatchMeta): there are not enough yet."""
    meta = tq_client.get_meta(data_fields=data_fields, batch_size=batch_size, partition_id=partition_id,
                              task_name=task_name, sampling_config={**sampling_config, "batch_index": batch_index,
                                                                    "partition_id": partition_id})
    return (tq_client.get_data(meta) if meta.size else None), meta


def chunk_batch_fn(td: TensorDict, batch_meta: Any, micro_batch_size: int = 1) -> list:
    """[(TensorDict, BatchMeta)] of at most micro_batch_size rows each, in order."""
    if not isinstance(td, TensorDict):
        raise TypeError(f"a TensorDict expected, found a {type(td).__name__}")
    if not isinstance(micro_batch_size, int) or micro_batch_size <= 0:
        raise ValueError(f"micro_batch_size: a positive number expected, found {micro_batch_size!r}")
    if not len(td.batch_size):
        raise ValueError("a TensorDict with a batch size expected")
    rows = td.batch_size[0]
    if micro_batch_size > rows:
        raise ValueError(f"micro_batch_size ({micro_batch_size}) is more than the batch's {rows} rows")
    nested = {name: (value.unbind(), value.layout) for name, value in td.items()
              if isinstance(value, torch.Tensor) and value.is_nested}  # they cannot be sliced by rows
    plain, chunks = td.exclude(*nested), []
    for begin in range(0, rows, micro_batch_size):
        end = min(begin + micro_batch_size, rows)
        chunk = plain[begin:end]
        for name, (parts, layout) in nested.items():
            chunk[name] = torch.nested.as_nested_tensor(list(parts[begin:end]), layout=layout)
        chunks.append((chunk, batch_meta.select_samples(range(begin, end))))
    return chunks


class StreamingDataset(torch.utils.data.IterableDataset):
    """(TensorDict, BatchMeta) of micro_batch_size rows, out of batches of batch_size that were fetched and are kept in
    `buffer` until step(): reset() goes through them again. It ends where should_check_consumption_status is set and all
    rows of the partition are consumed. dp_rank: ranks of one number get the same rows (RankAwareSampler)."""

    def __init__(self, config: Any, batch_size: int, micro_batch_size: int, data_fields: Sequence[str], partition_id: str,
                 task_name: str, dp_rank: int, should_check_consumption_status: bool = False,
                 fetch_batch_fn: Optional[Callable] = None, process_batch_fn: Optional[Callable] = None):
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size must be >= 1, got {micro_batch_size}")
        if not data_fields:
            raise ValueError("data_fields: at least one name expected, found none")
        if dp_rank < 0:
            raise ValueError(f"dp_rank {dp_rank} must be greater than or equal to 0")
        super().__init__()
        self.config, self.batch_size, self.micro_batch_size = config, batch_size, micro_batch_size
        self.data_fields, self.partition_id, self.task_name = list(data_fields), partition_id, task_name
        self.dp_rank, self.should_check_consumption_status = dp_rank, should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn = process_batch_fn or chunk_batch_fn
        self.sampling_config = {"dp_rank": dp_rank, "task_name": task_name}
        self.buffer, self.batch_index, self._client = [], 0, None

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_client": None}  # a worker process has a client of its own

    def _ended(self):
        return self.should_check_consumption_status and \
            self._client.check_consumption_status(self.task_name, self.partition_id)

    def __iter__(self) -> Iterator:
        if self._client is None:
            from .interface import client_of
            self._client = client_of(self.config)
        while self.batch_index < len(self.buffer) or not self._ended():
            if self.batch_index == len(self.buffer):
                data, meta = self.fetch_batch_fn(
                    tq_client=self._client, data_fields=self.data_fields, batch_size=self.batch_size,
                    partition_id=self.partition_id, task_name=self.task_name, sampling_config=self.sampling_config,
                    batch_index=self.batch_index)
                if data is None:
                    time.sleep(PAUSE)
                    continue
                self.buffer.append((data, meta))
            self.batch_index += 1
            yield from self.process_batch_fn(*self.buffer[self.batch_index - 1], micro_batch_size=self.micro_batch_size)

    def reset(self) -> None:
        """From the first batch in the buffer again."""
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        """Goes on with another partition, and forgets the buffer."""
        self.buffer, self.batch_index, self.partition_id = [], 0, partition_id


def _as_it_is(batch):
    return batch


class StreamingDataLoader(torch.utils.data.DataLoader):
    """torch's DataLoader over a StreamingDataset, which makes the batches itself."""

    def __init__(self, dataset: StreamingDataset, num_workers: int = 0, collate_fn: Optional[Callable] = None,
                 pin_memory: bool = False, worker_init_fn: Optional[Callable] = None, multiprocessing_context: Any = None,
                 prefetch_factor: Optional[int] = None, persistent_workers: bool = False, pin_memory_device: str = ""):
        super().__init__(dataset, batch_size=None, num_workers=num_workers, collate_fn=collate_fn or _as_it_is,
                         pin_memory=pin_memory, worker_init_fn=worker_init_fn,
                         multiprocessing_context=multiprocessing_context, prefetch_factor=prefetch_factor,
                         persistent_workers=persistent_workers, pin_memory_device=pin_memory_device)

    def reset(self) -> None:
        self.dataset.reset()

    def step(self, partition_id: str) -> None:
        self.dataset.step(partition_id)

    def get_buffer(self) -> list:
        return self.dataset.buffer
