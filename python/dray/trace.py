"""A timeline of a job's processes, for Perfetto: what they do with samples and weights is recorded by
itself, and spans of one's own beside it.

    dray.trace.open("trace/trainer-0.spans", "trainer 0")    # in each process
    with dray.trace.span("forward", step=7):
        ...
    dray.trace.merge("trace", "trace.json")                  # afterwards, once"""
from __future__ import annotations

import ctypes as c
import os
from contextlib import contextmanager
from typing import Optional, Union

from . import _library as _l
from ._library import call, library

KINDS = ("busy", "wait", "transfer")
_names = {}  # the library keeps pointers to them


def open(path: Union[str, os.PathLike], process: Optional[str] = None) -> None:
    """Records from now on, into the file (*.spans, made anew). process: the row's label."""
    call("dray_trace_open", os.fspath(path).encode(), process.encode() if process else None)


def close() -> None:
    """Records no more, after a last flush."""
    call("dray_trace_open", None, None)


def flush() -> None:
    """What was recorded is in the file, and survives a kill. A process that ends does so itself with
    close()."""
    call("dray_trace_flush")


def is_on() -> bool:
    return bool(library().dray_trace_is_on())


@contextmanager
def span(name: str, step: int = -1, kind: str = "busy"):
    """One span: what the block takes. kind: busy, wait or transfer."""
    _l.check_word("kind", kind, KINDS)
    if not is_on():
        yield
        return
    kept = _names.setdefault(name, c.create_string_buffer(name.encode()))
    begin = library().dray_trace_now()
    try:
        yield
    finally:
        library().dray_trace_span(KINDS.index(kind), c.addressof(kept), begin,
                                  library().dray_trace_now(), step)


def merge(folder: Union[str, os.PathLike], out: Union[str, os.PathLike]) -> None:
    """The folder's *.spans as one JSON file, which https://ui.perfetto.dev opens."""
    call("dray_trace_merge", os.fspath(folder).encode(), os.fspath(out).encode())
