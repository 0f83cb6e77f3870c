"""What a process knows of the queue that all share: where it is, and how it was set up."""
from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field, replace
from typing import Any, Iterator, Optional

from ... import objects
from ..._library import DrayError
from ...lease import Lease
from ...pool import Pool
from ...queue import Queue
from ...weights import Context
from . import sampler as samplers

_NO_TASKS = {"unused": ([], [])}  # a queue is made with a task at least; rows with keys have none
_ARGUMENTS = {"GRPOGroupNSampler": ("n_samples_per_prompt",), "SeqlenBalancedSampler": ("n_samples_per_prompt", "dp_size")}
STATE = "state"  # the partition of the second queue


def memory() -> int:
    """Bytes that this host has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass
class Settings:
    """address: of the coordinator, None: $DRAY_ADDRESS. queue: its name. polling_mode: get_meta answers at once, with an
    empty BatchMeta where not enough is ready; else it waits for `patience` seconds. pickle: of what objects.dumps does not
    keep."""
    address: Optional[str] = None
    queue: str = "transfer_queue"
    capacity_rows: int = 0   # 0: dray's own default
    capacity_bytes: int = 0  # 0: half of what this host has
    timeout: float = 60.0
    polling_mode: bool = False
    pickle: bool = False
    patience: float = field(default_factory=lambda: float(os.environ.get("TQ_CONTROLLER_GET_METADATA_TIMEOUT", "60")))
    endpoint: Optional[str] = None  # of metrics
    sampler: Any = field(default_factory=samplers.SequentialSampler)

    SHARED = ("capacity_rows", "capacity_bytes", "polling_mode", "pickle", "patience", "endpoint")

    def __post_init__(self):
        self.capacity_bytes = self.capacity_bytes or memory() // 2

    def open(self) -> Queue:
        return Queue(self.queue, self.address, tasks=_NO_TASKS, session="transfer_queue", timeout=self.timeout,
                     capacity_rows=self.capacity_rows, capacity_bytes=self.capacity_bytes)

    def told(self) -> dict:
        """For other processes, as objects.dumps takes it."""
        kind = type(self.sampler).__name__
        known = getattr(samplers, kind, None) is type(self.sampler)
        arguments = {name: getattr(self.sampler, name) for name in _ARGUMENTS.get(kind, ())}
        return {**{name: getattr(self, name) for name in self.SHARED}, "sampler": [kind, known, arguments]}

    def heard(self, told: dict) -> "Settings":
        """Ours, as another process set it up."""
        kind, known, arguments = told["sampler"]
        sampler = getattr(samplers, kind)(**arguments) if known else \
            self.sampler if type(self.sampler).__name__ == kind else _Elsewhere(kind)
        return replace(self, sampler=sampler, **{name: told[name] for name in self.SHARED})


class _Elsewhere(samplers.BaseSampler):
    """A sampler of a class that this process was not given."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def sample(self, ready_indexes: list, batch_size: int, *args: Any, **kwargs: Any) -> tuple:
        raise RuntimeError(f"the sampler is a {self.kind} of the process that called init first: give init the same one here, "
                           "as controller.sampler")


class State:
    """A second queue beside the samples': settings, samplers' states, and batches that were not acknowledged. What
    several processes change they change in turns."""

    def __init__(self, settings: Settings):
        self._settings, self._name = settings, settings.queue + ".state"
        self.queues = Pool(lambda: Queue(self._name, settings.address, tasks=_NO_TASKS, session="transfer_queue",
                                         timeout=settings.timeout))
        self.contexts = Pool(lambda: Context(settings.address, timeout=settings.timeout))

    def lease_name(self, what: str) -> str:
        return f"{self._name}/{what}"[:256]

    @contextlib.contextmanager
    def turn(self, what: str) -> Iterator[None]:
        with self.contexts.one() as context, Lease(context, self.lease_name(what)):
            yield

    def read(self, key: str) -> Any:
        """None: there is none."""
        try:
            with self.queues.one() as queue, queue.get(STATE, [key], ["value"]) as batch:
                return objects.loads(batch.cell("value", 0))
        except DrayError as error:
            if error.name != "EAGAIN":
                raise
            return None

    def write(self, key: str, value: Any) -> None:
        with self.queues.one() as queue:
            queue.put(STATE, [key], {"value": [objects.dumps(value)]})

    def keys(self) -> list:
        with self.queues.one() as queue:
            return list(queue.list(STATE))

    def remove(self, *keys: str) -> None:
        with self.queues.one() as queue:
            queue.clear(STATE, list(keys) or None)

    def close(self) -> None:
        self.queues.close()
        self.contexts.close()
