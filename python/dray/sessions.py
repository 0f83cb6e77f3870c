"""Sessions with the coordinator, and the objects that end with them."""
from __future__ import annotations

import ctypes as c
import os
import sys
import weakref
from typing import Optional

from . import _library as _l
from ._library import call

MODEL = "policy"  # the name of the model where none is given


class Context(_l.Opened):
    """A session with the coordinator (`dray serve`). One session for each process is enough. address: None takes
    $DRAY_ADDRESS. role: "trainer" for publishers, "engine" for subscribers; None: the role of the token, or "task".
    name: of this process in messages and in `dray status`; None: the name of its script. timeout: seconds for which
    this waits for a coordinator that does not listen yet, and for which calls wait that give no timeout. Several threads
    may use it at once."""
    _frees = "dray_close"

    def __init__(self, address: Optional[str] = None, role: Optional[str] = None, rank: int = 0,
                 name: Optional[str] = None, timeout: float = 60.0):
        self._open_as("the session")
        self._opened = weakref.WeakSet()  # what must end before it does
        options = _l.Options(address=address and address.encode(), role=role and role.encode(),
                             name=_l.text(name or _l.program_name()), rank=rank, timeout_ns=_l.nanoseconds(timeout))
        call("dray_open", options, c.byref(self.pointer))

    def barrier(self, name: str, count: int, timeout: Optional[float] = None) -> None:
        """Waits until `count` sessions have entered the barrier of this name."""
        self._beside("dray_barrier", _l.text(name), count, _l.nanoseconds(timeout))

    @property
    def member(self) -> int:
        """The id that the coordinator gave this session."""
        return self._number("dray_context_member")

    def _open(self, opened, function, *arguments):
        """Within `with opened._use:`."""
        with self._use.beside():
            with self._use.counting:
                self._opened.add(opened)
            call(function, self.pointer, *arguments, c.byref(opened.pointer))

    def close(self) -> None:
        """Closes what was opened through the session, and ends the session. DrayError (EBUSY): a call is under way in
        another thread."""
        for each in [self, *self._all_opened()]:
            each._use.check_idle()
        self._close_opened()
        super().close()

    def _all_opened(self):
        with self._use.counting:
            return list(self._opened)

    def _close_opened(self):
        for opened in self._all_opened():
            opened.close()

    def _end(self):
        self._close_opened()  # those of the last moment, too
        super()._end()


_sessions = {}  # (process, role): the Context of those that are given none


def session(role):
    """The session of this process in this role."""
    found = _sessions.get((os.getpid(), role))
    if found is None or not found.pointer:
        found = _sessions[os.getpid(), role] = Context(role=role, rank=place(None, None)[0])
    return found


def place(rank, world):
    """(rank, world), where they are not given torch.distributed's; 0 of 1 where it is not initialised."""
    dist = sys.modules.get("torch.distributed")
    known = dist is not None and dist.is_available() and dist.is_initialized()
    if rank is None and world is None:
        return (dist.get_rank(), dist.get_world_size()) if known else (0, 1)
    if rank is None or world is None:
        raise TypeError(f"rank and world: both or neither, found rank={rank}, world={world}")
    return rank, world


def no_context(what, given):
    if isinstance(given, Context):
        raise TypeError(f"{what}: the session goes into context=, found it in the place of the parameters")


class Laid(_l.Opened):
    """What has a layout, and is closed when nobody has it any more, too."""
    _layout = None

    def __del__(self):
        if not sys.is_finalizing():
            self.close()

    def _end(self):
        super()._end()
        if self._layout:
            self._layout.close()
        self._layout = None
