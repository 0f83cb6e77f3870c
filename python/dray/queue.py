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
    """Slots of one group that wait for another sample: of `rows` rows from `slot` on."""
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
_PADS = _l.POLICIES.index("token_balanced")  # as the policies behind it
_CAUSES = ("failed", "stale", "rolled_back", "bytes_lost")


def _names(names):
    return (c.c_char_p * max(1, len(names)))(*map(text, names))


def _named(keys, at):
    """How many rows are named (None: none are), and the names as the library takes them."""
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
    """Nobody may write into it: claims that are alike share one."""
    _l.check_word("policy", policy, _l.POLICIES)
    for key, value in more.items():
        if key not in _CLAIM:
            raise TypeError(f"unknown keyword {key!r}; known: {', '.join(sorted(_CLAIM))}")
        more[key] = text(value) if value is None or isinstance(value, str) else operator.index(value)
    return _claim(text(task), text(partition), operator.index(count), _l.POLICIES.index(policy),
                  _l.nanoseconds(timeout), _l.nanoseconds(max_hold), **more)


@functools.lru_cache(maxsize=256)
def _claim(task, partition, count, policy, timeout_ns, max_hold_ns, **more):
    return _l.ClaimOptions(task=task, partition=partition, count=count, policy=policy,
                    timeout_ns=timeout_ns, max_hold_ns=max_hold_ns, **more)


class Session:
    """A session with the coordinator, and a queue of it."""

    def __init__(self, name: str, address: Optional[str] = None, role: Optional[str] = "task",
                 rank: int = 0, timeout: float = 60.0, options: Optional[_l.QueueOptions] = None,
                 session: str = "python"):
        self.context, self.queue, self._shapes = c.c_void_p(), c.c_void_p(), {}
        self._pid = os.getpid()
        call("dray_open",
             _l.Options(address=text(address), name=text(session), role=text(role), rank=rank,
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
        """What `dray status --json` says of the queue."""
        out = c.c_void_p()
        pins.call("dray_queue_status", self.queue, c.byref(out))
        return json.loads(_l.take(out))

    def values(self, pins: Pins, name: str, values: Any, offsets: Any = None) -> Values:
        """For a column of the queue: rows of one shape are rows of different lengths where the column has such
        ones. The status says so, and is asked for until it does: what was fixed once stays so."""
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
    """Rows of a batch of its own, which free() lets go of."""

    def __init__(self, owner: Queue, batch: int, framework: str, copy: Optional[bool], padded: bool,
                 first: int = 0, rows: Optional[int] = None):
        super().__init__(owner._pins, batch, first,
                         library().dray_batch_rows(batch) if rows is None else rows, framework, copy,
                         padded=padded)
        self._owner = owner
        owner._claims[batch] = weakref.ref(self)

    _unsettled = False

    def free(self) -> None:
        """Lets go of the rows: what was claimed, and neither committed nor failed, is given back at once,
        uncounted. Arrays that were read stay."""
        if self._live:
            self._live = False
            self._owner._claims.pop(self._batch, None)
            self._pins.drop(self._batch, self._unsettled)

    def __del__(self):
        if getattr(self, "_live", False):
            self.free()


class Keyed(_Held):
    """Rows with keys that were got: columns are read by name, see columns.Rows, where the rows are alike;
    cell() reads one row's value. row_keys: "" where a row has none; tags: bytes, None where it has none;
    at: their addresses (columns.ROW; `attempt` is the row's version); columns: what can be read."""

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
        """The row's value, in its own dtype and shape: an array or tensor; str of strings, bytes of bytes and
        objects; None where it has none."""
        self._check()
        if name not in self.columns:
            raise KeyError(name)
        return self._cell(name, index)

    def cells(self, name: str) -> list:
        """Those of all rows."""
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
        """An output column, a value a row: as Queue.insert takes them. Visible after commit."""
        self._check()
        given = self._owner._session.values(self._pins, name, values, offsets)
        given.for_rows(self.rows)
        self._pins.call("dray_batch_set", self._batch, c.byref(given.data()))

    def leave_open(self, rows: Sequence[int] = ()) -> None:
        """What the next commit writes for these rows (none: for all) is a piece, to which the task
        appends."""
        self._check()
        self._pins.call("dray_batch_leave_open", self._batch,
                        (c.c_uint32 * max(1, len(rows)))(*rows), len(rows))

    def commit(self) -> None:
        """Outputs, tags and the acknowledgement become visible in one step, or none. Raises
        DrayError (ESTALE) when the claim was taken back; repeating a commit succeeds."""
        self._check()
        self._pins.call("dray_batch_commit", self._batch)
        self._settled = True

    def fail(self, reason: str, rows: Sequence[int] = ()) -> None:
        """Gives rows (none named: all) back as a failed attempt."""
        self._check()
        self._pins.call("dray_batch_fail", self._batch, (c.c_uint32 * max(1, len(rows)))(*rows),
                        len(rows), _l.reason(reason))
        self._settled = not len(rows)

    def hold(self, seconds: float = 0) -> None:
        """Of a claim with max_hold: it is taken back so many seconds from now; 0: never."""
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
    """A queue of the coordinator. With `tasks` ({name: (needs, writes)}) it is made where it is not
    there; without, it must exist, and is waited for. One thread at a time; not across fork.

    session: what messages and `dray status` call this process. role None: the token's.
    on_loss: "refill", "shrink_group" or "drop_group"; durability: "none", "checkpoint" or "journal";
    further keywords are those of dray_queue_options: max_attempts, capacity_rows, batch_rows, ..."""

    def __init__(self, name: str = "samples", address: Optional[str] = None,
                 role: Optional[str] = "task", rank: int = 0, timeout: float = 60.0,
                 tasks: Optional[Mapping[str, Union[Task, Sequence[Sequence[str]]]]] = None,
                 on_loss: str = "refill", durability: str = "none",
                 provisional: Iterable[str] = (), session: str = "python", **more: Any):
        self._pins = None
        _l.check_word("on_loss", on_loss, _ON_LOSS)
        _l.check_word("durability", durability, _DURABILITY)
        options = None
        if tasks is not None:
            found = [(key, *(t if not isinstance(t, Task) else (t.needs, t.writes)))
                     for key, t in tasks.items()]
            for key, needs, *_ in found:
                if isinstance(needs, str):
                    raise ValueError(f"task {key}: lists of columns expected, found {needs!r}")
            array = (_l.QueueTask * max(1, len(found)))()
            for at, (key, needs, *writes) in zip(array, found):
                writes = list(writes[0]) if writes else []
                at.name, at.needs, at.needs_count = text(key), _names(list(needs)), len(needs)
                at.writes, at.writes_count = _names(writes), len(writes)
            provisional = list(provisional)
            more = {key: text(v) if isinstance(v, str) else v for key, v in more.items()}
            options = _l.QueueOptions(tasks=array, task_count=len(found),
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
        self._turn, self._asked = (None, None), False  # coroutines' claims: one at a time, by turns of a loop

    def fileno(self) -> int:
        with self._pins.briefly():
            return self._session.fileno()

    def close(self) -> None:
        """Gives back what is claimed. Arrays that were read stay what they are. DrayError (EBUSY): a call is under
        way in another thread."""
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
        """Within `with self._pins:`."""
        call(name, self._session.queue, *arguments)

    # ---- producers

    def insert(self, columns: Mapping[str, Any], partition: str, *, rows: Optional[int] = None,
               group_size: int = 1, once_per_group: bool = False,
               tags: Optional[Mapping[str, Any]] = None, seal: bool = False, row_bytes: int = 0,
               at_slot: Optional[int] = None, refill: Optional[Refill] = None,
               timeout: Optional[float] = None) -> int:
        """Puts rows at the end of the partition, all visible or none; the slot of the first.

        columns: {name: values}, of which each is an array or tensor of (rows, ...), a list of
        strings, of bytes or of numbers, a list of arrays (ragged: one a row, of any lengths), a
        nested tensor, or the tuple (values, offsets), offsets from 0 to the end of the values.
        The first rows of a column fix whether rows may differ in length; where they may, an array's rows,
        which do not, go in as well.
        Tensors of a GPU are copied to the host.
        group_size: rows of one prompt follow each other; once_per_group: columns and tags have one
        entry a group, and are stored once. tags: {key: a number for all, or one a row}.
        seal: the partition has these rows and no more. timeout: how long to wait for room."""
        given = [self._session.values(self._pins, name, values) for name, values in columns.items()]
        per = group_size if once_per_group else 1
        if rows is None:
            if not given:
                raise ValueError("rows: how many, where no columns are given")
            rows = given[0].rows * per if refill is None or not once_per_group else refill.rows
        entries = rows // per if refill is None or not once_per_group else 1
        for values in given:
            values.for_rows(entries)
        options = _l.InsertOptions(partition=text(partition), rows=rows, group_size=group_size,
                            once_per_group=int(once_per_group), known_only=1,
                            columns=(_l.ColumnData * max(1, len(given)))(*(v.data() for v in given)),
                            column_count=len(given), row_bytes=row_bytes,
                            timeout_ns=_l.nanoseconds(timeout),
                            at_slot=0 if at_slot is None else at_slot + 1,
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
        """The partition has so many rows, and gets no more."""
        self._call("dray_queue_seal", text(partition), rows)

    def refill(self, timeout: Optional[float] = None) -> Refill:
        """Waits until slots want another sample; insert(..., refill=it) answers. Raises DrayError
        (ETIMEDOUT; EEND: everything is settled)."""
        want = _l.Refill()
        self._call("dray_queue_refill_wait", _l.nanoseconds(timeout), c.byref(want))
        return Refill(want.id, want.rows, want.slot, want.group, want.attempts,
                      _CAUSES[want.cause], want.partition.decode(), want.task.decode(),
                      want.reason.decode("utf-8", "replace"))

    def decline(self, refill: Refill) -> None:
        """There is no other sample."""
        self._call("dray_queue_refill_decline", refill.id)

    def end(self) -> None:
        """No more partitions will come."""
        self._call("dray_queue_end")

    # ---- consumers

    def claim(self, task: str, count: int = 1, partition: Optional[str] = None, *,
              up_to: bool = False, policy: str = "fifo", timeout: Optional[float] = None,
              max_hold: float = 0.0, framework: str = "numpy",
              copy: Optional[bool] = None, **more: Any) -> Claim:
        """Takes rows that are ready for the task: `count`, or, up_to, fewer. Raises DrayError
        (ETIMEDOUT; EEND: the partition is finished, or the queue). partition None: any, oldest
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
        """claim() of a coroutine: the event loop goes on while it waits, and so do other calls of this queue.
        Several wait in turn, the first one's timeout first. What a cancelled one would have got is given back."""
        _l.check_word("framework", framework, ("numpy", "torch"))
        options = claim_options(task, count, partition, policy, timeout, max_hold, up_to=int(up_to), **more)
        import asyncio  # takes longer than all of dray
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
            if self._asked:  # by a loop that ended before the answer came
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
        loop.add_reader(self.fileno(), readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                try:
                    with self._pins:
                        self._call_within("dray_queue_claim_poll", None, c.byref(batch))
                        self._pins.hold(batch.value)
                except DrayError as error:
                    if error.name == "EAGAIN":
                        continue
                    self._asked = False
                    raise
                self._asked = False
                return batch.value
        finally:
            loop.remove_reader(self.fileno())

    def _unwanted(self, answer):
        """Nobody waits for it any more."""
        if not answer.cancelled() and answer.exception() is None:
            self._pins.drop(answer.result(), True)

    def _claim_any(self, options: Sequence[_l.ClaimOptions], timeout: Optional[float] = None) -> tuple:
        """(the batch, held, and the number of its options): of several the first that can be filled.
        timeout: instead of theirs."""
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
        """A batch of another rank's, held."""
        batch = c.c_void_p()
        with self._pins:
            self._call_within("dray_batch_import", exported, len(exported), c.byref(batch))
            self._pins.hold(batch.value)
        return batch.value

    def wait(self, partition: str, task: Optional[str] = None,
             timeout: Optional[float] = None) -> None:
        """Until the task (None: all tasks) is done with the sealed partition."""
        self._call("dray_queue_wait", text(partition), text(task), _l.nanoseconds(timeout))

    def clear(self, partition: str, keys: Optional[Sequence[str]] = None, *,
              at: Optional[np.ndarray] = None) -> None:
        """Drops the partition's rows, or of a keyed one those with the keys, or at the addresses, that are
        there; their memory goes with the last reader."""
        if keys is None and at is None:
            return self._call("dray_queue_clear", text(partition))
        count, keys, at = _named(keys, at)
        self._call("dray_queue_clear_rows", text(partition), keys, at, count)

    # ---- rows with keys

    def put(self, partition: str, keys: Optional[Sequence[str]] = None,
            columns: Optional[Mapping[str, Any]] = None,
            tags: Optional[Sequence[Optional[bytes]]] = None, *, at: Optional[np.ndarray] = None,
            rows: Optional[int] = None, timeout: Optional[float] = None) -> np.ndarray:
        """Puts values, a row each as insert() takes them, and tags (bytes; None: the row keeps its own) into
        the rows with these keys, or at these addresses, or into new rows without keys; all visible or none.
        Keys that are not there make rows. Their addresses (columns.ROW; `attempt` is the row's version)."""
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
        options = _l.PutOptions(partition=text(partition), rows=rows, keys=keys, at=at,
                                columns=(_l.ColumnData * max(1, len(given)))(*(v.data() for v in given)),
                                column_count=len(given), tags=blobs, timeout_ns=_l.nanoseconds(timeout))
        if named is None or not self._put_beside_loans(options, out):
            self._call("dray_queue_put", c.byref(options), out.ctypes.data_as(c.POINTER(_l.Row)))
        return out

    def _put_beside_loans(self, options, out):
        """Whether it was put, while results of this queue have memory that it can take back. Where there is no room, it
        is taken back, that of the oldest get first, until there is."""
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
        """The rows with these keys, or at these addresses, or all of the partition, in its slots' order.
        columns None: all. partial: rows may lack columns, and what is not there is left out. task: rows that
        it has not consumed, which it then has, unless peek; `count` of all. Raises DrayError (EAGAIN; with a
        timeout ETIMEDOUT; ESTALE)."""
        _l.check_word("framework", framework, ("numpy", "torch"))
        named, keys, at = _named(keys, at)
        options = _l.GetOptions(partition=text(partition), rows=named or 0, keys=keys, at=at,
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
        """{key: tag} of a keyed partition, without rows that have no key; None: {partition: them} of all."""
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
        """The task (None: each one) has consumed none of the keyed partition's rows."""
        self._call("dray_queue_reset", text(partition), text(task))

    def keyed(self) -> list:
        """What the status says of keyed partitions."""
        return self.status()["keyed"]

    # ---- trainers

    def admit(self, task: Optional[str], batch_rows: int, staleness: int = 0, concurrency: int = 0,
              version: int = 0, resume: bool = False) -> None:
        """Bounds how many rows the task may take ahead of the trainer: dray_queue_admit."""
        self._call("dray_queue_admit",
                   c.byref(_l.Admission(task=text(task), batch_rows=batch_rows,
                                        staleness=staleness, concurrency=concurrency,
                                        resume=int(resume), version=version)))

    def version(self, version: int) -> None:
        """The trainer has reached it: more may be rolled out."""
        self._call("dray_queue_version", version)

    def cursor(self, version: int) -> bytes:
        """What provisional tasks have committed so far, to be kept with the checkpoint."""
        out, size = c.c_void_p(), c.c_size_t()
        self._call("dray_queue_cursor", version, c.byref(out), c.byref(size))
        return _l.take(out, size.value)

    def covered(self, cursor: bytes) -> None:
        """The checkpoint with the cursor is safe."""
        self._call("dray_queue_covered", cursor, len(cursor))

    def resume(self, cursor: bytes) -> int:
        """Back to the checkpoint with the cursor; the run's epoch."""
        epoch = c.c_uint32()
        self._call("dray_queue_resume", cursor, len(cursor), c.byref(epoch))
        return epoch.value

    def checkpoint(self, path: str) -> None:
        """Saves the queue (durability "checkpoint" or "journal"). A path (with a "/") is of this host, and
        opened here; anything else is a name in the coordinator's folder. `restore=` takes both."""
        self._call("dray_queue_checkpoint", text(os.fspath(path)))

    def status(self) -> dict:
        """What `dray status --json` says of the queue."""
        return self._session.status(self._pins)
