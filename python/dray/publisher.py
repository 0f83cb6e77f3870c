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
    """This rank's parameters, published where they are. `model`: the name by which engines find them.

        publisher = dray.Publisher(model)
        publisher.publish(step)
    rank, world: of the trainer; None: torch.distributed's, once init_process_group was called, else 0 of 1.
    context: the session; None: one of this process for all its publishers, at $DRAY_ADDRESS.
    parameters: a module (or its named_parameters(); FSDP1's, too), which is asked anew by every publish
    what its parameters are; with buffers, also for those that its state_dict() has. Or (name, tensor)
    pairs or a mapping, tensors whole or DTensors (FSDP2's); or Blocks, where this rank's part is cut in
    another way: those are the tensors themselves. publish finds them where they are by then, and raises
    DrayError (ESTALE) for one that was replaced, as far as that can be seen.
    config: a config.json, or a folder with one, for modules of transformers whose parameters are not
    the checkpoint's tensors (packed experts); buffers that it names (biases of routers) are published, too.
    copy: parameters is a generator of (name, whole tensor), which are gone when the next one comes, the same on all ranks, or a
    function that returns one for each publish (else publish is given it): each rank keeps a copy of its share of their rows.
    staging_bytes: of shared memory, through which engines of this host get what is in private host
    memory; None: 16 MiB where something does (share() makes a model's parameters shared).
    checksum: announce what engines compare with. delta: tell engines which elements changed, compared
    and sent in delta_dtype. snapshot: engines read a copy (of a GPU's memory, on that GPU), the trainer goes on at once.
    One thread at a time; close(), too, is refused while another one's call is under way (EBUSY)."""
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
        """Tells the readers when parameters are elsewhere now: after an offload and load, .to(),
        load_state_dict(assign=True), a resumed arena. publish calls it; True: they did."""
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
        """This rank's parameters hold `version` as soon as the stream (None: the current one) has
        done what it was given so far. tensors: with copy=True, (name, tensor) of this version."""
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
        """Until engines have the version (None: the last) or a newer one: so many groups, or those named
        (one or several), which need not be there yet. Takes nothing back, so that late ones find it;
        wait() does: all ranks call this before that. Raises DrayTimeout that names those missing."""
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
        """Before the next write: until readers of the version (None: the last) are done. How many
        were dropped for it."""
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
        """deliver() of a coroutine: a thread waits, the event loop goes on."""
        await _l.in_thread(self.deliver, *arguments, **options)

    @_l.alone
    def wait_stream(self, version=None, stream=None):
        """wait() of a CUDA stream (None: torch's current one): what is put into it from now on begins when the readers
        are done, and this returns at once. The next call of this publisher raises what went wrong. DrayError
        (EUNSUPPORTED): the parameters are on no GPU."""
        version = self._published if version is None else version
        if version is not None:
            if stream is None:
                stream = _g._torch().cuda.current_stream() if self._layout.cuda else None
            self._within("dray_publisher_wait_stream", _l.number("version", version), getattr(stream, "cuda_stream", stream),
                       _l.nanoseconds(self._timeout))

    def attach(self, optimizer, groups=None):
        """The optimizer waits before each step: until readers are done, and before that until so many
        groups, or those of these names, have what was published (groups: as deliver takes them; None:
        none need). Returns the hook's handle."""
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
        """Before the memory is given back (dray.gpu.release): takes it back from all readers. Raises
        DrayError (ETIMEDOUT) that names those who still have it mapped. Either way publish offers it again."""
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
