"""The publisher: one rank of a trainer, whose parameters engines read where they are."""
from __future__ import annotations

import ctypes as c
import operator
import weakref
from typing import Any, Optional

from . import _library as _l
from . import gpu as _g
from . import parameters as _p
from . import trace as _t
from ._library import DrayError, call, library
from .engine import tensors
from .layouts import Layout
from .parameters import Block
from .sessions import MODEL, Context, Laid, no_context, place, session

STAGING = 16 << 20  # bytes for private host memory where no number is given


class Publisher(Laid):
    """One rank of a trainer. It publishes versions of its parameters, which engines read from the memory that the
    parameters are in.

        publisher = dray.Publisher(model)
        publisher.attach(optimizer)                       # optimizer.step() waits for readers first
        publisher.publish(step)

    parameters: one of these:
      - a module, or its named_parameters(); FSDP1's modules, too. Every publish asks the module again for its
        parameters. With buffers=True the buffers that its state_dict() has are published, too.
      - (name, tensor) pairs, or a mapping of names to tensors. A tensor is whole, or a DTensor, as FSDP2 makes them.
      - Blocks, where this rank's part is cut in another way.
    publish() finds out where the parameters are by then. It raises DrayError (ESTALE) for a parameter that was
    replaced, as far as that can be seen.
    model: the name by which engines find the parameters.
    rank, world: this rank of the trainer, and the number of its ranks. None: those of torch.distributed, once
    init_process_group was called, else 0 of 1.
    context: the session with the coordinator. None: the one at $DRAY_ADDRESS that all publishers of this process share.
    config: a config.json, or a folder with one. It is needed for modules of transformers whose parameters are not the
    tensors of the checkpoint, such as packed experts; buffers that it names (biases of routers) are published, too.
    copy: parameters is a generator of (name, whole tensor) pairs, of which each tensor is gone when the next one comes;
    all ranks give the same pairs. Or it is a function that returns such a generator for each publish; without a
    function publish() is given the next generator. Each rank keeps a copy of its share of the rows.
    staging_bytes: size of the shared memory through which engines of this host read what is in private host memory.
    None: 16 MiB where something is; dray.weights.share() puts the parameters of a model into shared memory.
    checksum: announce the checksums with which engines compare what they have read.
    delta: tell engines which elements changed; delta_dtype is the dtype in which they are compared and sent.
    snapshot: engines read a copy, which on a GPU is in that GPU's memory, and the trainer goes on at once.
    timeout: seconds that each wait of this publisher may take, where the call gives none.
    One thread at a time uses it. close(), too, is refused (EBUSY) while a call of another thread is under way."""
    _frees = "dray_publisher_close"

    def __init__(self, parameters: Any, model: str = MODEL, rank: Optional[int] = None,
                 world: Optional[int] = None, *, context: Optional[Context] = None,
                 staging_bytes: Optional[int] = None, snapshot: bool = False, timeout: float = 60.0,
                 config: Optional[str] = None, checksum: bool = True, delta: bool = False,
                 delta_dtype: Any = None, buffers: bool = False, copy: bool = False):
        no_context("Publisher", parameters)
        rank, world = place(rank, world)
        context = context or session("trainer")
        if config is not None and not buffers and _p.is_module(parameters):
            buffers = tensors(config).keys()
        self._given, self._config = _p.Copies(parameters, rank, world) if copy else _p.given(parameters, buffers), config
        if self._given.computes:
            self._given.waits = weakref.WeakMethod(self._wait_for_readers)
        self._context = context
        self._open_as(f"publisher {model}")
        pairs = self._given.pairs()
        self._kinds = {name: _p.kind(parameter) for name, parameter in pairs}
        self._aliases = self._given.aliases()
        self._layout, self._known = self._build(pairs), _p.places(pairs)
        self._published = None
        self._timeout = timeout
        live = self._live = self._layout.live()
        if staging_bytes is None:
            staging_bytes = STAGING if self._layout.private and not snapshot else 0
        options = _l.PublisherOptions(regions=live, rank=rank, world=world, snapshot=int(snapshot),
                                    staging_bytes=staging_bytes, timeout_ns=_l.nanoseconds(timeout),
                                    no_checksums=int(not checksum), delta=int(delta),
                                    delta_dtype=_g.dtype_code(delta_dtype) if delta_dtype else 0)
        with self._use:
            context._open(self, "dray_publisher_open", model.encode(), self._layout.pointer, c.byref(options))

    def _build(self, pairs):
        layout, seen = Layout(self._config), set()
        for name, parameter in pairs:
            if isinstance(parameter, Block):
                layout.add_block(parameter)
                continue
            if name in seen and not isinstance(parameter, _p.Part):  # engines would read either of them
                raise ValueError(f"{name}: came twice")
            seen.add(name)
            layout.add_parameter(name, parameter)
        for alias, name in self._aliases:
            layout.add_alias(alias, name)
        return layout

    def _now(self):
        """The parameters as they are now, of the kinds that were announced."""
        pairs = self._given.pairs()
        for name, parameter in pairs:
            if (found := _p.kind(parameter)) != self._kinds[name]:
                raise _p.stale(name, "was {} {}, and is {} {}: open the Publisher anew".format(
                    *self._kinds[name], *found))
        return pairs

    @staticmethod
    def _where(layout):
        """Everything of a layout but the addresses: what must be the same for a move."""
        out, size = c.c_void_p(), c.c_size_t()
        call("dray_layout_pack", layout.pointer, c.byref(out), c.byref(size))
        try:
            return c.string_at(out, size.value)
        finally:
            library().dray_free(out)

    @_l.alone
    def moved(self):
        """Tells the readers where the parameters are, if they moved: by an offload and load, by .to(), by
        load_state_dict(assign=True), or with a resumed arena. Returns whether they did. publish() calls it."""
        return self._moved()

    def _moved(self):
        pairs = self._now()
        places = _p.places(pairs)
        try:
            for region in self._layout.regions:
                region.check()
            if places == self._known:
                return False
        except DrayError as e:
            if e.name != "ESTALE":
                raise
        if self._published is not None:
            self._wait()
        before, layout = self._layout, self._build(pairs)
        live, self._known = layout.live(), None  # a move that fails is done again, wherever the parameters are by then
        if self._where(layout) == self._where(before):
            self._within("dray_publisher_move", live)
        else:  # other pieces of expandable segments
            self._within("dray_publisher_set_layout", layout.pointer, live)
        self._layout, self._live, self._known = layout, live, places
        before.close()
        return True

    @_l.alone
    def publish(self, version, stream=None, tensors=None):
        """Announces that this rank's parameters hold `version`, a number greater than those before it. Engines can
        read it once all ranks of the trainer have announced it; this call does not wait for engines. stream: the CUDA
        stream of the last writes, None: the current one; readers wait for what it was given so far. tensors: with
        copy=True, the (name, tensor) pairs of this version."""
        if tensors is not None and not isinstance(self._given, _p.Copies):
            raise TypeError("publish: tensors= is for a Publisher with copy=True")
        version = _l.number("version", version)
        self._moved()
        if self._given.computes:
            self._wait()
            self._given.refresh(tensors)
        fence = event = None
        if self._layout.cuda:
            fence, event = _g._fence(stream)
        with _t.span("weights publish", version, "transfer"):
            self._within("dray_publisher_publish", version, c.byref(fence) if fence else None)
        self._published, self._event = version, event

    @_l.alone
    def deliver(self, version=None, groups=1, timeout=None):
        """Waits until engines have committed the version (None: the last one) or a newer one. groups: the number of
        groups of engines, or the name of one, or a list of names; they need not be there yet. The version stays
        published, so that engines that come late find it. wait() withdraws it; all ranks call deliver() before
        wait(). Raises DrayTimeout, which names the groups that are missing."""
        version = self._published if version is None else version
        if version is None:
            raise ValueError("deliver: no version was published yet")
        version = _l.number("version", version)
        names = None
        if not hasattr(groups, "__index__"):
            names = [name.encode() for name in ([groups] if isinstance(groups, str) else groups)]
        count = operator.index(groups) if names is None else len(names)
        if count < 1:
            raise ValueError(f"groups: a number of at least 1, or names expected, found {groups!r}")
        with _t.span("weights deliver", version, "wait", "readers"):
            self._within("dray_publisher_deliver", version, names and (c.c_char_p * count)(*names), count,
                       _l.nanoseconds(self._timeout if timeout is None else timeout))

    @_l.alone
    def wait(self, version=None, timeout=None):
        """Withdraws the version (None: the last one) and waits until the groups of engines that read it are done. Call
        it before the parameters are written to again. Groups that are not done when the timeout ends are dropped:
        they do not commit the version. Returns how many were dropped."""
        return self._wait(version, timeout)

    def _wait_for_readers(self):
        if self.pointer:
            self._wait()

    def _wait(self, version=None, timeout=None):
        version = self._published if version is None else version
        dropped = c.c_uint32()
        if version is not None:
            with _t.span("weights wait", version, "wait", "readers"):
                self._within("dray_publisher_wait", _l.number("version", version),
                     _l.nanoseconds(self._timeout if timeout is None else timeout), c.byref(dropped))
        return dropped.value

    async def deliver_async(self, *arguments: Any, **options: Any) -> None:
        """deliver() for coroutines: a thread waits, and the event loop goes on."""
        await _l.in_thread(self.deliver, *arguments, **options)

    @_l.alone
    def wait_stream(self, version=None, stream=None):
        """Makes a CUDA stream (None: torch's current one) wait as wait() does, and returns at once: what is put into
        the stream from now on begins when the readers are done. The next call of this publisher raises what went wrong.
        DrayError (EUNSUPPORTED): the parameters are on no GPU."""
        version = self._published if version is None else version
        if version is not None:
            if stream is None:
                stream = _g._torch().cuda.current_stream() if self._layout.cuda else None
            self._within("dray_publisher_wait_stream", _l.number("version", version), getattr(stream, "cuda_stream", stream),
                       _l.nanoseconds(self._timeout))

    def attach(self, optimizer, groups=None):
        """Makes optimizer.step() wait, as wait() does, before it writes. groups: step() first calls deliver() with
        these groups, so that they get every version; None: versions that no engine has begun to read are skipped.
        Returns the handle of the hook, whose remove() ends this."""
        have = None  # what they have: a coordinator that is started later does not know of groups that have ended

        def wait(*_):
            nonlocal have
            if groups is not None and self._published is not None and self._published != have:
                self.deliver(groups=groups)
                have = self._published
            self.wait()
        return optimizer.register_step_pre_hook(wait)

    @_l.alone
    def release(self, timeout=None):
        """Takes the parameters' memory back from all readers. Call it before the memory is freed (dray.gpu.release).
        Raises DrayTimeout, which names the readers that still have the memory mapped. In either case the next
        publish() offers the memory again."""
        pins, count = (_l.Pin * 16)(), c.c_uint32()
        try:
            self._within("dray_publisher_release",
                 _l.nanoseconds(self._timeout if timeout is None else timeout), pins, 16,
                 c.byref(count))
        except DrayError as e:
            if e.code == _l.ETIMEDOUT:  # new readers may be given the memory no more; others still read it
                self._known = None
            names = ", ".join(p.name.decode("utf-8", "replace") for p in pins[:count.value])
            raise type(e)(e.code, f"{e} ({names})" if names else str(e)) from None
        self._published = self._known = None  # said anew by the next publish
