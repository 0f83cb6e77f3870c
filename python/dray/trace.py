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
CAUSES = ("unknown", "samples", "weights", "readers", "ranks", "admission", "capacity", "tool", "restart",
          "controller", "lease")
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


def _kept(name: str):
    return _names.setdefault(name, c.create_string_buffer(name.encode()))


def enter(name: str, step: int = -1, kind: str = "busy", cause: str = "unknown") -> None:
    """A span of this thread, which goes on until leave(). What is entered within it is no part of it: spans
    of a thread never overlap. kind: busy, wait or transfer; cause: what is waited for, one of CAUSES."""
    _l.check_word("kind", kind, KINDS)
    _l.check_word("cause", cause, CAUSES)
    if kind == "wait":
        library().dray_trace_wait(CAUSES.index(cause), _kept(name), step)
    else:
        library().dray_trace_enter(KINDS.index(kind), _kept(name), step)


def leave() -> None:
    """Leaves the span that was entered last."""
    library().dray_trace_leave()


def worked(rows: int = -1, tokens: int = -1) -> None:
    """Adds to what the span that was entered last has worked on."""
    library().dray_trace_worked(rows, tokens)


def now() -> int:
    """The timeline's clock (CLOCK_MONOTONIC), in nanoseconds."""
    return library().dray_trace_now()


def response(step: int, slot: int, prompt_tokens: int, tokens: int, begin_ns: int, end_ns: int) -> None:
    """A finished response, for `dray simulate` and `dray size`: the step and slot of its row, the tokens of its
    prompt and of all of it, and when its work began and ended (now()). Batches of a Role record theirs."""
    library().dray_trace_response(step, slot, prompt_tokens, tokens, begin_ns, end_ns)


@contextmanager
def span(name: str, step: int = -1, kind: str = "busy", cause: str = "unknown"):
    """One span: what the block takes, but for spans within it. kind, cause: as enter's."""
    enter(name, step, kind, cause)
    try:
        yield
    finally:
        leave()


@contextmanager
def wait_and_transfer(name: str, version: int, cause: str):
    """The block waits, and then moves bytes: what it calls with the nanoseconds says how long it waited."""
    begin = library().dray_trace_now()

    def waited(wait_ns):
        library().dray_trace_span(KINDS.index("transfer"), _kept(name), begin + wait_ns,
                                  library().dray_trace_now(), version)
    with span("wait for " + cause, version, "wait", cause):
        yield waited


def merge(folder: Union[str, os.PathLike], out: Union[str, os.PathLike]) -> None:
    """The folder's *.spans as one JSON file, which https://ui.perfetto.dev opens."""
    call("dray_trace_merge", os.fspath(folder).encode(), os.fspath(out).encode())
