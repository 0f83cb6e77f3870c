"""Weights between processes, in PyTorch's tensors or numpy's arrays: a trainer's ranks publish their
parameters where they are, an engine's ranks receive them where they want them. Nothing is gathered.

    publisher = dray.Publisher(model)                 # this rank's part, of FSDP2's module, say
    publisher.attach(optimizer)                       # waits for readers before the next write
    publisher.publish(step)

    blocks = [Block("model.layers.0.self_attn.q_proj.weight", (4096, 4096), qkv[:512], (512, 0)), ...]
    subscriber = dray.Subscriber(blocks)
    report = subscriber.update()

record() finds the blocks of any engine out of its load_weights; engine_blocks() makes those of SGLang's and
vLLM's parameters, after it has compared them with the checkpoint that the engine loaded; an engine that
cannot say where its parameters are, gives Subscriber its load_weights.
"""
from __future__ import annotations

import contextlib
import ctypes as c
import json
import operator
import os
import sys
import weakref
from typing import Any, Callable, Mapping, Optional, Union

from . import _library as _l
from . import gpu as _g
from . import host as _h
from . import parameters as _p
from . import trace as _t
from ._library import DrayError, call, library
from .engine import engine_blocks, load_config, prove, tensors
from .host import empty, share
from .engines import Engines
from .megatron import megatron, megatron_parameters
from .parameters import Block, FlatPart, fsdp1_parameters

__all__ = ["Block", "Context", "Engines", "FlatPart", "Layout", "Publisher", "Subscriber", "empty",
           "engine_blocks", "fsdp1_parameters", "megatron", "megatron_parameters", "megatron_shards", "prove", "record", "record_source", "share",
           "tensors"]

MODES = {word: number for number, word in enumerate(_l.words("MODE_"))}
STRATEGIES = {word: number for number, word in enumerate(_l.words("STRATEGY_"))}
_SPANS = {"dray_update_weights": "weights update", "dray_prefetch_weights": "weights prefetch",
          "dray_commit_weights": "weights commit"}
MODEL = "policy"    # the name of the model, where none is given
STAGING = 16 << 20  # of a publisher of private host memory, where nothing else is said


def record(load_weights: Callable, tensors: Mapping[str, Any], into: Any = None, device: Any = "cpu"):
    """What an engine's own loader puts where, found by running it on tensors without data: for
    Subscriber, in the place of Blocks. dray.record has the rest."""
    from .record import record
    return record(load_weights, tensors, into, device)


def record_source(convert: Callable, parameters: Any):
    """Which rectangle of which tensor of the checkpoint a trainer's parameters are, found by running its own conversion on
    tensors without data: for Publisher, in the place of a module. dray.record.source has the rest."""
    from .record.source import record_source
    return record_source(convert, parameters)


def megatron_shards(named: Any, tp: int = 1, tp_rank: int = 0, **options: Any) -> list:
    """A rank's parameters of Megatron-Core as Blocks of whole ones, for record_source; dray.record.source has the rest."""
    from .record.source import megatron_shards
    return megatron_shards(named, tp, tp_rank, **options)


# ---- layouts -------------------------------------------------------------------------------------

def _mesh_of(mesh, placements):
    m = _l.Mesh(ndim=mesh.ndim)
    m.shape[:mesh.ndim] = list(mesh.shape)
    for i, p in enumerate(placements):
        kind = type(p).__name__
        if kind == "_StridedShard":
            m.placements[i] = _l.Placement(2, p.dim, p.split_factor)
        elif kind == "Shard":
            m.placements[i] = _l.Placement(1, p.dim, 1)
        else:
            m.placements[i] = _l.Placement(0 if kind == "Replicate" else 3, 0, 1)
    return m


class Layout:
    """A dray_layout, and the live regions of it. What is in a dray arena is in one region a chunk,
    anything else in one region a storage: so few handles, or such that stay right when it moves."""

    def __init__(self, config: Optional[str] = None):
        self.pointer = c.c_void_p()
        self.regions = []
        self.private = False  # some of it is in host memory that other processes cannot map
        self.cuda = False     # some of it is on a GPU
        self._index = {}
        self._config = load_config(config) if config is not None else None
        call("dray_layout_new", c.byref(self.pointer))

    def close(self):
        pointer, self.pointer = self.pointer, None
        if pointer:
            library().dray_layout_free(pointer)
        for region in self.regions:
            region.close()
        self.regions = []

    def __del__(self):
        if not sys.is_finalizing():
            self.close()

    def _extent(self, tensor):
        """Which memory makes the region of a tensor: address, size, UUID, and what keeps it."""
        storage = tensor.untyped_storage()
        at, size = storage.data_ptr(), storage.nbytes()
        if not tensor.is_cuda:
            shared = _h.find(at)
            return (at, size, None, storage) if shared is None else (*shared[:2], None, storage)
        s = _g.storage_of(at)
        if s["form"] == _g.FORM_VMM:
            at, size = s["base"], s["bytes"]
        return at, size, s["uuid"], storage

    def region_of(self, tensor, name):
        """The region that has the tensor, and where in it the tensor begins."""
        at, size, uuid, keep = self._extent(tensor)
        return self._region(at, size, uuid, keep, name), tensor.data_ptr() - at

    def _region(self, at, size, uuid, keep, name):
        if at not in self._index:
            shared = None if uuid else _h.find(at)
            region = _g.Region(shared[2], keep, owned=False) if shared else \
                _g.Region.over(at, size, name, uuid is not None, keep)
            kind = _g.CUDA if uuid else _g.SHARED if shared else _g.HOST
            self.private = self.private or kind == _g.HOST
            self.cuda = self.cuda or kind == _g.CUDA
            info = _l.RegionInfo(kind, size, name.encode())
            if uuid:
                info.device[:] = uuid
            index = c.c_uint32()
            call("dray_layout_add_region", self.pointer, c.byref(info), c.byref(index))
            self._index[at] = index.value
            self.regions.append(region)
        return self._index[at]

    def _spans(self, tensor):
        """Whether it is in several allocations, as in PyTorch's expandable segments."""
        if not tensor.is_cuda:
            return False
        s = _g.storage_of(tensor.data_ptr())
        last = tensor.data_ptr() + sum((n - 1) * t for n, t in zip(tensor.shape, tensor.stride())
                                       ) * tensor.element_size()
        return s["form"] == _g.FORM_VMM and last >= s["base"] + s["bytes"]

    def _add_pieces(self, index, local, shape, start, name):
        """Rows of the whole tensor that are dense here, allocation by allocation."""
        if not local.is_contiguous() or list(local.shape[1:]) != list(shape[1:]):
            raise DrayError(-26, f"{name} lies in several allocations (expandable segments), and is "
                            "not whole rows: allocate it in dray.gpu.use_arena()")
        self.add_range(index, local, (start[0] if start else 0) *
                        (local.numel() // max(1, local.shape[0])), name)

    def add_range(self, index, local, first, name):
        """Elements of the whole tensor from `first` on, dense here, allocation by allocation."""
        element, at = local.element_size(), local.data_ptr()
        end = at + local.numel() * element
        if not self._spans(local):
            region, offset = self.region_of(local, name)
            call("dray_layout_add_range", self.pointer, index, region, offset, first, local.numel())
            return
        while at < end:
            s = _g.storage_of(at)
            count = (min(end, s["base"] + s["bytes"]) - at) // element
            region = self._region(s["base"], s["bytes"], s["uuid"], local.untyped_storage(), name)
            call("dray_layout_add_range", self.pointer, index, region, at - s["base"], first, count)
            at, first = at + count * element, first + count

    def add_tensor(self, name, dtype, shape):
        if len(shape) > _p.MOST_DIMS:
            raise DrayError(_l.EUNSUPPORTED, f"{name}: at most {_p.MOST_DIMS} dimensions expected, found {len(shape)}")
        index, shape = c.c_uint32(), _p.folded(shape)
        code = library().dray_layout_find(self.pointer, name.encode(), c.byref(index), None)
        if code:
            sizes = (c.c_int64 * max(1, len(shape)))(*shape)
            call("dray_layout_add_tensor", self.pointer, name.encode(), _g.dtype_code(dtype),
                 len(shape), sizes, c.byref(index))
        return index.value

    def add_alias(self, alias, name):
        """Another name of a tensor, where the layout has none of either from its configuration."""
        index = c.c_uint32()
        find = library().dray_layout_find
        if find(self.pointer, alias.encode(), c.byref(index), None) and not find(self.pointer, name.encode(), c.byref(index), None):
            call("dray_layout_add_alias", self.pointer, alias.encode(), index, c.byref(index))

    def add_parameter(self, name, parameter):
        """A parameter of this rank: whole, or a DTensor's shard. Where nothing of it is here, only
        the name is added."""
        if isinstance(parameter, _p.Part):
            parameter.add_to(self, name)
            return
        local, mesh, placements = _p.local(parameter)
        if self._config is not None:
            self._add_module(name, local, mesh, placements)
            return
        tensor = self.add_tensor(name, local.dtype, tuple(parameter.shape))
        if local.numel() == 0:
            return
        if not local.is_contiguous():
            raise DrayError(-1, f"{name}: the local shard is not contiguous")
        if self._spans(local):
            start = None
            if mesh is not None:
                from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
                _, start = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
            self._add_pieces(tensor, local, parameter.shape, start, name)
            return
        region, offset = self.region_of(local, name)
        if mesh is None:
            whole = _p.folded(local.shape)
            self._dense(tensor, region, [0] * len(whole), whole, offset)
            return
        if local.dim() > _l.MAX_DIMS and any(getattr(p, "dim", 0) >= _l.MAX_DIMS - 1 for p in placements):
            raise DrayError(_l.EUNSUPPORTED, f"{name}: a cut along one of its first {_l.MAX_DIMS - 1} dimensions expected, "
                            f"found {tuple(placements)}")
        coordinate = (c.c_int64 * 8)(*mesh.get_coordinate())
        shape = (c.c_int64 * _l.MAX_DIMS)()
        m = _mesh_of(mesh, placements)
        call("dray_layout_add_dtensor", self.pointer, tensor, region, offset, c.byref(m), coordinate,
             shape)
        self._same_shard(name, shape, local)

    def _add_module(self, name, local, mesh, placements):
        """A parameter of transformers' module for the configuration: also one that experts are packed
        into."""
        if local.numel() and (not local.is_contiguous() or self._spans(local)):
            raise DrayError(-26, f"{name} lies in several pieces: allocate it in dray.gpu.use_arena()")
        region, offset = self.region_of(local, name) if local.numel() else (0, 0)
        shape = (c.c_int64 * _l.MAX_DIMS)()
        m = None if mesh is None else c.byref(_mesh_of(mesh, placements))
        coordinate = None if mesh is None else (c.c_int64 * 8)(*mesh.get_coordinate())
        call("dray_layout_add_module", self.pointer, c.byref(self._config), name.encode(),
             _g.dtype_code(local.dtype), region, offset, m, coordinate, shape)
        self._same_shard(name, shape, local)

    @staticmethod
    def _same_shard(name, shape, local):
        found = _p.folded(local.shape)
        if list(shape[:len(found)]) != found:
            raise DrayError(-10, f"{name}: a shard of {shape[:len(found)]} expected, the tensor has {found}")

    def _dense(self, tensor, region, start, extent, offset):
        call("dray_layout_add_dense", self.pointer, tensor, region,
             (c.c_int64 * _l.MAX_DIMS)(*start), (c.c_int64 * _l.MAX_DIMS)(*extent), offset)

    def add_block(self, block):
        view = _p.local(block)[0]
        tensor = self.add_tensor(block.name, view.dtype, tuple(block.shape))
        if view.numel() == 0:
            return
        if self._spans(view):
            self._add_pieces(tensor, view, block.shape, block.start, block.name)
            return
        region, offset = self.region_of(view, block.name)
        element = view.element_size()
        start, extent, stride = _p.folded_block(block.name, tuple(block.shape), block.start or [0] * view.dim(),
                                              list(view.shape), list(view.stride()))
        b, dims = _l.Block(tensor=tensor, region=region, offset=offset), len(extent)
        b.start[:dims], b.extent[:dims], b.stride[:dims] = start, extent, [s * element for s in stride]
        call("dray_layout_add_block", self.pointer, c.byref(b))

    def live(self):
        return (c.c_void_p * max(1, len(self.regions)))(*(r.pointer.value for r in self.regions))


# ---- sessions ------------------------------------------------------------------------------------

class Context(_l.Opened):
    """A session with the coordinator (`dray serve`): one a process is enough. address: None takes
    $DRAY_ADDRESS; role: "trainer" or "engine". Any threads may use it at once."""
    _frees = "dray_close"

    def __init__(self, address: Optional[str] = None, role: Optional[str] = None, rank: int = 0,
                 name: Optional[str] = None, timeout: float = 60.0):
        self._open_as("the session")
        self._opened = weakref.WeakSet()  # what must end before it does
        options = _l.Options(address=address and address.encode(), role=role and role.encode(),
                             name=name and name.encode(), rank=rank, timeout_ns=_l.nanoseconds(timeout))
        call("dray_open", options, c.byref(self.pointer))

    def barrier(self, name: str, count: int, timeout: Optional[float] = None) -> None:
        """Until so many sessions have entered the barrier of this name."""
        self._beside("dray_barrier", _l.text(name), count, _l.nanoseconds(timeout))

    @property
    def member(self) -> int:
        """The id that the coordinator gave."""
        return self._number("dray_context_member")

    def _open(self, opened, function, *arguments):
        """Within `with opened._use:`."""
        with self._use.beside():
            with self._use.counting:
                self._opened.add(opened)
            call(function, self.pointer, *arguments, c.byref(opened.pointer))

    def close(self) -> None:
        """Ends the session, what was opened through it before it. DrayError (EBUSY): a call is under way in another
        thread."""
        for each in [self, *self._all_opened()]:
            each._use.check_idle()
        self._close_opened()
        super().close()

    def _all_opened(self):
        with self._use.counting:
            return list(self._opened)

    def _close_opened(self):
        for opened in self._all_opened():
            opened.close()

    def _end(self):
        self._close_opened()  # those of the last moment, too
        super()._end()


_sessions = {}  # (process, role): the Context of those that are given none


def _session(role):
    """The session of this process in this role."""
    found = _sessions.get((os.getpid(), role))
    if found is None or not found.pointer:
        found = _sessions[os.getpid(), role] = Context(role=role, rank=_place(None, None)[0])
    return found


def _place(rank, world):
    """(rank, world), where they are not given torch.distributed's; 0 of 1 where it is not initialised."""
    dist = sys.modules.get("torch.distributed")
    known = dist is not None and dist.is_available() and dist.is_initialized()
    if rank is None and world is None:
        return (dist.get_rank(), dist.get_world_size()) if known else (0, 1)
    if rank is None or world is None:
        raise TypeError(f"rank and world: both or neither, found rank={rank}, world={world}")
    return rank, world


def _no_context(what, given):
    if isinstance(given, Context):
        raise TypeError(f"{what}: the session goes into context=, found it in the place of the parameters")


class _Opened(_l.Opened):
    """What has a layout, and is closed when nobody has it any more, too."""
    _layout = None

    def __del__(self):
        if not sys.is_finalizing():
            self.close()

    def _end(self):
        super()._end()
        if self._layout:
            self._layout.close()
        self._layout = None


class Publisher(_Opened):
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
        _no_context("Publisher", parameters)
        rank, world = _place(rank, world)
        context = context or _session("trainer")
        if config is not None and not buffers and _p.is_module(parameters):
            buffers = tensors(config).keys()
        self._given, self._config = _p.Copies(parameters, rank, world) if copy else _p.given(parameters, buffers), config
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
        layout = Layout(self._config)
        for name, parameter in pairs:
            if isinstance(parameter, Block):
                layout.add_block(parameter)
            else:
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
        live = layout.live()
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

    def _wait(self, version=None, timeout=None):
        version = self._published if version is None else version
        dropped = c.c_uint32()
        if version is not None:
            with _t.span("weights wait", version, "wait", "readers"):
                self._within("dray_publisher_wait", version,
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
            self._within("dray_publisher_wait_stream", version, getattr(stream, "cuda_stream", stream),
                       _l.nanoseconds(self._timeout))

    def attach(self, optimizer, groups=None):
        """The optimizer waits before each step: until readers are done, and before that until so many
        groups, or those of these names, have what was published (groups: as deliver takes them; None:
        none need). Returns the hook's handle."""
        def wait(*_):
            if groups is not None and self._published is not None:
                self.deliver(groups=groups)
            self.wait()
        return optimizer.register_step_pre_hook(wait)

    @_l.alone
    def release(self, timeout=None):
        """Before the memory is given back (dray.gpu.release): takes it back from all readers. Raises
        DrayError (ETIMEDOUT) that names those who still have it mapped."""
        pins, count = (_l.Pin * 16)(), c.c_uint32()
        try:
            self._within("dray_publisher_release",
                 _l.nanoseconds(self._timeout if timeout is None else timeout), pins, 16,
                 c.byref(count))
        except DrayError as e:
            names = ", ".join(p.name.decode("utf-8", "replace") for p in pins[:count.value])
            raise DrayError(e.code, f"{e} ({names})" if names else str(e)) from None
        self._published = None
        self._known = None  # said anew by the next publish


class Subscriber(_Opened):
    """This rank's part of an engine; the ranks of `group` (`world` of them) take versions together.

        subscriber = dray.Subscriber(model)
        report = subscriber.update()
    model, rank, world, context: as Publisher's.
    blocks: Block, a rectangle each (views of fused parameters are as good as whole ones; engine_blocks
    makes them for SGLang and vLLM), what record() returned (its first update goes by load_weights and is
    compared), or a module (or its named_parameters(), with buffers also those
    that its state_dict() has), (name, tensor) pairs or a mapping: whole tensors. What the engine
    replaced since the last update (.to(), load_state_dict(assign=True)) is laid out anew by the next
    one: of a module, and of Blocks whose tensor is a function; tensors and views that are not their
    parameters' memory any more are refused as far as that can be seen (DrayError, ESTALE).
    load: instead, the engine's load_weights: called with a list of (name, tensor), whole tensors that are good until it
    returns, bucket by bucket, at most bucket_bytes of them. load_device: "cuda": they come into memory of the GPU that
    is current, without a stop in the host's; "cpu": into the host's.
    tensors: which it takes, {name: (shape, dtype)} or {name: tensor}, as tensors("qwen3-8b") or a
    meta-device state dict give them.
    One thread at a time, but for note_step; close(), too, is refused while another one's call is under way (EBUSY)."""
    _frees = "dray_subscriber_close"

    def __init__(self, blocks: Any = (), model: str = MODEL, group: str = "engine",
                 rank: Optional[int] = None, world: Optional[int] = None, *,
                 context: Optional[Context] = None, timeout: float = 60.0,
                 load: Optional[Callable[[list], Any]] = None,
                 tensors: Optional[Mapping[str, Any]] = None, bucket_bytes: int = 512 << 20,
                 buffers: bool = False, load_device: str = "cpu"):
        _no_context("Subscriber", blocks)
        _l.check_word("load_device", load_device, ("cpu", "cuda"))
        if load_device == "cuda" and load is None:
            raise TypeError("load_device: only with load=")
        rank, world = _place(rank, world)
        context = context or _session("engine")
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
            if not getattr(_p.local(tensor)[0], "writeable", True):
                raise TypeError(f"{name}: an array that may be written to expected, this one is read-only")
            layout.add_block(tensor if isinstance(tensor, Block) else Block(name, tensor.shape, tensor))
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
            self._first = None
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
                 bucket_bytes=0, verify=True, timeout=60.0, ctas=0, copy_engines=False, peers=True,
                 nccl_bytes=0, prefetch_seconds=0.0):
        _l.check_word("mode", mode, MODES)
        _l.check_word("strategy", strategy, STRATEGIES)
        return _l.UpdateOptions(mode=MODES[mode], strategy=STRATEGIES[strategy],
                              min_version=min_version, path=path and os.fspath(path).encode(),
                              path_version=path_version, bucket_bytes=bucket_bytes,
                              no_verify=int(not verify), timeout_ns=_l.nanoseconds(timeout),
                              no_peers=int(not peers), ctas=ctas, copy_engines=int(copy_engines),
                              nccl_bytes=nccl_bytes, prefetch_seconds=prefetch_seconds)

    @staticmethod
    def _dict(report):
        room = c.create_string_buffer(8192)
        call("dray_update_report_json", c.byref(report), room, len(room))
        return json.loads(room.value)

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
               bucket_bytes: int = 0, verify: bool = True, timeout: float = 60.0, ctas: int = 0,
               copy_engines: bool = False, peers: bool = True, nccl_bytes: int = 0) -> dict:
        """Takes the newest version (waits for one >= min_version), together with the other ranks of
        the group; the report. mode: auto, tensor (trainers of this host), distributed (of others,
        too), or disk (the checkpoint at `path`, which holds path_version). Beside inference: ctas
        bounds the thread blocks that move on this GPU, copy_engines spares them. nccl_bytes: GPU memory
        for what comes over NCCL, beside bucket_bytes; 0: 1 GiB. Raises DrayError;
        ETORN: bytes had been overwritten, the next update repairs it; else all is as it was."""
        return self._run("dray_update_weights",
                         self._options(mode, strategy, min_version, path, path_version, bucket_bytes,
                                       verify, timeout, ctas, copy_engines, peers, nccl_bytes))

    async def update_async(self, *arguments: Any, **options: Any) -> dict:
        """update() of a coroutine: a thread moves the bytes, the event loop goes on. Other calls of this
        subscriber are refused (EBUSY) meanwhile; where the coroutine is cancelled, the update goes on."""
        return await _l.in_thread(self.update, *arguments, **options)

    async def prefetch_async(self, **options: Any) -> dict:
        """prefetch() of a coroutine, as update_async."""
        return await _l.in_thread(self.prefetch, **options)

    def update_weights_from_tensor(self, **options: Any) -> dict:
        """update(mode="tensor")"""
        return self.update(mode="tensor", **options)

    def update_weights_from_distributed(self, **options: Any) -> dict:
        """update(mode="distributed")"""
        return self.update(mode="distributed", **options)

    def update_weights_from_disk(self, path: Union[str, os.PathLike], version: int = 0,
                                 **options: Any) -> dict:
        """update(mode="disk"): needs no trainer. path: a file or folder of safetensors."""
        return self.update(mode="disk", path=path, path_version=version, **options)

    @_l.alone
    def start(self, *arguments: Any, **options: Any) -> None:
        """An update (its arguments) that does not block: start, poll until it is True (fileno, which
        is to be asked after start, says when), finish."""
        self._failure, options = None, self._options(*arguments, **options)
        self._settle()
        if self._first:
            self._first.__enter__()
        self._within("dray_update_start", c.byref(options))
        self._started = True

    @_l.alone
    def poll(self) -> bool:
        if not self.pointer:
            self._use._refuse_closed()
        error = _l.Error()
        code = library().dray_update_poll(self.pointer, c.byref(error))
        return code != _l.EAGAIN

    @_l.alone
    def finish(self) -> dict:
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
        """Brings a version (options as of update) into spare memory, while the engine serves the one
        that it has; commit() swaps. Together with the other ranks, both. prefetch_seconds: what moves
        between GPUs is spread over this time, so that inference is hardly slower meanwhile."""
        return self._run("dray_prefetch_weights", self._options(**options))

    def commit(self, min_version: int = 0, timeout: float = 60.0) -> dict:
        """What was prefetched becomes what the engine serves: memory of an arena, or of dray's own, is exchanged, the rest
        copied and verified. Nothing on the GPU may use the weights meanwhile. pause_seconds: all of it."""
        return self._run("dray_commit_weights", self._options(min_version=min_version, timeout=timeout))

    def drop_prefetched(self) -> None:
        """Frees the spare memory."""
        self._call("dray_prefetch_drop")

    @property
    def version(self) -> int:
        """That the group holds as a whole; 0: none yet. Raises DrayError (ETORN) for a torn group."""
        version, state = c.c_uint64(), c.c_int32()
        self._call("dray_subscriber_version", c.byref(version), None, c.byref(state))
        if state.value == 2:
            raise DrayError(_l.ETORN, "the group is torn: the next update repairs it")
        return version.value

    def fileno(self) -> int:
        return self._number("dray_subscriber_fd")

    def release_mappings(self) -> None:
        """Between updates: unmaps what its publishers want back."""
        self._call("dray_subscriber_release_mappings")

    def note_step(self, seconds: float) -> None:
        """A step of decoding took so long: reports say by how much updates slowed steps down."""
        with self._use.briefly():
            self._within("dray_subscriber_note_step", int(seconds * 1e9))

    @_l.alone
    def verify(self) -> None:
        """Compares the memory with what the last update brought."""
        self._still("the last update wrote")
        self._within("dray_subscriber_verify")

    def leave(self, timeout: float = 60.0) -> None:
        """Before the engine ends: off the routers' list, and until no other engine reads from it."""
        self._call("dray_subscriber_leave", _l.nanoseconds(timeout), None)


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
