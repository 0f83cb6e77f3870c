"""Samplers: which of the rows that are ready a consumer gets, and which count as consumed with them."""
from __future__ import annotations

import heapq
import itertools
import logging
from abc import ABC, abstractmethod
from typing import Any, Optional, Sequence

_log = logging.getLogger("dray.transfer_queue")


class BaseSampler(ABC):
    """What was given to whom is kept in _states: {partition: {task: {dp_rank: {batch_index: what}}}}."""

    def __init__(self):
        self._states: dict = {}

    @abstractmethod
    def sample(self, ready_indexes: list, batch_size: int, *args: Any, **kwargs: Any) -> tuple:
        """(rows to get, rows that are consumed), out of ready_indexes; ([], []): wait for more."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple:
        return self.sample(*args, **kwargs)

    def _given(self, partition_id, task_name, dp_rank) -> dict:
        """{batch_index: what the rank was given}, to be written into."""
        return self._states.setdefault(partition_id, {}).setdefault(task_name, {}).setdefault(dp_rank, {})

    def has_cached_result(self, partition_id: str, task_name: str, sampling_config: Optional[dict] = None) -> bool:
        """Whether this rank's batch was chosen already: it can be had although not enough rows are ready."""
        asked = sampling_config or {}
        of_task = self._states.get(partition_id, {}).get(task_name, {})
        return asked.get("dp_rank") is not None and asked.get("batch_index") in of_task.get(asked["dp_rank"], {})

    def clear_cache(self, partition_id: str) -> None:
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict:
        return {"_states": self._states}

    def load_checkpoint(self, state: dict) -> None:
        self._states = state["_states"]


class SequentialSampler(BaseSampler):
    """The first rows that are ready, in their order."""

    def sample(self, ready_indexes: list, batch_size: int, *args: Any, **kwargs: Any) -> tuple:
        chosen = ready_indexes[:batch_size]
        return chosen, chosen


class RankAwareSampler(BaseSampler):
    """Each dp_rank gets batches of its own, and all processes of one dp_rank the same ones."""

    def sample(self, ready_indexes: list, batch_size: int, dp_rank: int, batch_index: int, task_name: str,
               partition_id: str, *args: Any, **kwargs: Any) -> tuple:
        if dp_rank < 0:
            raise ValueError(f"dp_rank {dp_rank} must be greater than or equal to 0")
        given = self._given(partition_id, task_name, dp_rank)
        if batch_index not in given:
            if len(ready_indexes) < batch_size:
                return [], []
            given[batch_index] = ready_indexes[:batch_size]
        return given[batch_index], given[batch_index]


class GRPOGroupNSampler(BaseSampler):
    """Whole groups alone: rows of one prompt have n_samples_per_prompt indexes, one after the other."""

    def __init__(self, n_samples_per_prompt: int = 1):
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise ValueError(f"n_samples_per_prompt must be positive, got {n_samples_per_prompt}")
        self.n_samples_per_prompt = n_samples_per_prompt

    def sample(self, ready_indexes: list, batch_size: int, task_name: str = "", partition_id: str = "",
               *args: Any, **kwargs: Any) -> tuple:
        rank, number = kwargs.get("dp_rank"), kwargs.get("batch_index")
        if rank is not None:
            given = self._states.get(partition_id, {}).get(task_name, {}).get(rank, {})
            if number in given:
                return given[number]
        chosen = self._groups(ready_indexes, batch_size)
        if chosen and rank is not None:
            self._given(partition_id, task_name, rank)[number] = chosen, list(chosen)
        return chosen, list(chosen)

    def _groups(self, ready_indexes, count):
        size = self.n_samples_per_prompt
        if count % size:
            raise ValueError(f"batch_size ({count}) must be a multiple of n_samples_per_prompt ({size})")
        ready, chosen, at = sorted(ready_indexes), [], 0
        while len(chosen) < count and at + size <= len(ready):
            if ready[at + size - 1] - ready[at] == size - 1:  # they differ: nothing is missing between them
                chosen += ready[at:at + size]
                at += size
            else:
                at += 1
        return chosen if len(chosen) == count else []


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Whole groups of batch_size * dp_size rows, divided among the ranks so that their tokens (`total_lengths` of
    each row's tag) are nearly equal: by Karmarkar and Karp's method."""

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1):
        super().__init__(n_samples_per_prompt)
        if dp_size <= 0:
            raise ValueError(f"dp_size must be positive, got {dp_size}")
        self.dp_size = dp_size
        self._balanced_cache: dict = {}  # (partition, task, batch_index): each rank's rows

    def sample(self, ready_indexes: list, batch_size: int, task_name: str = "", partition_id: str = "",
               *args: Any, **kwargs: Any) -> tuple:
        rank, number = kwargs.get("dp_rank", 0), kwargs.get("batch_index", 0)
        shares = self._balanced_cache.get((partition_id, task_name, number))
        if shares is None:
            rows = self._groups(ready_indexes, batch_size * self.dp_size)
            if not rows:
                return [], []
            shares = self._balanced_cache[partition_id, task_name, number] = self._divided(rows, kwargs.get("partition"))
            for each, share in enumerate(shares):
                self._given(partition_id, task_name, each)[number] = share, list(share)
        share = shares[rank] if rank < len(shares) else []
        return share, list(share)

    def _divided(self, rows, partition):
        size = self.n_samples_per_prompt
        groups = [rows[at:at + size] for at in range(0, len(rows), size)]
        if partition is None:
            _log.warning("SeqlenBalancedSampler: lengths are not known, each rank gets as many rows")
            each = len(groups) // self.dp_size
            parts = [range(rank * each, (rank + 1) * each) for rank in range(self.dp_size)]
        else:
            tags = partition.get_custom_meta(rows)
            lengths = [sum(tags.get(row, {}).get("total_lengths", 1) for row in group) for group in groups]
            parts = get_seqlen_balanced_partitions(lengths, self.dp_size, equal_size=len(groups) % self.dp_size == 0)
        return [[row for group in part for row in groups[group]] for part in parts]

    def clear_cache(self, partition_id: str) -> None:
        super().clear_cache(partition_id)
        self._balanced_cache = {key: of for key, of in self._balanced_cache.items() if key[0] != partition_id}

    def save_checkpoint(self) -> dict:
        return {**super().save_checkpoint(), "_balanced_cache": self._balanced_cache}

    def load_checkpoint(self, state: dict) -> None:
        super().load_checkpoint(state)
        self._balanced_cache = state["_balanced_cache"]


def get_seqlen_balanced_partitions(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list:
    """The places of seqlen_list in k parts of nearly equal sums, each part ascending; equal_size: of equal counts."""
    assert len(seqlen_list) >= k_partitions, f"number of items:[{len(seqlen_list)}] < k_partitions:[{k_partitions}]"
    return [sorted(part) for part in karmarkar_karp(seqlen_list, k_partitions, equal_size)]


def karmarkar_karp(seqlen_list: Sequence[int], k_partitions: int, equal_size: bool) -> list:
    """Largest differencing: the two divisions whose sums differ most become one, in which the largest part of one is
    joined with the smallest part of the other."""
    places = sorted(range(len(seqlen_list)), key=lambda place: (seqlen_list[place], place))
    at_once = k_partitions if equal_size else 1  # each division has as many items a part, from the start
    assert len(places) % at_once == 0, f"{len(places)} % {at_once} != 0"
    number, heap = itertools.count(), []

    def push(parts):
        parts.sort(key=lambda part: (part[0], part[1]), reverse=True)
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], next(number), parts))

    for at in range(0, len(places), at_once):
        parts = [(seqlen_list[place], [place]) for place in places[at:at + at_once]]
        push(parts + [(0, [])] * (k_partitions - at_once))
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        push([(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(other))])
    return [part for _, part in heap[0][2]]
