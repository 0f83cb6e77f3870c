"""Which engines there are, for those who send them requests.

    with dray.weights.Engines() as engines:
        while True:
            for event, engine in engines.wait(math.inf):
                print(event, engine["group"], engine["version"], engine["serving"])
"""
from __future__ import annotations

import ctypes as c
from typing import Iterator, Optional

from . import _library as _l
from ._library import DrayError, library
from .sessions import session

EVENTS = {getattr(_l, f"ENGINE_{word.upper()}"): word for word in ("joined", "left", "updated", "torn")}
STATES = _l.words("GROUP_")


def _engine(info):
    return {"model": info.model.decode(), "group": info.group.decode(), "version": info.version, "epoch": info.epoch,
            "ranks": info.ranks, "world": info.world, "state": STATES[info.state], "serving": bool(info.serving),
            "leaving": bool(info.leaving)}


class Engines(_l.Opened):
    """The engines of a job as the coordinator sees them, a dict each: model, group, version, epoch (grows when a rank
    is lost), ranks, world, state (empty, whole, torn), serving (may be sent requests), leaving. An engine serves from
    its first commit on, while all its ranks are there. One thread at a time. context: a dray.weights.Context; None:
    the process's own."""
    _frees = "dray_engines_close"

    def __init__(self, context=None):
        self._open_as("the list of engines")
        self._context = context or session("engine")
        with self._use:
            self._context._open(self, "dray_engines_open")

    def _events(self, name, *arguments):
        found = []
        told = _l.EnginesFn(lambda _, event, info: found.append((EVENTS[event], _engine(info.contents))))
        self._call(name, *arguments, told, None)
        return found

    def poll(self) -> list:
        """What happened since the last poll or wait, without waiting: ("joined", "left", "updated" or "torn",
        engine) each. The first one takes the list as it is."""
        try:
            return self._events("dray_engines_poll")
        except DrayError as error:
            if error.name == "EAGAIN":
                return []
            raise

    def wait(self, timeout: Optional[float] = None) -> list:
        """The same, once there is something: DrayTimeout."""
        return self._events("dray_engines_wait", _l.nanoseconds(timeout))

    def __iter__(self) -> Iterator[dict]:
        info = _l.EngineInfo()
        for i in range(len(self)):
            self._call("dray_engines_entry", i, c.byref(info))
            yield _engine(info)

    def __len__(self) -> int:
        with self._use:
            return library().dray_engines_count(self.pointer)

    def fileno(self) -> int:
        """Readable when poll() may have news."""
        return self._number("dray_engines_fd")
