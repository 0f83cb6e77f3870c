"""Layouts recorded, not guessed: an engine's own loader runs once on tensors that have no data but know
which rectangle of which tensor of the checkpoint they are. What it does with them says where everything
lies, fused, cut, padded and with experts; not a byte of the engine changes.

    recorded = dray.weights.record(model.load_weights, tensors)   # {name: (shape, dtype)}
    subscriber = dray.Subscriber(recorded, rank=0, world=8)
    subscriber.update()    # by load_weights, and compared by bytes
    subscriber.update()    # in place

What is not understood is left to the loader, with the reason: recorded.by_loader."""
from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Mapping, Optional

from .dispatch import Recording
from .module import Snapshot, tensors_of
from .recorded import Recorded, describe
from .tensors import NotRecorded

__all__ = ["Recorded", "record", "record_source"]
_MOST_TRIES = 16
_one = threading.Lock()


@contextlib.contextmanager
def _threads(recording):
    """Threads that a loader starts, and functions that it gives to pools, are recorded, too."""
    run, submit = threading.Thread.run, ThreadPoolExecutor.submit

    def within(function, *arguments, **keywords):
        if recording.done or recording.is_inside():
            return function(*arguments, **keywords)
        with recording.mode():
            return function(*arguments, **keywords)

    threading.Thread.run = lambda thread: within(run, thread)
    ThreadPoolExecutor.submit = lambda pool, function, /, *arguments, **keywords: submit(
        pool, within, function, *arguments, **keywords)
    try:
        yield
    finally:
        threading.Thread.run, ThreadPoolExecutor.submit = run, submit


def _run(load, tensors, into, left_out, device):
    """One recorded run: {name: Parameter} and the sources that the loader needs in any case."""
    recording, snapshot = Recording(), Snapshot(into)
    before = tensors_of(into)
    for tensor in before.values():
        recording.target(tensor)
    try:
        with _threads(recording), recording.mode():
            load((name, recording.source(name, shape, dtype, device))
                 for name, (shape, dtype) in tensors.items() if name not in left_out)
        found = {}
        for name, tensor in tensors_of(into).items():
            store = recording.store_of(tensor)
            p = describe(recording, tensor, store) if store is not None else None
            if p is not None:
                found[name] = p
        read = _lost(recording, found)
    except NotRecorded as failure:
        failure.names = {recording.book.names[s] for s in failure.sources}
        raise
    finally:
        recording.done = True
        snapshot.restore()
    return found, read


def _lost(recording, found):
    """{tensor of the checkpoint: why its loader needs it, though no tensor of the engine's says so}"""
    book = recording.book
    read = {book.names[s]: "is read as a number, or for a handle" for s in recording.numbers}
    shown = set().union(*(p.sources for p in found.values()))
    for store in recording.stores.values():
        for write in store.writes if store.target else ():
            for name in {book.names[s] for s in book.sources_of(write.value)} - shown:
                read.setdefault(name, "is in no tensor of the engine by the end")
    return read


def record(load_weights: Callable, tensors: Mapping[str, Any], into: Optional[Any] = None,
           device: Any = "cpu") -> Recorded:
    """Which rectangle of which tensor of the checkpoint an engine's loader puts where.

    load_weights: the engine's, called with an iterable of (name, tensor); may go on with what the engine
    does after loading. tensors: the checkpoint's, {name: (shape, dtype)} or {name: tensor}, in the dtypes
    that the loader is to be given. into: the engine's module, or its (name, tensor) pairs; None: that
    whose method load_weights is. device: which the tensors say that they are on.
    No byte of the engine changes, and its attributes are put back. What the loader does that is not
    understood leaves the engine's tensor, or the checkpoint's, to it: `by_loader`, `load_tensors`."""
    if into is None:
        into = getattr(load_weights, "__self__", None)
        if into is None:
            raise TypeError("into: the engine's module expected, as load_weights is no method of one")
    listed = {name: (tuple(of[0]), of[1]) if isinstance(of, tuple) else (tuple(of.shape), of.dtype)
              for name, of in tensors.items()}
    left_out = {}
    with _one:
        for _ in range(_MOST_TRIES):
            try:
                found, read = _run(load_weights, listed, into, left_out, device)
                break
            except NotRecorded as failure:
                if not failure.names or failure.names <= set(left_out):
                    raise
                left_out.update((name, str(failure)) for name in failure.names)
        else:
            raise NotRecorded(f"after {_MOST_TRIES} attempts: " + next(reversed(left_out.values())))
    return Recorded(load_weights, into, listed, found, {**read, **left_out})


def record_source(convert: Callable, parameters: Any):
    """A trainer's side: record.source has it."""
    from .source import record_source
    return record_source(convert, parameters)
