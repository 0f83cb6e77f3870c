"""What a trainer or an engine was given, and where each parameter is now.

Frameworks replace parameters: .to() gives the same objects other memory, load_state_dict(assign=True)
and offloading make other objects. So what was given is looked up again before each publish and each
update, and what cannot be found any more is ESTALE."""
from __future__ import annotations

import inspect
import math
import sys
import weakref
from dataclasses import InitVar, dataclass
from typing import Any, Optional

from . import _library as _l
from . import gpu as _g
from ._library import DrayError

_INSERTED = ("_orig_mod.", "_checkpoint_wrapped_module.")  # into names, by what wraps modules
_WAY_OUT = "; give the module itself, or Blocks whose tensor is a function that returns the view"


MOST_DIMS = 8  # of a parameter: the library sees those from the last of its own on as one


def folded(shape):
    """A shape as the library has it: kernels of convolutions have five dimensions and more, of which no rank cuts the
    last ones."""
    shape, last = list(shape), _l.MAX_DIMS - 1
    return shape if len(shape) <= _l.MAX_DIMS else [*shape[:last], math.prod(shape[last:])]


def folded_block(name, shape, start, extent, stride):
    """The same of a rectangle: start, extent, stride."""
    last = _l.MAX_DIMS - 1
    if len(shape) > MOST_DIMS:
        raise DrayError(_l.EUNSUPPORTED, f"{name}: at most {MOST_DIMS} dimensions expected, found {len(shape)}")
    if len(shape) <= _l.MAX_DIMS:
        return list(start), list(extent), list(stride)
    inner, step = math.prod(shape[last + 1:]), stride[-1]
    for n, s in zip(reversed(extent[last:]), reversed(stride[last:])):
        if n > 1 and s != step:
            raise DrayError(_l.EUNSUPPORTED, f"{name}: dimensions from {last} on that are dense in memory expected, found "
                            f"strides {tuple(stride)}")
        step = step * n if n > 1 else step
    if list(extent[last + 1:]) != list(shape[last + 1:]):
        raise DrayError(_l.EUNSUPPORTED, f"{name}: dimensions behind {last} that are whole expected, found {tuple(extent)} of "
                        f"{tuple(shape)}")
    steps = [s for n, s in zip(extent[last:], stride[last:]) if n > 1]
    return [*start[:last], start[last] * inner], [*extent[:last], math.prod(extent[last:])], \
        [*stride[:last], steps[-1] if steps else 0]


@dataclass
class Block:
    """A rectangle of a tensor, in memory of this rank.

        Block("model.layers.0.self_attn.q_proj.weight", (4096, 4096), qkv[:512], (512, 0))

    name, shape: of the whole tensor, as the checkpoint has it.
    tensor: a view of this rank's memory with the rectangle's shape and any strides; or a function that returns the
    view, which is called before each publish and each update, for parameters that their module replaces.
    start: the indices in the whole tensor of the view's first element; None: all 0.
    of: the Parameter that `tensor` is a view of, to which a weak reference is kept. Once the Parameter was replaced or
    moved, the Block is refused (ESTALE)."""
    name: str
    shape: tuple
    tensor: Any
    start: Optional[tuple] = None
    of: InitVar[Any] = None

    def __post_init__(self, of):
        self.watched = None if of is None else (weakref.ref(of), place(of))


class Part:
    """What a rank has of a tensor, or of several, where the shape of a parameter does not say which: `shape`, the
    `tensor` where it is now, add_to(layout, name), and within(memory), the same part in a copy of that tensor."""


class FlatPart(Part):
    """The part of a parameter that is in a rank's shard of FSDP1's flat parameter: elements
    [first, first + count) of the parameter's, dense from `at` on, looked up each time: the shard may
    move."""

    def __init__(self, flat, shape, at=0, first=0, count=0):
        self.flat, self.shape = flat, tuple(shape)
        self.at, self.first, self.count = at, first, count

    @property
    def tensor(self):
        shard = getattr(self.flat, "_local_shard", None)
        shard = self.flat.data if shard is None else shard
        return shard.detach()[self.at:self.at + self.count]

    def within(self, memory):
        return FlatPart(memory, self.shape, 0, self.first, self.count)

    def add_to(self, layout, name):
        local = self.tensor
        index = layout.add_tensor(name, local.dtype, self.shape)
        if local.numel():
            layout.add_range(index, local, self.first, name)


def fsdp1_parameters(module):
    """(name, FlatPart) of all parameters of a module in FullyShardedDataParallel, for Publisher."""
    for path, unit in module.named_modules():
        handle = getattr(unit, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None:
            continue
        path = path.replace("_fsdp_wrapped_module", "").replace("..", ".").strip(".")
        for name, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos):
            name = f"{path}.{name}" if path else name
            if info.in_shard:
                yield name, FlatPart(flat, shape, info.offset_in_shard, info.intra_param_start_idx,
                                     info.numel_in_shard)
            else:
                yield name, FlatPart(flat, shape)


def is_parameter(tensor):
    torch = sys.modules.get("torch")  # nobody has one where it was not imported
    return torch is not None and isinstance(tensor, torch.nn.Parameter)


def tensor_of(values):
    """The tensor, or the array like one; what a function returns."""
    values = values() if callable(values) else values
    if hasattr(values, "untyped_storage"):
        return values
    from .arrays import Array
    return Array(values)


def local(parameter):
    """The memory of a parameter, which may be a DTensor, and how it is cut."""
    if isinstance(parameter, Part):
        return parameter.tensor, None, None
    if isinstance(parameter, Block):
        return tensor_of(parameter.tensor).detach(), None, None
    if hasattr(parameter, "placements"):
        return parameter.detach().to_local(), parameter.device_mesh, parameter.placements
    return tensor_of(parameter).detach(), None, None


def check_written(name, memory):
    """Refuses an array that a load or an update may not write to."""
    if not getattr(memory, "writeable", True):
        raise TypeError(f"{name}: an array that may be written to expected, this one is read-only")


def _memory(parameter):
    """local(), at less cost: it is asked before each publish and update."""
    if isinstance(parameter, Part):
        return parameter.tensor
    parameter = parameter.tensor if isinstance(parameter, Block) else parameter
    return tensor_of(getattr(parameter, "_local_tensor", parameter))


def place(parameter):
    """Where a parameter is, and how."""
    tensor = _memory(parameter)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg()


def places(pairs):
    return [(name, place(parameter)) for name, parameter in pairs]


def kind(parameter):
    """What is announced of it: dtype and global shape."""
    return _memory(parameter).dtype, tuple(parameter.shape)


def clean(pairs):
    """(name, parameter) by the names of checkpoints."""
    for name, parameter in pairs:
        for part in _INSERTED:
            name = name.replace(part, "")
        yield name, parameter


def _plain(name):
    """The name that a checkpoint has for a parameter, also within FSDP1's wrappers."""
    return next(clean([(name.replace("_fsdp_wrapped_module.", ""), None)]))[0]


def stale(name, why):
    return DrayError(_l.ESTALE, f"{name} {why}")


# ---- modules -------------------------------------------------------------------------------------

def _is_module(given):
    return hasattr(given, "named_parameters") and hasattr(given, "named_modules")


def _asking(function, known):
    """Calls it as it was called before, where that is known."""
    parameters = inspect.signature(function).parameters
    keywords = next((p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)

    def ask(**more):
        bound = inspect.signature(function).bind_partial()
        bound.arguments.update((name, known[name]) for name in parameters if name in known)
        for name, value in more.items():
            if name in parameters:
                bound.arguments[name] = value
            elif keywords:
                bound.arguments[keywords] = {**bound.arguments.get(keywords, {}), name: value}
        return function(*bound.args, **bound.kwargs)
    return ask


def _module_of(given):
    """The module behind given, or behind a generator that it handed out, and how to ask it again;
    (None, None): given is something else."""
    if _is_module(given):
        return given, _asking(given.named_parameters, {})
    frame = given.gi_frame if inspect.isgenerator(given) else None
    known = dict(frame.f_locals) if frame else {}
    if frame and given.gi_code is fsdp1_parameters.__code__:
        return known["module"], _asking(fsdp1_parameters, known)
    for owner in type(known["self"]).__mro__ if _is_module(known.get("self")) else ():
        function = owner.__dict__.get("named_parameters")
        if getattr(function, "__code__", None) is given.gi_code:
            return known["self"], _asking(function, known)
    return None, None


class Given:
    """What somebody was given: pairs(), (name, parameter or Block or Part) as they are now; and
    places(), (name, something that differs where memory was replaced)."""

    def places(self):
        return places(self.pairs())

    def certificate(self):
        """What the first update is compared by, if it is to be; else None."""
        return None

    computes = False  # something anew before each publish: refresh()
    waits = None      # a weak method of the publisher, for the readers of what was computed last

    def refresh(self, tensors=None):
        """Before each publish, when nobody reads: what is not published where the parameters lie. tensors: publish's."""

    def updated(self):
        """After each update: what it does not do by bytes."""


    def aliases(self):
        """(other name, name) of parameters that are one."""
        return []


class _Module(Given):
    """A module's parameters by their names, and with buffers those that its state_dict() has (True), or those of
    the names given."""

    def __init__(self, module, ask, buffers):
        self._module, self._ask, self._buffers = module, ask, buffers
        self._names = None  # when it was first asked

    def _walk(self, **options):
        module = self._module
        flat = any(getattr(getattr(m, "_handle", None), "flat_param", None) is not None
                   for m in module.modules())
        if flat:
            yield from self._walk_flat(options)
        else:
            yield from self._ask(**options)
        for path, part in module.named_modules() if self._buffers else ():
            for name, buffer in part._buffers.items():
                name, own = f"{path}.{name}" if path else name, name
                if buffer is not None and (own not in part._non_persistent_buffers_set if self._buffers is True else
                                           _plain(name) in self._buffers):
                    yield _plain(name), buffer

    def _walk_flat(self, options):
        """Yields FSDP1's parts, then the parameters that no flat parameter has: of ignored modules, and around wrapped ones."""
        flat = list(fsdp1_parameters(self._module))
        yield from flat
        known = {name for name, _ in clean(flat)}
        for name, parameter in _asking(self._module.named_parameters, {})(**options):
            if not getattr(parameter, "_fsdp_flattened", False) and _plain(name) not in known:
                yield _plain(name), parameter

    def pairs(self):
        listed = list(clean(self._walk()))
        if self._names is None:
            self._names = [name for name, _ in listed]
        if [name for name, _ in listed] == self._names:
            return listed
        every = dict(clean(self._walk(remove_duplicate=False)))
        for name in self._names:
            if name not in every:
                raise stale(name, "is no parameter of the module any more")
        found = [(name, every[name]) for name in self._names]
        there = {place(parameter) for _, parameter in found}
        for name, parameter in listed:
            if name not in self._names and place(parameter) not in there:
                raise stale(name, "was none of the module's parameters, or tied to another: tie it "
                            "again, or open this anew")
        return found

    def aliases(self):
        if self._names is None:
            self.pairs()
        first, found = {}, []
        for name, parameter in clean(self._walk(remove_duplicate=False)):
            known = first.setdefault(id(parameter), name)
            if name not in self._names and known in self._names:
                found.append((name, known))
        return found


# ---- pairs, mappings and Blocks ------------------------------------------------------------------

class _Shared:
    """Notices when tensors, which share their storages with others at first, are left alone in one:
    what they were views or copies of is elsewhere now. Parameters are always others."""

    def __init__(self, named, more=()):
        """named: (name, tensor); more: tensors that are not others either."""
        self._storages, own = {}, {}  # address: [(name, tensor)]
        for name, tensor in named:
            tensor = getattr(tensor, "_local_tensor", tensor)
            if hasattr(tensor, "_cdata") and tensor.numel():  # PyTorch's
                at = tensor.untyped_storage().data_ptr()
                self._storages.setdefault(at, []).append((name, tensor))
        for tensor in more:
            tensor = getattr(tensor, "_local_tensor", tensor)
            at = tensor.untyped_storage().data_ptr()
            for each in (tensor, tensor._base):
                if each is not None and not is_parameter(each):
                    own.setdefault(at, {})[id(each)] = each
        self._count = getattr(getattr(sys.modules.get("torch"), "_C", None), "_storage_Use_Count", lambda _: 0)
        self._ours = {at: 1 + len({id(t) for _, t in there})  # the storage's object is one more
                      for at, there in self._storages.items()}
        self._had = [at for at in self._storages if self._others(at) > len(own.get(at, ()))]

    def _others(self, at):
        storage = self._storages[at][0][1].untyped_storage()
        return self._count(storage._cdata) - self._ours[at]

    def left(self):
        """Names, those of a storage together."""
        return [{name for name, _ in self._storages[at]} for at in self._had if self._others(at) <= 0]


class _Entry:
    """A Block, or a tensor and its name: what was given while somebody else has it, else, but for
    Parameters, a tensor of our own over the same memory."""

    def __init__(self, name, tensor, block=None):
        self.name, self._block = name, block and weakref.ref(block)
        self._of = (block.shape, block.start) if block else None
        self._watched = block.watched if block else None
        self._is_parameter = is_parameter(tensor)
        self._remember(tensor_of(tensor))

    def _remember(self, tensor):
        self.given, self._at = weakref.ref(tensor), _storage(tensor)
        self._base = None if tensor._base is None else weakref.ref(tensor._base)
        self.own = None if self._is_parameter else tensor.detach()

    def now(self):
        """It, whether somebody else has it, and whether it is elsewhere than the last time."""
        block, tensor = self._block and self._block(), self.given()
        if block is not None:
            tensor = tensor_of(block.tensor)
        elif tensor is None and self._is_parameter:
            raise stale(self.name, "is no parameter of anything any more: it was replaced" + _WAY_OUT)
        if self._watched:
            watched = self._watched[0]()
            if watched is None or place(watched) != self._watched[1]:
                raise stale(self.name, "is a view of a parameter that was replaced" + _WAY_OUT)
        known, base = tensor is not None, self._base and self._base()
        tensor = tensor if known else self.own
        moved = _storage(tensor) != self._at
        if moved:  # nothing of ours keeps the memory that it has left
            self._remember(tensor)
        elif base is not None and _storage(base) != self._at:
            raise stale(self.name, "is a view of a parameter that lies elsewhere now" + _WAY_OUT)
        if self._of:
            return block or Block(self.name, self._of[0], tensor, self._of[1]), known, moved
        return tensor, known, moved


def _storage(tensor):
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr()


class _Constant:
    """What looks its memory up itself: a Part, a Block whose tensor is a function."""

    def __init__(self, name, parameter):
        self.name, self._parameter = name, parameter

    def now(self):
        return self._parameter, True, False


class _Listed(Given):
    """Blocks, or (name, tensor) pairs."""

    def __init__(self, listed):
        self._entries = []
        for entry in listed:
            name, tensor, block = _read(entry)
            own = not callable(tensor) and not isinstance(tensor, Part)
            self._entries.append(_Entry(name, tensor, block) if own else _Constant(name, block or tensor))
        self._share()

    def _share(self):
        owners = [e for e in self._entries if isinstance(e, _Entry) and e.own is not None]
        self._shared = _Shared([(e.name, e.own) for e in owners],
                               [e.given() for e in owners if e.given() is not None])

    def pairs(self):
        found, known, any_moved = [], set(), False
        for entry in self._entries:
            parameter, somebody_has_it, moved = entry.now()
            found.append((entry.name, parameter))
            known.update([entry.name] if somebody_has_it else [])
            any_moved |= moved
        if any_moved:
            self._share()
        for names in self._shared.left():
            if not names & known:
                raise stale(min(names), "lies in memory that nobody else has any more: its parameter was "
                            "replaced" + _WAY_OUT)
        return list(clean(found))


def _read(entry):
    """Name, tensor and Block."""
    if isinstance(entry, Block):
        return entry.name, entry.tensor, entry
    if not isinstance(entry, tuple) or len(entry) != 2:
        raise TypeError("a module, Blocks, (name, tensor) pairs or a mapping of them expected, found "
                        f"{type(entry).__name__}")
    return (*entry, None)


class _Mapping(Given):
    """A mapping of tensors that are no Parameters: looked up in it each time."""

    def __init__(self, mapping):
        self._mapping, self._names = mapping, list(mapping.keys())
        # What state_dict() returned is worth something only while it shares the module's memory.
        self._shared = _Shared(mapping.items() if hasattr(mapping, "_metadata") else ())

    def pairs(self):
        for names in self._shared.left():
            raise stale(min(names), "of a state_dict() lies in memory that the module has no more"
                        + _WAY_OUT)
        for name in self._names:
            if name not in self._mapping:
                raise stale(name, "is in the mapping no more")
        return list(clean((name, self._mapping[name]) for name in self._names))


# ---- generators ------------------------------------------------------------------------------------

class Copies(Given):
    """What a generator gives, one tensor at a time, copied into memory of this rank, which keeps its share of the rows of
    each: all ranks together have the model once. given: an iterable of (name, whole tensor), or a function that returns one
    for each publish."""
    computes = True

    def __init__(self, given, rank, world):
        self._again, self._rank, self._world = given if callable(given) else None, rank, world
        self._held, self._fresh = {}, False  # name: (shape, dtype, Block)
        self._take(given() if callable(given) else given, self._add)
        self._fresh = True

    def _rows(self, count):
        """Of this rank."""
        each = -(-count // self._world)
        return min(count, each * self._rank), min(count, each * (self._rank + 1))

    def _add(self, name, tensor):
        from .host import empty
        shape = tuple(tensor.shape)
        at, end = self._rows(shape[0] if shape else 1)
        memory = empty(end - at, *shape[1:], dtype=tensor.dtype) if shape else empty(dtype=tensor.dtype)
        block = Block(name, shape, memory, (at, *[0] * (len(shape) - 1)) if shape else ())
        self._held[name] = shape, tensor.dtype, block if end > at else None

    def _known(self, name, tensor):
        if name not in self._held:
            raise stale(name, "was not among the tensors that were first given: open the Publisher anew")
        if self._held[name][:2] != (tuple(tensor.shape), tensor.dtype):
            raise stale(name, "was {1} {0}, and is {2} {3}: open the Publisher anew".format(
                *self._held[name][:2], tensor.dtype, tuple(tensor.shape)))

    def _take(self, named, check):
        """check: what is done with each name first."""
        seen = set()
        for name, tensor in clean(named.items() if hasattr(named, "items") else named):
            if name in seen:
                raise ValueError(f"{name}: came twice")
            seen.add(name)
            tensor = tensor_of(tensor).detach()
            if hasattr(tensor, "placements"):
                raise TypeError(f"{name}: a whole tensor expected, found a DTensor: those go without copy=True")
            check(name, tensor)
            self._keep(name, tensor)
        if missing := self._held.keys() - seen:
            raise stale(min(missing), f"and {len(missing) - 1} others were not among the tensors")

    def _keep(self, name, tensor):
        block = self._held[name][2]
        self._fresh = False  # also where tensors end in the middle
        if block is not None:
            at = block.start[0] if block.start else 0
            block.tensor.copy_(tensor[at:at + len(block.tensor)] if block.start else tensor)

    def pairs(self):
        return [(name, block) for name, (_, _, block) in self._held.items() if block is not None]

    def listed(self):
        """Of all ranks' rows: [name, dtype, shape] each, as JSON can hold it."""
        return [[name, str(dtype).rpartition(".")[2], list(shape)] for name, (shape, dtype, _) in self._held.items()]

    def refresh(self, tensors=None):
        if tensors is None and not self._fresh:
            if self._again is None:
                raise ValueError("publish: tensors= expected, as those of the last version came from what is used up now")
            tensors = self._again()
        if tensors is not None:
            self._take(tensors, self._known)
        self._fresh = False


def is_module(parameters):
    """A module, or a generator that one handed out of its parameters."""
    return _module_of(parameters)[0] is not None


def given(parameters, buffers=False) -> Given:
    if isinstance(parameters, Given) and not (isinstance(parameters, list) and parameters.edited()):
        return parameters
    module, ask = _module_of(parameters)
    if module is not None:
        return _Module(module, ask, buffers)
    if buffers:
        raise TypeError("buffers: only of a module")
    if not hasattr(parameters, "items"):
        return _Listed(parameters)
    if any(is_parameter(tensor) for tensor in parameters.values()):
        return _Listed(parameters.items())
    return _Mapping(parameters)
