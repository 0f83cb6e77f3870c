"""A queue of samples: rows are put, claimed, read in place, and committed.

    with dray.Queue(tasks={"reward": (["prompt", "response"], ["score"]),
                           "train": (["response", "score"], [])}) as queue:
        queue.insert({"prompt": ["2+2=", "3+3="], "response": ["4", "7"]}, "step-1", seal=True)
        with queue.claim("reward", 2) as batch:             # committed at the end of the block,
            answers = batch.list("response")                # given back as failed by an exception
            batch.set("score", np.array([1.0, 0.0]))"""
from __future__ import annotations

import ctypes as c
import functools
import json
import operator
import os
import weakref
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Optional, Sequence, Union

import numpy as np

from . import _library as _l
from ._library import DrayError, call, library, text
from .columns import ROW, Pins, Rows
from .values import Values


@dataclass(frozen=True)
class Task:
    """The columns that a task needs, and those that it writes."""
    needs: Sequence[str]
    writes: Sequence[str] = ()


@dataclass(frozen=True)
class Refill:
    """Slots of one group that wait for another sample: `rows` rows from `slot` on."""
    id: int
    rows: int
    slot: int
    group: int
    attempts: int
    cause: str
    partition: str
    task: str
    reason: str


_CLAIM = {name for name, _ in _l.ClaimOptions._fields_}
_DURABILITY = ("none", "checkpoint", "journal")
_ON_LOSS = ("refill", "shrink_group", "drop_group")
_GIVEN = ("tasks", "task_count", "on_loss", "durability", "provisional", "provisional_count")  # in words of their own
_PADS = _l.POLICIES.index("token_balanced")  # this policy and all later ones pad
_CAUSES = ("failed", "stale", "rolled_back", "bytes_lost")


def _names(names):
    return (c.c_char_p * max(1, len(names)))(*map(text, names))


def _named(keys, at):
    """The number of named rows (None when none are named), and the names as the library takes them."""
    if keys is not None:
        if isinstance(keys, str):
            raise TypeError(f"keys: a list of them expected, found {keys!r}")
        return len(keys), (c.c_char_p * max(1, len(keys)))(*map(text.__wrapped__, keys)), None
    if at is None:
        return None, None, None
    rows = np.ascontiguousarray(at, ROW)
    return len(rows), None, rows.ctypes.data_as(c.POINTER(_l.Row))


def claim_options(task: str, count: int, partition: Optional[str], policy: str,
                  timeout: Optional[float], max_hold: float, **more: Any) -> _l.ClaimOptions:
    """The options of a claim. They must not be changed: equal claims share them."""
    _l.check_word("policy", policy, _l.POLICIES)
    for key, value in more.items():
        if key not in _CLAIM:
            raise TypeError(f"unknown keyword {key!r}; known: {', '.join(sorted(_CLAIM))}")
        more[key] = text(value) if value is None or isinstance(value, str) else operator.index(value)
    return _claim(text(task), text(partition), operator.index(count), _l.POLICIES.index(policy),
                  _l.nanoseconds(timeout), _l.nanoseconds(max_hold), **more)


@functools.lru_cache(maxsize=256)
def _claim(task, partition, count, policy, timeout_ns, max_hold_ns, **more):
    return _l.options(_l.ClaimOptions, task=task, partition=partition, count=count, policy=policy,
                      timeout_ns=timeout_ns, max_hold_ns=max_hold_ns, **more)


class Session:
    """A session with the coordinator, and a queue."""

    def __init__(self, name: str, address: Optional[str] = None, role: Optional[str] = "task",
                 rank: int = 0, timeout: float = 60.0, options: Optional[_l.QueueOptions] = None,
                 session: Optional[str] = None):
        self.context, self.queue, self._shapes = c.c_void_p(), c.c_void_p(), {}
        self._pid = os.getpid()
        call("dray_open",
             _l.Options(address=text(address), name=text(session or _l.program_name()), role=text(role), rank=rank,
                        timeout_ns=_l.nanoseconds(timeout)), c.byref(self.context))
        try:
            call("dray_queue_open", self.context, text(name),
                 c.byref(options) if options is not None else None, c.byref(self.queue))
        except DrayError:
            self.close()
            raise

    def fileno(self) -> int:
        return library().dray_queue_fd(self.queue)

    def status(self, pins: Pins) -> dict:
        """The queue's part of `dray status --json`."""
        out = c.c_void_p()
        pins.call("dray_queue_status", self.queue, c.byref(out))
        return json.loads(_l.take(out))

    def values(self, pins: Pins, name: str, values: Any, offsets: Any = None) -> Values:
        """Values for a column of the queue. Rows of one shape are put as ragged rows if the column is ragged. That
        is read from the queue's status, which is fetched until it has the column, as a column's form never
        changes."""
        given = Values(name, values, offsets)
        if given.one_shape():
            if name not in self._shapes:
                columns = self.status(pins).get("columns", {})
                self._shapes = {each: column["shape"] for each, column in columns.items()}
            if self._shapes.get(name) == [None, *given.shape[1:]]:
                given.cut()
        return given

    def close(self) -> None:
        queue, context = self.queue, self.context
        self.queue = self.context = None
        if os.getpid() != self._pid:
            return
        if queue:
            library().dray_queue_close(queue)
        if context:
            library().dray_close(context)


class _Held(Rows):
    """Rows with a batch of their own, which free() frees."""

    def __init__(self, owner: Queue, batch: int, framework: str, copy: Optional[bool], padded: bool,
                 first: int = 0, rows: Optional[int] = None):
        super().__init__(owner._pins, batch, first,
                         library().dray_batch_rows(batch) if rows is None else rows, framework, copy,
                         padded=padded)
        self._owner = owner
        owner._claims[batch] = weakref.ref(self)

    _unsettled = False

    def free(self) -> None:
        """Frees the rows. Claimed rows that were neither committed nor failed are given back at once, without
        counting an attempt. Arrays that were read stay valid."""
        if self._live:
            self._live = False
            self._owner._claims.pop(self._batch, None)
            self._pins.drop(self._batch, self._unsettled)

    def __del__(self):
        if getattr(self, "_live", False):
            self.free()


class Keyed(_Held):
    """Rows with keys, as get() returns them. Columns are read by name (see columns.Rows) if all rows have the same
    dtype and shape; cell() reads one row's value. row_keys: "" for a row without a key; tags: bytes, or None;
    at: the rows' addresses (columns.ROW; `attempt` is the row's version); columns: the names of readable columns."""

    _keyed = True

    def __init__(self, owner: Queue, batch: int, framework: str, copy: Optional[bool]):
        super().__init__(owner, batch, framework, copy, False)
        self.columns = []
        while name := library().dray_batch_column_name(batch, len(self.columns)):
            self.columns.append(name.decode())

    @property
    def at(self) -> np.ndarray:
        return self._found

    @functools.cached_property
    def row_keys(self) -> list:
        self._check()
        return [library().dray_batch_key(self._batch, i).decode() for i in range(self.rows)]

    @functools.cached_property
    def tags(self) -> list:
        self._check()
        blobs = (library().dray_batch_row_tag(self._batch, i) for i in range(self.rows))
        return [c.string_at(blob.data, blob.size) if blob.data else None for blob in blobs]

    def cell(self, name: str, index: int) -> Any:
        """The row's value, in its own dtype and shape: an array or tensor; str for strings, bytes for bytes and
        objects; None when the row has no value."""
        self._check()
        if name not in self.columns:
            raise KeyError(name)
        return self._cell(name, index)

    def cells(self, name: str) -> list:
        """cell() of all rows."""
        return [self.cell(name, i) for i in range(self.rows)]

    def __enter__(self) -> Keyed:
        return self

    def __exit__(self, *_):
        self.free()


class Claim(_Held):
    """Claimed rows: columns are read by name, see columns.Rows. As a context manager it commits at
    the end of the block; an exception gives the rows back as a failed attempt."""

    def __init__(self, owner: Queue, batch: int, framework: str, copy: Optional[bool], padded: bool,
                 follows: bool, first: int = 0, rows: Optional[int] = None):
        self._settled, self._follows = False, follows
        super().__init__(owner, batch, framework, copy, padded, first, rows)

    @property
    def _unsettled(self) -> bool:
        return not self._settled and not self._follows

    def set(self, name: str, values: Any, offsets: Any = None) -> None:
        """Sets an output column: one value per row, as Queue.insert takes them. Visible after commit."""
        self._check()
        given = self._owner._session.values(self._pins, name, values, offsets)
        given.for_rows(self.rows)
        self._pins.call("dray_batch_set", self._batch, c.byref(given.data()))

    def leave_open(self, rows: Sequence[int] = ()) -> None:
        """Makes the next commit write a piece for these rows (none given: all rows), to which the task appends
        later."""
        self._check()
        self._pins.call("dray_batch_leave_open", self._batch,
                        (c.c_uint32 * max(1, len(rows)))(*rows), len(rows))

    def commit(self) -> None:
        """Makes outputs, tags and the acknowledgement visible in one step, or none of them. Raises
        DrayError (ESTALE) when the claim was taken back. Repeating a commit succeeds."""
        self._check()
        self._pins.call("dray_batch_commit", self._batch)
        self._settled = True

    def fail(self, reason: str, rows: Sequence[int] = ()) -> None:
        """Gives rows (none given: all rows) back as a failed attempt."""
        self._check()
        self._pins.call("dray_batch_fail", self._batch, (c.c_uint32 * max(1, len(rows)))(*rows),
                        len(rows), _l.reason(reason))
        self._settled = not len(rows)

    def hold(self, seconds: float = 0) -> None:
        """Changes the time of a claim with max_hold: it is taken back so many seconds from now; 0 means never."""
        self._check()
        self._pins.call("dray_batch_hold", self._batch, _l.nanoseconds(seconds))

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, kind, value, trace):
        try:
            if self._live and not self._settled:
                if self._follows:
                    pass  # the first of the peers commits, and fails
                elif kind is None:
                    self.commit()
                elif issubclass(kind, Exception):
                    self.fail(f"{kind.__name__}: {value}"[:200])
        except DrayError:
            if kind is None:
                raise
        finally:
            self.free()


class Queue:
    """A queue of the coordinator. With `tasks` ({name: (needs, writes)}) it is created if it does not exist;
    without, the constructor waits until it exists. Use it from one thread at a time, and not after a fork.

    session: the name of this process in messages and `dray status`; None: the name of its script. role None: the
    token's role.
    on_loss: "refill", "shrink_group" or "drop_group"; durability: "none", "checkpoint" or "journal";
    further keywords are those of dray_queue_options: max_attempts, capacity_rows, batch_rows, ..."""

    def __init__(self, name: str = "samples", address: Optional[str] = None,
                 role: Optional[str] = "task", rank: int = 0, timeout: float = 60.0,
                 tasks: Optional[Mapping[str, Union[Task, Sequence[Sequence[str]]]]] = None,
                 on_loss: str = "refill", durability: str = "none",
                 provisional: Iterable[str] = (), session: Optional[str] = None, **more: Any):
        self._pins = None
        _l.check_word("on_loss", on_loss, _ON_LOSS)
        _l.check_word("durability", durability, _DURABILITY)
        options = None
        if tasks is not None:
            found = [(key, *(t if not isinstance(t, Task) else (t.needs, t.writes)))
                     for key, t in tasks.items()]
            for key, *columns in found:
                for names in columns:
                    if isinstance(names, str):
                        raise ValueError(f"task {key}: lists of columns expected, found {names!r}")
            _l.known_options(_l.QueueOptions, more, _GIVEN)
            array = (_l.QueueTask * max(1, len(found)))()
            for at, (key, needs, *writes) in zip(array, found):
                writes = list(writes[0]) if writes else []
                at.name, at.needs, at.needs_count = text(key), _names(list(needs)), len(needs)
                at.writes, at.writes_count = _names(writes), len(writes)
            provisional = list(provisional)
            more = {key: text(v) if isinstance(v, str) else v for key, v in more.items()}
            options = _l.options(_l.QueueOptions, tasks=array, task_count=len(found),
                                 on_loss=1 + _ON_LOSS.index(on_loss),
                                 durability=1 + _DURABILITY.index(durability),
                                 provisional=_names(provisional),
                                 provisional_count=len(provisional), **more)
        elif more:
            raise TypeError(f"{', '.join(more)}: only with tasks, by whom the queue is made")
        self.name = name
        self._session = Session(name, address, role, rank, timeout, options, session)
        self._pins = Pins(f"queue {name}", self._session, library().dray_batch_free)
        self._claims = {}  # batch: a weak reference to its claim
        self._turn, self._asked = (None, None), False  # claims of coroutines: one at a time, by a lock of the event loop

    def fileno(self) -> int:
        with self._pins.briefly():
            return self._session.fileno()

    def close(self) -> None:
        """Closes the queue, and gives claimed rows back. Arrays that were read stay valid. Raises DrayError (EBUSY)
        when a call is under way in another thread."""
        if self._pins is not None:
            self._pins.close(self._free_claims)

    def _free_claims(self):
        for claim in list(self._claims.values()):
            claim = claim()
            if claim is not None:
                claim.free()
        self._pins._let_go()

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        self.close()

    def _call(self, name, *arguments):
        self._pins.call(name, self._session.queue, *arguments)

    def _call_within(self, name, *arguments):
        """The same, called within `with self._pins:`."""
        call(name, self._session.queue, *arguments)

    # ---- producers

    def insert(self, columns: Mapping[str, Any], partition: str, *, rows: Optional[int] = None,
               group_size: int = 1, once_per_group: bool = False,
               tags: Optional[Mapping[str, Any]] = None, seal: bool = False, row_bytes: int = 0,
               at_slot: Optional[int] = None, refill: Optional[Refill] = None,
               timeout: Optional[float] = None) -> int:
        """Puts rows at the end of the partition, all of them or none. Returns the slot of the first row.

        columns: {name: values}. Values are an array or tensor of (rows, ...), a list of strings, of bytes or of
        numbers, a list of arrays (ragged: one per row, of any lengths), a nested tensor, or the tuple
        (values, offsets), with offsets from 0 to the end of the values.
        The first rows of a column decide whether it is ragged; a ragged column takes arrays of rows of one
        length, too.
        Tensors on a GPU are copied to the host.
        group_size: rows of one prompt, which are adjacent; once_per_group: columns and tags have one entry per
        group, and are stored once. tags: {key: a number for all rows, or one per row}.
        seal: the partition gets no rows after these. timeout: how long to wait for room."""
        given = [self._session.values(self._pins, name, values) for name, values in columns.items()]
        per = group_size if once_per_group else 1
        if rows is None:
            if not given:
                raise ValueError("rows: how many, where no columns are given")
            rows = given[0].rows * per if refill is None or not once_per_group else refill.rows
        entries = rows // per if refill is None or not once_per_group else 1
        for values in given:
            values.for_rows(entries)
        options = _l.options(_l.InsertOptions, partition=text(partition), rows=rows, group_size=group_size,
                             once_per_group=int(once_per_group), known_only=1,
                             columns=(_l.ColumnData * max(1, len(given)))(*(v.data() for v in given)),
                             column_count=len(given), row_bytes=row_bytes,
                             timeout_ns=_l.nanoseconds(timeout),
                             at_slot=0 if at_slot is None else _l.number("at_slot", at_slot, 32) + 1,
                             refill=refill.id if refill else 0)
        self._tag(options, tags or {}, entries)
        first = c.c_uint32()
        self._call("dray_queue_insert", c.byref(options), c.byref(first))
        if seal:
            self.seal(partition, first.value + rows)
        return first.value

    @staticmethod
    def _tag(options, tags, entries):
        whole, single = [], []
        for key, values in tags.items():
            if np.ndim(values) == 0:
                whole.append(_l.Tag(text(key), float(values)))
                continue
            if len(values) != entries:
                raise ValueError(f"tag {key} has {len(values)} values, not {entries}")
            single += [_l.RowTag(i, text(key), float(v)) for i, v in enumerate(values)]
        options.tags, options.tag_count = (_l.Tag * max(1, len(whole)))(*whole), len(whole)
        options.row_tags = (_l.RowTag * max(1, len(single)))(*single)
        options.row_tag_count = len(single)

    def seal(self, partition: str, rows: int) -> None:
        """Seals the partition, which has so many rows and gets no more."""
        self._call("dray_queue_seal", text(partition), _l.number("rows", rows, 32))

    def refill(self, timeout: Optional[float] = None) -> Refill:
        """Waits until slots need another sample, which insert(..., refill=result) puts. Raises DrayError
        (ETIMEDOUT, or EEND when everything is settled)."""
        want = _l.Refill()
        self._call("dray_queue_refill_wait", _l.nanoseconds(timeout), c.byref(want))
        return Refill(want.id, want.rows, want.slot, want.group, want.attempts,
                      _CAUSES[want.cause], want.partition.decode(), want.task.decode(),
                      want.reason.decode("utf-8", "replace"))

    def decline(self, refill: Refill) -> None:
        """Answers a refill without another sample."""
        self._call("dray_queue_refill_decline", refill.id)

    def end(self) -> None:
        """Ends the queue: there will be no more partitions."""
        self._call("dray_queue_end")

    # ---- consumers

    def claim(self, task: str, count: int = 1, partition: Optional[str] = None, *,
              up_to: bool = False, policy: str = "fifo", timeout: Optional[float] = None,
              max_hold: float = 0.0, framework: str = "numpy",
              copy: Optional[bool] = None, **more: Any) -> Claim:
        """Claims `count` rows that are ready for the task, or fewer with up_to. Raises DrayError (ETIMEDOUT, or
        EEND when the partition or the queue is finished). partition None: any, the oldest
        first. copy: see columns.Rows. Further keywords are those of dray_claim_options: dp_rank,
        token_cap, fresh, ..."""
        _l.check_word("framework", framework, ("numpy", "torch"))
        options = claim_options(task, count, partition, policy, timeout, max_hold,
                                up_to=int(up_to), **more)
        batch, _ = self._claim_any([options])
        return Claim(self, batch, framework, copy, options.policy >= _PADS, options.peer > 0)

    async def claim_async(self, task: str, count: int = 1, partition: Optional[str] = None, *,
                          up_to: bool = False, policy: str = "fifo", timeout: Optional[float] = None,
                          max_hold: float = 0.0, framework: str = "numpy", copy: Optional[bool] = None,
                          **more: Any) -> Claim:
        """claim() for coroutines: the event loop, and other calls of this queue, go on while it waits. Several
        such claims wait one after the other: a later one's timeout begins when the earlier ones have ended. Rows
        for a cancelled claim are given back."""
        _l.check_word("framework", framework, ("numpy", "torch"))
        options = claim_options(task, count, partition, policy, timeout, max_hold, up_to=int(up_to), **more)
        import asyncio  # importing it takes longer than importing dray
        loop = asyncio.get_running_loop()
        if self._turn[0] is not loop:
            self._turn = loop, asyncio.Lock()
        answer = asyncio.ensure_future(self._answer(options, *self._turn))
        try:
            batch = await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(self._unwanted)
            raise
        return Claim(self, batch, framework, copy, options.policy >= _PADS, options.peer > 0)

    async def _answer(self, options, loop, turn):
        async with turn:
            if self._asked:  # an earlier event loop ended before the answer
                try:
                    self._pins.drop(await self._answered(loop), True)
                except DrayError:
                    pass
            self._call("dray_queue_claim_start", c.byref(options), 1)
            self._asked = True
            return await self._answered(loop)

    async def _answered(self, loop):
        import asyncio
        batch, readable = c.c_void_p(), asyncio.Event()
        while True:
            readable.clear()
            try:
                with self._pins:
                    try:
                        self._call_within("dray_queue_claim_poll", None, c.byref(batch))
                    except DrayError as error:
                        self._asked = error.name == "EAGAIN"
                        raise
                    self._asked = False
                    self._pins.hold(batch.value)
                return batch.value
            except DrayError as error:
                if not self._asked or error.name not in ("EAGAIN", "EBUSY"):
                    raise
                if error.name == "EBUSY":  # another thread is in a call, which may take the answer in
                    await asyncio.sleep(0.05)
                    continue
            try:  # another call may replace the connection, and then its number is somebody else's
                fd = os.dup(self.fileno())
            except OSError:  # it did just now
                await asyncio.sleep(0.05)
                continue
            loop.add_reader(fd, readable.set)
            try:  # the loop watches the connection of now, and looks for a later one by itself
                await asyncio.wait_for(readable.wait(), 1)
            except asyncio.TimeoutError:
                pass
            finally:
                loop.remove_reader(fd)
                os.close(fd)

    def _unwanted(self, answer):
        """Gives back the rows of a cancelled claim."""
        if not answer.cancelled() and answer.exception() is None:
            self._pins.drop(answer.result(), True)

    def _claim_any(self, options: Sequence[_l.ClaimOptions], timeout: Optional[float] = None) -> tuple:
        """Claims by the first of several options that can be filled. Returns the batch, which is held, and the
        index of its options. timeout is used instead of theirs."""
        batch, which, first = c.c_void_p(), c.c_uint32(), c.byref(options[0])
        if len(options) > 1 or timeout is not None:
            first = (_l.ClaimOptions * len(options))(*options)
            first[0].timeout_ns = options[0].timeout_ns if timeout is None else _l.nanoseconds(timeout)
        with self._pins:
            try:
                self._call_within("dray_queue_claim_any", first, len(options), c.byref(which), c.byref(batch))
                self._pins.hold(batch.value)
            except BaseException:  # a signal's handler raised, although there was an answer
                if batch.value and batch.value not in self._pins.held:
                    library().dray_batch_free(batch)
                raise
        return batch.value, which.value

    def _import(self, exported: bytes) -> int:
        """Opens a batch that another rank has exported. Returns the batch, which is held."""
        batch = c.c_void_p()
        with self._pins:
            self._call_within("dray_batch_import", exported, len(exported), c.byref(batch))
            self._pins.hold(batch.value)
        return batch.value

    def wait(self, partition: str, task: Optional[str] = None,
             timeout: Optional[float] = None) -> None:
        """Waits until the task (None: all tasks) is done with the sealed partition."""
        self._call("dray_queue_wait", text(partition), text(task), _l.nanoseconds(timeout))

    def clear(self, partition: str, keys: Optional[Sequence[str]] = None, *,
              at: Optional[np.ndarray] = None) -> None:
        """Drops the partition's rows; of a keyed partition, those with these keys or at these addresses that exist.
        Their memory is freed with their last reader."""
        if keys is None and at is None:
            return self._call("dray_queue_clear", text(partition))
        count, keys, at = _named(keys, at)
        self._call("dray_queue_clear_rows", text(partition), keys, at, count)

    # ---- rows with keys

    def put(self, partition: str, keys: Optional[Sequence[str]] = None,
            columns: Optional[Mapping[str, Any]] = None,
            tags: Optional[Sequence[Optional[bytes]]] = None, *, at: Optional[np.ndarray] = None,
            rows: Optional[int] = None, timeout: Optional[float] = None) -> np.ndarray:
        """Puts values (one per row, as insert() takes them) and tags (bytes; None: the row keeps its own) into the
        rows with these keys, or at these addresses, or into new rows without keys; all of them or none. New keys
        make new rows. Returns the rows' addresses (columns.ROW; `attempt` is the row's version)."""
        given = [Values(name, values) for name, values in (columns or {}).items()]
        named, keys, at = _named(keys, at)
        found = [n for n in (named, rows, *(v.rows for v in given), *([len(tags)] if tags is not None else []))
                 if n is not None]
        if not found:
            raise ValueError("rows: how many, where neither keys nor columns say")
        rows = found[0]
        for values in given:
            values.for_rows(rows)
        if any(n != rows for n in found):
            raise ValueError(f"put into {partition}: {rows} rows expected, found {found}")
        out = np.empty(rows, ROW)
        blobs = None if tags is None else (_l.Blob * max(1, rows))(
            *(_l.Blob(None if tag is None else c.cast(c.c_char_p(tag), c.c_void_p), len(tag or b"")) for tag in tags))
        options = _l.options(_l.PutOptions, partition=text(partition), rows=rows, keys=keys, at=at,
                             columns=(_l.ColumnData * max(1, len(given)))(*(v.data() for v in given)),
                             column_count=len(given), tags=blobs, timeout_ns=_l.nanoseconds(timeout))
        if named is None or not self._put_beside_loans(options, out):
            self._call("dray_queue_put", c.byref(options), out.ctypes.data_as(c.POINTER(_l.Row)))
        return out

    def _put_beside_loans(self, options, out):
        """Tries to put while results of this queue hold memory that it can take back. Without room, takes that
        memory back, the oldest get's first, until there is room. Returns whether the rows were put."""
        patience, options.timeout_ns = options.timeout_ns, 0
        while self._pins.lent:
            try:
                self._call("dray_queue_put", c.byref(options), out.ctypes.data_as(c.POINTER(_l.Row)))
                return True
            except DrayError as error:
                if error.name not in ("EFULL", "ETIMEDOUT"):
                    raise
            self._pins.take_oldest_back()
        options.timeout_ns = patience
        return False

    def get(self, partition: str, keys: Optional[Sequence[str]] = None,
            columns: Optional[Sequence[str]] = None, *, at: Optional[np.ndarray] = None,
            task: Optional[str] = None, peek: bool = False, count: int = 0, up_to: bool = False,
            partial: bool = False, timeout: Optional[float] = 0.0, framework: str = "numpy",
            copy: Optional[bool] = None) -> Keyed:
        """Reads the rows with these keys, or at these addresses, or all rows of the partition in the order of its
        slots. columns None: all. partial: rows may lack columns, and missing rows are left out. task: only rows
        that the task has not consumed, `count` of them (0: all), which it consumes by this unless peek. Raises DrayError
        (EAGAIN, or ETIMEDOUT with a timeout; ESTALE)."""
        _l.check_word("framework", framework, ("numpy", "torch"))
        named, keys, at = _named(keys, at)
        options = _l.options(_l.GetOptions, partition=text(partition), rows=named or 0, keys=keys, at=at,
                             columns=None if columns is None else _names(list(columns)),
                             column_count=0 if columns is None else len(columns),
                             all_columns=int(columns is None), partial=int(partial), task=text(task),
                             peek=int(peek), count=count, up_to=int(up_to),
                             timeout_ns=_l.nanoseconds(timeout))
        batch = c.c_void_p()
        with self._pins:
            try:
                self._call_within("dray_queue_get", c.byref(options), c.byref(batch))
                self._pins.hold(batch.value)
            except BaseException:  # a signal's handler raised, although there was an answer
                if batch.value and batch.value not in self._pins.held:
                    library().dray_batch_free(batch)
                raise
        return Keyed(self, batch.value, framework, copy)

    def list(self, partition: Optional[str] = None) -> dict:
        """{key: tag} of a keyed partition, without rows that have no key; for None, {partition: {key: tag}} of all
        keyed partitions."""
        if partition is None:
            return {p["name"]: self.list(p["name"]) for p in self.keyed()}
        try:
            with self.get(partition, columns=()) as found:
                return {key: tag for key, tag in zip(found.row_keys, found.tags) if key}
        except DrayError as error:
            if error.name in ("EAGAIN", "EEND"):
                return {}
            raise

    def reset(self, partition: str, task: Optional[str] = None) -> None:
        """Forgets which rows of the keyed partition the task (None: every task) has consumed."""
        self._call("dray_queue_reset", text(partition), text(task))

    def keyed(self) -> list:
        """The status of keyed partitions."""
        return self.status()["keyed"]

    # ---- trainers

    def admit(self, task: Optional[str], batch_rows: int, staleness: int = 0, concurrency: int = 0,
              version: int = 0, resume: bool = False) -> None:
        """Limits how many rows the task may claim ahead of the trainer (dray_queue_admit)."""
        self._call("dray_queue_admit",
                   c.byref(_l.options(_l.Admission, task=text(task), batch_rows=batch_rows,
                                      staleness=staleness, concurrency=concurrency,
                                      resume=int(resume), version=_l.number("version", version))))

    def version(self, version: int) -> None:
        """Reports that the trainer has reached this version, so that the admission grows."""
        self._call("dray_queue_version", _l.number("version", version))

    def cursor(self, version: int) -> bytes:
        """Returns the cursor of the provisional tasks' commits so far, which is saved with the checkpoint."""
        out, size = c.c_void_p(), c.c_size_t()
        self._call("dray_queue_cursor", _l.number("version", version), c.byref(out), c.byref(size))
        return _l.take(out, size.value)

    def covered(self, cursor: bytes) -> None:
        """Reports that the checkpoint with the cursor is on the disk."""
        self._call("dray_queue_covered", cursor, len(cursor))

    def resume(self, cursor: bytes) -> int:
        """Goes back to the checkpoint with the cursor. Returns the new epoch."""
        epoch = c.c_uint32()
        self._call("dray_queue_resume", cursor, len(cursor), c.byref(epoch))
        return epoch.value

    def checkpoint(self, path: str) -> None:
        """Saves the queue (durability "checkpoint" or "journal"). A path (with a "/") is on this host, and opened by
        this process; any other text is a name in the coordinator's folder. `restore=` takes both."""
        self._call("dray_queue_checkpoint", text(os.fspath(path)))

    def status(self) -> dict:
        """The queue's part of `dray status --json`."""
        return self._session.status(self._pins)
