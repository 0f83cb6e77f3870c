"""One synchronisation of weights after the other, as verl's and NeMo-RL's checkpoint engines have them: a trainer's
workers are given tensors by their framework, and an engine's workers hand whole tensors to theirs. A synchronisation is
one version of dray's. Each rank of the trainer keeps its version until every engine has committed it (deliver), or gives
the synchronisation up; only then may anybody withdraw it."""
from __future__ import annotations

import asyncio
import ctypes as c
import json
import math
import os
import select
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, AsyncGenerator, Optional

import torch

from .. import _library as _l
from .. import listed
from .. import weights as _w
from ..engine import tensor_infos
from ..gpu import torch_dtype
from ..parameters import Given, Part

_BUCKET = 1 << 20      # bytes of an update's bucket, at least
_SLICE = 0.5           # seconds between two looks at who is still there


class Shards(list):
    """(name, tensor) as they lie on this rank: DTensors, parts of Megatron's. config: of the model, for Publisher.
    tensors: {name: (shape, dtype)} of the checkpoint, where the names are not its tensors'."""

    def __init__(self, pairs, config: Optional[str] = None, tensors: Optional[dict] = None):
        super().__init__(pairs)
        self.config, self.tensors = config, tensors


class _Latest(Given):
    """What was sent last, for a Publisher that stays open."""

    def __init__(self, pairs):
        self.now = pairs

    def pairs(self):
        return self.now


@dataclass
class Synchronisation:
    """What a worker is told of it. others: {member: name} of those on the other side."""
    rank: int
    world: int
    version: int
    groups: list
    others: dict
    given_up: bool = False


def _dead(message):
    return _l.DrayError(_l.EDEAD, message)


async def _each(iterable):
    """The items of an iterable of either kind."""
    if hasattr(iterable, "__aiter__"):
        async for item in iterable:
            yield item
    else:
        for item in iterable:
            yield item


class Synchronised:
    """A worker of either side. model: the name to publish under. address: of the
    coordinator, where the workers have no $DRAY_ADDRESS; where: what says it in the framework's configuration. timeout:
    seconds that a synchronisation may take. bucket_size: bytes, of which an engine's bucket has half. version, report: of
    the last one."""

    def __init__(self, where: str, bucket_size: int, model: str = _w.MODEL, address: Optional[str] = None,
                 timeout: float = 300.0):
        self.bucket_size, self.model, self.timeout, self.version, self.report = bucket_size, model, timeout, 0, None
        self._address = os.environ.get("DRAY_ADDRESS") or address
        if not self._address:
            raise ValueError(f'checkpoint engine "dray": no coordinator is named: start `dray serve` (or dray.serve() in '
                             f"the driver, before ray.init), and set DRAY_ADDRESS where Ray's processes start, or {where}")
        self._context = self._now = self._running = self._update = None
        self._publisher = self._latest = self._list = self._subscriber = None
        self._kept, self._packed, self._place = {}, None, None

    def _join(self, side: Optional[str], name: str, rank: int) -> dict:
        """Opens the session. What others are to know of this worker."""
        name = f"{name} (process {os.getpid()} on {socket.gethostname()})"
        if self._context is None:
            self._context = _w.Context(self._address, role=side, rank=rank, name=name, timeout=self.timeout)
        return {"member": self._context.member, "name": name, "version": self.version}

    # ---- both sides --------------------------------------------------------------------------

    def _begin(self):
        if self._now is None:
            raise RuntimeError('checkpoint engine "dray": the process group is to be initialised first')
        return self._now, time.monotonic() + self.timeout

    def _look(self, now):
        """Raises where this synchronisation is given up: a new one was prepared, or somebody who takes part died."""
        if now.given_up:
            raise _l.DrayError(_l.ECANCELED, f"version {now.version}: given up, as another synchronisation was prepared")
        out = c.c_void_p()
        self._context._beside("dray_context_status", c.byref(out))
        alive = {session["member"] for session in json.loads(_l.take(out))["sessions"]}
        if gone := [name for member, name in now.others.items() if member not in alive]:
            raise _dead(f"version {now.version} of {self.model}: {', '.join(gone)} ended")

    async def _ended(self):
        """Until the last one has ended here, too: it was given up, if it has not."""
        if self._running is not None and not self._running.done():
            if self._update is not None:
                self._update.give_up()  # the trainer's wait looks by itself
            await asyncio.wait([self._running])

    # ---- the trainer's side ------------------------------------------------------------------

    @torch.no_grad()
    async def send(self, weights: Any) -> float:
        """weights: (name, tensor), or Shards. The seconds that it took: it returns when every engine has committed the weights and nobody reads them any more."""
        await self._ended()
        begun = time.monotonic()
        now, deadline = self._begin()
        shards = await self._shards(weights, now)
        self.version = now.version
        gpu = torch.cuda.is_initialized()
        self._running = asyncio.ensure_future(_l.in_thread(
            self._hand_over, shards, now, deadline, torch.cuda.current_stream() if gpu else None,
            torch.cuda.current_device() if gpu else None))
        try:
            await asyncio.shield(self._running)
        except asyncio.CancelledError:
            now.given_up = True
            raise
        return time.monotonic() - begun

    async def _shards(self, weights, now):
        """What is to be published. Whole tensors, which every rank is given, are copied, by each rank some."""
        if isinstance(weights, Shards):
            return weights
        pairs, tensors, kept = [], {}, {}
        async for name, tensor in _each(weights):
            tensors[name] = tuple(tensor.shape), tensor.dtype
            if hasattr(tensor, "placements") or isinstance(tensor, Part):
                pairs.append((name, tensor))
            elif len(tensors) % now.world == now.rank:
                room = self._kept.get(name)
                if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
                    room = _w.empty(tuple(tensor.shape), dtype=tensor.dtype)
                room.copy_(tensor)
                kept[name] = room
                pairs.append((name, room))
        self._kept = kept
        return Shards(pairs, tensors=tensors)

    def _publish(self, shards, now, stream):
        kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in shards if not isinstance(tensor, Part)}
        known = kinds, shards.config, shards.tensors  # all ranks know the last, and open anew together
        if self._publisher is not None and known != self._known:
            self._close()
        self._known = known
        try:
            self._open(shards, now)
            self._publisher.publish(now.version, stream)
        except _l.DrayError as error:
            if error.name not in ("EDEAD", "ESTALE"):
                raise
            self._close()  # another rank has ended, or has opened its part anew
            self._open(shards, now)
            self._publisher.publish(now.version, stream)
        if now.rank == 0:
            self._list[0].publish(now.version)

    def _open(self, shards, now):
        if self._publisher is not None:
            self._latest.now = shards
            return
        self._latest = _Latest(shards)
        self._publisher = _w.Publisher(self._latest, self.model, now.rank, now.world, context=self._context,
                                       config=shards.config, timeout=self.timeout)
        if now.rank == 0:
            room = _w.empty((listed.BYTES,), dtype=torch.uint8)
            room.copy_(listed.pack(shards.tensors or _tensors_of(self._publisher._layout)))
            self._list = _w.Publisher({"list": room}, f"{self.model}.tensors", 0, 1, context=self._context,
                                      timeout=self.timeout), room

    def _close(self):
        for opened in (self._publisher, self._list and self._list[0]):
            if opened is not None:
                opened.close()
        self._publisher = self._list = None

    def _hand_over(self, shards, now, deadline, stream, device):
        """In a thread of its own: publishes, and keeps the version until everybody has it."""
        if device is not None:
            torch.cuda.set_device(device)
        self._publish(shards, now, stream)
        try:
            while True:
                left = deadline - time.monotonic()
                try:
                    return self._publisher.deliver(now.version, now.groups, timeout=max(0, min(_SLICE, left)))
                except _l.DrayTimeout:
                    if left <= _SLICE:
                        raise
                self._look(now)
        finally:  # nobody reads what may be written from here on
            for publisher in (self._publisher, self._list and self._list[0]):
                if publisher is not None:
                    publisher.wait(now.version, max(1.0, deadline - time.monotonic()))

    # ---- an engine's side --------------------------------------------------------------------

    async def buckets(self) -> AsyncGenerator:
        """Lists of (name, tensor), whole tensors: the newest version that is complete, of at least the one that was agreed
        on. The ranks of a group commit it together."""
        await self._ended()
        now, deadline = self._begin()
        place = now.groups[0], now.rank, now.world
        if self._place != place:
            self._leave()
        self._place = place
        buckets: asyncio.Queue = asyncio.Queue()
        self._update = update = _Update(asyncio.get_running_loop(), buckets, deadline)
        self._running = running = asyncio.ensure_future(_l.in_thread(self._receive, now, update))
        running.add_done_callback(lambda _: buckets.put_nowait(None))
        try:
            while (bucket := await buckets.get()) is not None:
                yield bucket
                update.taken(bucket)
            self.report = await asyncio.shield(running)
            self.version = self.report["version"]
        finally:
            update.give_up()  # its thread goes on where the event loop has cancelled what waits for it
            if not running.done():
                await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # was seen, or is the consequence of another one

    def _receive(self, now, update):
        """In a thread of its own: the list of tensors, and the tensors."""
        options = dict(group=now.groups[0], rank=now.rank, world=now.world, context=self._context, timeout=self.timeout)
        try:
            if self._list is None:
                room = _w.empty((listed.BYTES,), dtype=torch.uint8)
                self._list = _w.Subscriber({"list": room}, f"{self.model}.tensors", **options), room
            self._take(self._list[0], now, update)
            packed = listed.packed(self._list[1])
            if self._subscriber is None or packed != self._packed:
                if self._subscriber is not None:
                    self._subscriber.close()
                self._packed, self._subscriber, tensors = packed, None, listed.unpack(packed)[0]
                self._count = len(tensors)
                largest = max(math.prod(shape) * dtype.itemsize for shape, dtype in tensors.values())
                self._subscriber = _w.Subscriber(load=lambda named: self._update.load(named), tensors=tensors,
                                                 model=self.model, bucket_bytes=max(_BUCKET, self.bucket_size // 2,
                                                                                    2 * largest), **options)
            update.begin(self._count)
            return self._take(self._subscriber, now, update)
        except BaseException:
            self._leave()  # what is under way ends with it; the next one begins anew
            raise

    def _take(self, subscriber, now, update):
        subscriber.start(min_version=now.version, timeout=update.left())
        while not subscriber.poll():
            if not select.select([subscriber.fileno()], [], [], _SLICE)[0]:
                self._look(now)
            if update.over:
                raise _l.DrayError(_l.ECANCELED, f"version {now.version}: the engine takes no more of it")
        return subscriber.finish()

    def _leave(self):
        for opened in (self._subscriber, self._list and self._list[0]):
            if opened is not None:
                opened.close()
        self._subscriber = self._list = None


class _Update:
    """An update whose thread hands copies of its buckets to the event loop, and reads the next one meanwhile. Copies, as
    nobody can say when an engine that fails has let go of what it was lent."""

    def __init__(self, loop, buckets, deadline):
        self._loop, self._buckets, self._deadline = loop, buckets, deadline
        self._room, self._drained, self.over = threading.Semaphore(2), threading.Event(), False
        self._coming = self._wanted = math.inf

    def begin(self, count):
        self._coming = self._wanted = count  # tensors: from the trainer, and by the engine

    def left(self):
        return max(0.001, self._deadline - time.monotonic())

    def load(self, named):
        copies = [(name, tensor.clone()) for name, tensor in named]
        there = self._room.acquire(timeout=self.left())
        if there and not self.over:
            self._loop.call_soon_threadsafe(self._buckets.put_nowait, copies)
            self._coming -= len(copies)
            there = self._coming > 0 or self._drained.wait(self.left())  # what is committed, the engine has taken
        if self.over or not there:
            raise _l.DrayError(_l.ECANCELED, "the engine takes no more of these weights")

    def taken(self, bucket):
        self._room.release()
        self._wanted -= len(bucket)
        if self._wanted <= 0:
            self._drained.set()

    def give_up(self):
        self.over = True
        self._room.release()
        self._drained.set()


# ---- the list of tensors -------------------------------------------------------------------------

def _tensors_of(layout):
    """{name: (shape, dtype)} of what a rank has announced."""
    return {t.name.decode(): (tuple(t.shape[:t.ndim]), torch_dtype(t.dtype))
            for t in tensor_infos(layout.pointer) if t.alias_of < 0}
