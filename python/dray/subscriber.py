"""The subscriber: one rank of an engine, whose memory takes versions of the weights."""
from __future__ import annotations

import contextlib
import ctypes as c
import json
import os
from typing import Any, Callable, Mapping, Optional, Union

from . import _library as _l
from . import gpu as _g
from . import parameters as _p
from . import trace as _t
from ._library import DrayError, call, library
from .layouts import Layout
from .parameters import Block
from .sessions import MODEL, Context, Laid, no_context, place, session

MODES = {word: number for number, word in enumerate(_l.words("MODE_"))}
STRATEGIES = {word: number for number, word in enumerate(_l.words("STRATEGY_"))}
_SPANS = {"dray_update_weights": "weights update", "dray_prefetch_weights": "weights prefetch",
          "dray_commit_weights": "weights commit"}


class Subscriber(Laid):
    """One rank of an engine, whose memory takes versions of the weights. All ranks of an engine are a group, and take a
    version together or not at all.

        subscriber = dray.Subscriber(model)
        report = subscriber.update()

    blocks: one of these:
      - a module, or its named_parameters(), (name, tensor) pairs or a mapping of names to tensors: whole tensors under
        the checkpoint's names. With buffers=True the buffers that a module's state_dict() has are taken, too.
      - Blocks, a rectangle each, also of fused parameters. engine_blocks() makes them for SGLang and vLLM.
      - what record() returned. Its first update goes by load_weights, and is compared.
    Parameters that the engine has replaced since the last update, by .to() or load_state_dict(assign=True), are found
    by the next update in a module, and in Blocks whose tensor is a function. Other tensors and views are refused
    (DrayError, ESTALE) when they are no longer their parameters' memory, as far as that can be seen.
    model: the name under which the trainer publishes.
    group: the name of this engine. Each engine has a name of its own, which its ranks share.
    rank, world: this rank of the engine, and the number of its ranks; None: as Publisher's.
    context: the session with the coordinator. None: the one at $DRAY_ADDRESS that all subscribers of this process
    share.
    load: the engine's load_weights, in the place of blocks. It is called with lists of (name, tensor), of at most
    bucket_bytes each. The tensors are whole, and can be used until it returns. load_device: "cuda": they come into
    memory of the current GPU without a stop in the host's; "cpu": into the host's.
    tensors: those that `load` takes, as {name: (shape, dtype)} or {name: tensor}: dray.weights.tensors("qwen3-8b"), or
    a state dict on the meta device.
    timeout: seconds that each call may take which is given none.
    One thread at a time uses it, but for note_step. close(), too, is refused (EBUSY) while a call of another thread is
    under way."""
    _frees = "dray_subscriber_close"

    def __init__(self, blocks: Any = (), model: str = MODEL, group: str = "engine",
                 rank: Optional[int] = None, world: Optional[int] = None, *,
                 context: Optional[Context] = None, timeout: float = 60.0,
                 load: Optional[Callable[[list], Any]] = None,
                 tensors: Optional[Mapping[str, Any]] = None, bucket_bytes: int = 512 << 20,
                 buffers: bool = False, load_device: str = "cpu"):
        no_context("Subscriber", blocks)
        _l.check_word("load_device", load_device, ("cpu", "cuda"))
        if load_device == "cuda" and load is None:
            raise TypeError("load_device: only with load=")
        rank, world = place(rank, world)
        context = context or session("engine")
        self._context, self._failure = context, None
        self._open_as(f"subscriber {group} of {model}")
        self._started = self._lost = False  # an update; this rank, while it was laid out anew
        self._model, self._options_of = model, dict(group=group.encode(), rank=rank, world=world,
                                                    timeout_ns=_l.nanoseconds(timeout))
        self._given = _p.given(blocks, buffers) if load is None else None
        self._first = self._given and self._given.certificate()
        if self._first:
            load, tensors = self._first, self._given.tensors
        with self._use:
            if load is None:
                self._open(*self._lay_out())
            elif tensors is None:
                raise ValueError("tensors: which ones load takes, {name: (shape, dtype)}")
            else:
                layout, shapes = Layout(), {}
                for name, of in tensors.items():
                    shape, dtype = of if isinstance(of, tuple) else (of.shape, of.dtype)
                    shapes[name] = tuple(shape)
                    layout.add_tensor(name, dtype, shapes[name])
                self._load = _l.LoadOptions(load=self._callback(load, shapes, load_device == "cuda"),
                                            bucket_bytes=bucket_bytes, memory=_g.CUDA if load_device == "cuda" else 0)
                self._open(layout, None, load=c.pointer(self._load))

    def _lay_out(self):
        """A layout of the memory as it is now, and where that is."""
        pairs, layout = self._given.pairs(), Layout()
        for name, tensor in pairs:
            _p.check_written(name, _p.local(tensor)[0])
            layout.add_block(tensor if isinstance(tensor, Block) else Block(name, tensor.shape, tensor))
        for alias, name in self._given.aliases():  # a trainer's two tensors of them must have the same values
            layout.add_alias(alias, name)
        return layout, self._given.places()

    def _open(self, layout, places, **options):
        self._layout, self._places, self._live = layout, places, layout.live()
        options = _l.SubscriberOptions(regions=self._live, **self._options_of, **options)
        self._context._open(self, "dray_subscriber_open", self._model.encode(), layout.pointer, c.byref(options))
        self._lost = False

    def _elsewhere(self):
        """The name of a parameter that is not where the last layout says; None: all are."""
        if self._given is None or self._first:
            return None
        if self._places is None:
            return "everything"
        now = self._given.places()
        return next((new[0] for new, old in zip(now, self._places) if new != old),
                    None if len(now) == len(self._places) else now[-1][0])

    def _settle(self):
        """Before an update: this rank comes again, with the memory as it is now, where it was replaced.
        What it holds is not known then: its group is torn until all ranks have updated, and what was
        prefetched is gone."""
        if not self._lost and (not self.pointer or self._started or not self._elsewhere()):
            return
        layout, places = self._lay_out()
        self._leave_group()
        self._layout.close()
        self._open(layout, places)

    def _updated(self):
        """After an update: what its bytes alone do not do."""
        if self._given is None:
            return
        if self._first:  # the next one is in place, as far as this one has proven it
            self._first = None if self._given.certified else self._first
            return
        self._still("this update wrote")
        try:
            self._given.updated()
        except BaseException:  # what this rank holds is not known
            self._leave_group()
            raise

    def _leave_group(self):
        with self._use.briefly():
            pointer, self.pointer = self.pointer, c.c_void_p()
        self._lost = True
        if pointer:
            library().dray_subscriber_close(pointer)

    def _still(self, what):
        """Raises where memory was replaced since the last update began."""
        if name := self._elsewhere():
            raise _p.stale(name, f"lies elsewhere than {what}: the next update lays it out anew")

    def _callback(self, load, shapes, cuda):
        """`load` as the library calls it. What it raises is the cause of the update's error."""
        def called(_, bucket, error):
            try:
                load([(name, tensor.view(shapes[name])) for name, tensor in _bucket(bucket.contents, cuda)])
                if cuda:
                    _g.finish()  # what it has put into streams reads the bucket
                return 0
            except BaseException as failure:  # none may pass through C
                self._failure = failure
                error.contents.code = _l.ECANCELED
                error.contents.message = f"load: {failure!r}".encode()[:400]
                return _l.ECANCELED
        return _l.LoadFn(called)

    @staticmethod
    def _options(mode="auto", strategy="direct", min_version=0, path=None, path_version=0,
                 bucket_bytes=0, verify=True, timeout=None, ctas=0, copy_engines=False, peers=True,
                 nccl_bytes=0, prefetch_seconds=0.0):
        _l.check_word("mode", mode, MODES)
        _l.check_word("strategy", strategy, STRATEGIES)
        return _l.UpdateOptions(mode=MODES[mode], strategy=STRATEGIES[strategy],
                              min_version=_l.number("min_version", min_version), path=path and os.fspath(path).encode(),
                              path_version=_l.number("path_version", path_version), bucket_bytes=bucket_bytes,
                              no_verify=int(not verify), timeout_ns=_timeout_ns(timeout),
                              no_peers=int(not peers), ctas=ctas, copy_engines=int(copy_engines),
                              nccl_bytes=nccl_bytes, prefetch_seconds=prefetch_seconds)

    @staticmethod
    def _dict(report):
        room = c.create_string_buffer(8192)
        call("dray_update_report_json", c.byref(report), room, len(room))
        return {**json.loads(room.value), "version": report.version}  # which is signed there

    @_l.alone
    def _run(self, name, options):
        report, self._failure = _l.UpdateReport(), None
        self._settle()
        try:
            with _t.wait_and_transfer(_SPANS[name], options.min_version or -1, "weights") as waited:
                with self._first or contextlib.nullcontext():
                    self._within(name, c.byref(options), c.byref(report))
                made = self._dict(report)
                waited(round(made["wait_seconds"] * 1e9))
        except DrayError as error:
            if self._failure is not None:
                raise error from self._failure
            raise
        if name == "dray_prefetch_weights":
            self._still("the next commit writes")
        else:
            self._updated()
        return made

    def update(self, mode: str = "auto", strategy: str = "direct", min_version: int = 0,
               path: Union[str, os.PathLike, None] = None, path_version: int = 0,
               bucket_bytes: int = 0, verify: bool = True, timeout: Optional[float] = None, ctas: int = 0,
               copy_engines: bool = False, peers: bool = True, nccl_bytes: int = 0) -> dict:
        """Takes the newest version, together with the other ranks of the group, which all call this. Waits until there
        is a version of at least min_version. Returns the report, a dict: version, mode, bytes, copies, wait_seconds,
        total_seconds (without wait_seconds), pause_seconds, verified_tensors, and the other numbers of C's
        dray_update_report (include/dray/subscriber.h; _ns there is _seconds here).

        mode: "tensor" reads trainers on this host, "distributed" those on other hosts, too, and "disk" the checkpoint
        at `path`, which holds version path_version; "auto" takes the first of these that can be done. strategy:
        "direct", or by a bucket of at most bucket_bytes: "bucket", "parameter". verify: compare checksums with the
        trainer's. Beside inference on the same GPU: ctas bounds the number of thread blocks that move bytes, and
        copy_engines=True moves large pieces without them. nccl_bytes: GPU memory for what comes over NCCL, beside
        bucket_bytes; 0: 1 GiB.
        peers: other engines of this host may be read, too. timeout: seconds for all of it; None and 0: the subscriber's.

        Raises DrayError. ETORN: memory was overwritten in part, and the next update repairs it. After any other error
        the memory is as it was."""
        return self._run("dray_update_weights",
                         self._options(mode, strategy, min_version, path, path_version, bucket_bytes,
                                       verify, timeout, ctas, copy_engines, peers, nccl_bytes))

    async def update_async(self, *arguments: Any, **options: Any) -> dict:
        """update() for coroutines: a thread moves the bytes, and the event loop goes on. Other calls of this subscriber
        are refused (EBUSY) meanwhile. When the coroutine is cancelled, the update goes on."""
        return await _l.in_thread(self.update, *arguments, **options)

    async def prefetch_async(self, **options: Any) -> dict:
        """prefetch() for coroutines, as update_async() is update()."""
        return await _l.in_thread(self.prefetch, **options)

    def update_weights_from_tensor(self, **options: Any) -> dict:
        """update(mode="tensor")"""
        return self.update(mode="tensor", **options)

    def update_weights_from_distributed(self, **options: Any) -> dict:
        """update(mode="distributed")"""
        return self.update(mode="distributed", **options)

    def update_weights_from_disk(self, path: Union[str, os.PathLike], version: int = 0,
                                 **options: Any) -> dict:
        """update(mode="disk"), which needs no trainer. path: a file or folder of safetensors; version: the number of
        the version that it holds."""
        return self.update(mode="disk", path=path, path_version=version, **options)

    @_l.alone
    def start(self, *arguments: Any, **options: Any) -> None:
        """Begins an update, with the arguments of update(), and does not wait. Call poll() until it returns True, then
        finish(), which returns the report. The descriptor fileno(), asked for after start(), is readable when poll()
        has work to do."""
        self._start("dray_update_start", self._options(*arguments, **options))

    @_l.alone
    def start_commit(self, min_version: int = 0, timeout: Optional[float] = None) -> None:
        """Begins a commit() and does not wait, as start() begins an update."""
        self._start("dray_commit_start", self._options(min_version=min_version, timeout=timeout))

    def _start(self, function, options):
        self._failure = None
        self._settle()
        if self._first:
            self._first.__enter__()
        self._within(function, c.byref(options))
        self._started = True

    @_l.alone
    def poll(self) -> bool:
        """Works on what start() or start_commit() began, for about 2 ms at most. Returns whether it has ended."""
        if not self.pointer:
            self._use._refuse_closed()
        error = _l.Error()
        code = library().dray_update_poll(self.pointer, c.byref(error))
        return code != _l.EAGAIN

    @_l.alone
    def finish(self) -> dict:
        """The report of what start() or start_commit() began and poll() has ended. Raises DrayError, as update()."""
        report = _l.UpdateReport()
        try:
            self._within("dray_update_finish", c.byref(report))
        except DrayError as error:
            raise error from self._failure
        finally:
            self._started = False
        if self._first:
            self._first.__exit__(None)
        self._updated()
        return self._dict(report)

    def prefetch(self, **options: Any) -> dict:
        """Brings a version into spare memory, while the engine serves the version that it has; commit() puts it into
        place. All ranks of the group call both. Options and report are those of update(). prefetch_seconds: copies
        between GPUs are spread over this time, so that inference is hardly slower meanwhile. A recorded engine takes
        versions by update() until its recording is certified."""
        return self._run("dray_prefetch_weights", self._options(**options))

    def commit(self, min_version: int = 0, timeout: Optional[float] = None) -> dict:
        """Puts the prefetched version into place, together with the other ranks of the group. Memory of an arena, or of
        dray's own, is exchanged; the rest is copied and verified. Nothing on the GPU may use the weights meanwhile: the
        report's pause_seconds is the time that it took. DrayError (ENOENT): nothing was prefetched, or an older version
        than min_version."""
        return self._run("dray_commit_weights", self._options(min_version=min_version, timeout=timeout))

    def drop_prefetched(self) -> None:
        """Frees the spare memory of prefetches; what was prefetched is gone."""
        self._call("dray_prefetch_drop")

    @property
    def version(self) -> int:
        """The version that all ranks of the group hold; 0: none yet. Raises DrayError (ETORN) when the group is
        torn."""
        version, _, torn = self._held()
        if torn:
            raise DrayError(_l.ETORN, "the group is torn: the next update repairs it")
        return version

    def _held(self):
        """(version, the trainer's incarnation that it is of, whether the group is torn)"""
        version, incarnation, state = c.c_uint64(), c.c_uint64(), c.c_int32()
        self._call("dray_subscriber_version", c.byref(version), c.byref(incarnation), c.byref(state))
        return version.value, incarnation.value, state.value == 2

    def fileno(self) -> int:
        return self._number("dray_subscriber_fd")

    def release_mappings(self) -> None:
        """Unmaps memory that publishers want back. Call it from time to time where updates are rare."""
        self._call("dray_subscriber_release_mappings")

    def note_step(self, seconds: float) -> None:
        """Reports that a step of decoding took so many seconds. The reports of updates then say by how much they slowed
        decoding down. Any thread may call it."""
        with self._use.briefly():
            self._within("dray_subscriber_note_step", int(seconds * 1e9))

    @_l.alone
    def verify(self) -> None:
        """Compares this rank's memory with what the last update brought. DrayError (ECHECKSUM): it differs; the message
        names the first tensor."""
        self._still("the last update wrote")
        self._within("dray_subscriber_verify")

    def leave(self, timeout: Optional[float] = None) -> None:
        """Takes the engine out of the list of those that serve, and waits until no other engine reads its memory. Call
        it before the engine ends."""
        self._call("dray_subscriber_leave", _l.nanoseconds(timeout), None)


def _timeout_ns(timeout):
    """The timeout of an update in nanoseconds, for which the library takes 0 as the subscriber's, as for None."""
    return 0 if timeout is None else _l.nanoseconds(timeout)


def _bucket(bucket, cuda):
    """(name, tensor) of what is in a bucket."""
    torch = _g._torch()
    found = []
    if cuda:
        whole = _g.bytes_at(bucket.data, bucket.bytes)
    else:
        whole = torch.frombuffer((c.c_ubyte * max(1, bucket.bytes)).from_address(bucket.data), dtype=torch.uint8)
    for i in range(bucket.count):
        t = bucket.tensors[i]
        found.append((t.name.decode(), whole[t.start:t.end].view(_g.torch_dtype(t.dtype))
                      .view(t.shape[:t.ndim])))
    return found
