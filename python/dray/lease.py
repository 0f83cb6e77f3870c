"""Leases: processes that share something, a GPU or a core, take turns with it.

    with dray.Lease(context, ["engine+trainer/cuda:0"]) as lease:
        ...                            # nobody else has it; who asks meanwhile waits, in order
        if lease.check():              # others wait
            ..."""
from __future__ import annotations

import contextlib
import ctypes as c
from typing import Optional, Sequence, Union

from . import _library as _l
from ._library import DrayError, call, library



class Lease(_l.Opened):
    """The turn on all of the names, from the moment that it was made to release(), or to the end of the
    process. Waits for `timeout` seconds (None: the context's), in the order in which all asked: DrayTimeout.
    term: seconds after which it is lost, where others wait and nobody called check() (0: never).
    number: greater than that of any turn before it; what is shared can refuse smaller ones."""

    def __init__(self, context, names: Union[str, Sequence[str]], timeout: Optional[float] = None,
                 term: float = 0.0):
        names = [names] if isinstance(names, str) else list(names)
        self._open_as(f"the lease of {names[0] if names else 'nothing'}")
        options = _l.LeaseOptions(timeout_ns=_l.nanoseconds(timeout), term_ns=_l.nanoseconds(term))
        array = (c.c_char_p * max(len(names), 1))(*map(_l.text, names))
        self._context = context
        with self._use:
            context._open(self, "dray_lease_acquire", array, len(names), c.byref(options))
            self.number = library().dray_lease_number(self.pointer)

    def check(self) -> int:
        """How many wait for it; its term begins anew. DrayError (ESTALE): it is lost."""
        waiting = c.c_uint32()
        self._call("dray_lease_check", c.byref(waiting))
        return waiting.value

    def release(self) -> None:
        """The next one's turn. DrayError (ESTALE): it was lost before. A second time does nothing."""
        self._use.end(self._give)

    def _give(self):
        pointer, self.pointer = self.pointer, None
        if pointer:
            call("dray_lease_release", pointer)

    def _end(self):
        with contextlib.suppress(DrayError):
            self._give()

    def __exit__(self, kind, error, trace):
        try:
            self.release()
        except DrayError:
            if error is None:  # else that is the one to tell
                raise
