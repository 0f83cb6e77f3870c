"""Queues of a process: as many as threads use at once, each for one thread at a time."""
from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, Callable, Iterator


class Pool:
    """make: opens one. A process that was forked opens its own."""

    def __init__(self, make: Callable[[], Any]):
        self._make, self._free, self._guard, self._pid, self._closed = make, [], threading.Lock(), os.getpid(), False

    @contextlib.contextmanager
    def one(self) -> Iterator[Any]:
        if self._pid != os.getpid():
            self._free, self._guard, self._pid = [], threading.Lock(), os.getpid()
        with self._guard:
            found = self._free.pop() if self._free else None
        found = found if found is not None else self._make()
        try:
            yield found
        finally:
            with self._guard:
                kept = not self._closed
                if kept:
                    self._free.append(found)
            if not kept:
                found.close()

    def close(self) -> None:
        """Those that are in use are closed after it."""
        with self._guard:
            self._closed, free, self._free = True, self._free, []
        for each in free:
            each.close()
