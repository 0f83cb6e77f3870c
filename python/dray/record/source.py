"""A trainer's side recorded: the function that turns its parameters into the checkpoint's tensors runs once on tensors
without data, and says which rectangle of which tensor of the checkpoint each rectangle of its memory is."""
from __future__ import annotations

import functools
from typing import Any, Callable, Iterable, NamedTuple, Optional

import torch

from .._declared import EUNSUPPORTED
from .._library import DrayError
from ..parameters import Block, Given, given, local, places, stale
from ..parameters import Part as _Part
from . import _one, _threads
from .dispatch import Recording
from .recorded import Part, describe
from .rectangles import MOST_BOXES, Place, boxes, contiguous
from .tensors import NotRecorded


class Share(NamedTuple):
    """What this rank has of a parameter: a rectangle of it, and the number of its Block among those given."""
    start: tuple
    extent: tuple
    index: int


class Held(NamedTuple):
    """A rectangle of a tensor of the checkpoint in this rank's memory: at `offset` with `strides`, in elements, of the Block
    `index`, or computed of that."""
    name: str
    shape: tuple
    start: tuple
    extent: tuple
    index: int
    offset: int
    strides: tuple
    part: Part
    dtype: torch.dtype    # the checkpoint's


def _share(parameter):
    """Shape of the whole parameter, and where in it the local rectangle begins and ends."""
    if isinstance(parameter, _Part):
        raise NotImplementedError("record_source: whole tensors, DTensors or Blocks expected, found a part of FSDP1's flat "
                                  f"parameter, of {tuple(parameter.shape)}")
    here, mesh, placements = local(parameter)
    shape = tuple(parameter.shape)
    start = getattr(parameter, "start", None) or (0,) * len(shape)
    if mesh is not None:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
        _, start = compute_local_shape_and_global_offset(shape, mesh, placements)
        if any(p.is_partial() or type(p).__name__ == "_StridedShard" for p in placements):
            raise NotImplementedError(f"record_source: placements Shard and Replicate expected, found {tuple(placements)}")
    return shape, tuple(start), tuple(here.shape), here.dtype


def _covers(shape, shares):
    return any(share.extent == shape for share in shares)


def _cut_at(shape, place):
    """Along which dimension, and behind how many elements, to divide a place that is no rectangle of a dense tensor: where it
    runs over the end of a row that it did not begin."""
    dense = contiguous(shape)
    moving = sorted((d for d, n in enumerate(place.sizes) if n > 1 and place.strides[d]), key=lambda d: place.strides[d])
    for d in moving:
        n, s = place.sizes[d], place.strides[d]
        for size, step in zip(reversed(shape), reversed(dense)):
            row = size * step
            if s >= row:
                continue
            begun, turn = place.offset % row, row // s
            rest = -(-(row - begun) // s)
            if rest < n and (begun >= s or row % s):
                return d, rest
            if n > turn and n % turn:
                return d, n - n % turn
    return (moving[-1], place.sizes[moving[-1]] // 2) if moving else (None, 0)


def _rectangles(shape, place, strides):
    """boxes(), of a place that may begin and end in the middle of rows; None: not to be had."""
    found, left = [], [(place, 0)]
    while left:
        at, base = left.pop()
        some = boxes(shape, at, strides)
        if some is not None:
            found += [(start, extent, base + offset, steps) for start, extent, offset, steps in some]
        else:
            d, count = _cut_at(shape, at)
            if d is None:
                return None
            for first, n in ((0, count), (count, at.sizes[d] - count)):
                left.append((Place(at.offset + first * at.strides[d], (*at.sizes[:d], n, *at.sizes[d + 1:]), at.strides),
                             base + first * strides[d]))
        if len(found) + len(left) > MOST_BOXES:
            return None
    return found


class Converted(Given):
    """A rank's parameters as Blocks of the checkpoint's tensors, for Publisher. computed: {name: how}, what is made anew by
    each publish, into memory of its own. names: of the checkpoint's tensors that this rank has something of."""

    def __init__(self, convert, parameters):
        self._convert, self._given = convert, given(parameters)
        pairs = self._given.pairs()
        self._shares, self._wholes, self._extents = {}, {}, []  # extents: (shape, dtype) of each given one
        for index, (name, parameter) in enumerate(pairs):
            shape, start, extent, dtype = _share(parameter)
            self._extents.append((extent, dtype))
            known = self._wholes.setdefault(name, (shape, dtype))
            if known != (shape, dtype):
                raise ValueError(f"{name}: {known[1]} {known[0]} expected of all its parts, found {dtype} {shape}")
            self._shares.setdefault(name, []).append(Share(start, extent, index))
        self._held, self._constants, self._run, self.computed = [], [], {}, {}
        self._staged = {}
        self._record()

    @property
    def names(self):
        return sorted({h.name for h in self._held} | {c[0] for c in self._constants} | set(self._run))

    # ---- once

    def _record(self):
        recording, made = Recording(), []
        try:
            with _one, _threads(recording), recording.mode():
                for name, tensor in self._convert((n, recording.source(n, shape, dtype))
                                                  for n, (shape, dtype) in self._wholes.items()):
                    made.append((name, tensor.detach().contiguous()))
            for name, tensor in made:
                self._describe(recording, name, tensor)
        finally:
            recording.done = True

    def _describe(self, recording, name, tensor):
        store, shape = recording.store_of(tensor), tuple(tensor.shape)
        found = None if store is None else describe(recording, tensor, store)
        if found is None:
            raise NotRecorded(f"{name}: a tensor made of the parameters expected, found one that has nothing of them")
        if found.reason:
            torn = [s for s in sorted(found.sources) if not _covers(self._wholes[s][0], self._shares[s])]
            if torn:
                raise NotRecorded(f"{name} {found.reason}, of {torn[0]}, of which this rank has a part alone")
            self._run[name] = shape, tensor.dtype, found.sources
            self.computed[name] = found.reason
            return
        for part in found.parts:
            for share in self._shares[part.name]:
                self._cut(name, shape, tensor.dtype, part, share)
        for offset, sizes, strides, value in found.fills:
            for start, extent, _, _ in _rectangles(shape, Place(offset, sizes, strides), strides):
                self._constants.append((name, shape, start, torch.full(extent, value, dtype=tensor.dtype)))

    def _cut(self, name, shape, dtype, part, share):
        """What of a part this rank has."""
        first = tuple(max(a, b) for a, b in zip(part.start, share.start))
        last = tuple(min(a + n, b + m) for a, n, b, m in zip(part.start, part.extent, share.start, share.extent))
        extent = tuple(b - a for a, b in zip(first, last))
        if any(n <= 0 for n in extent):
            return
        at = part.offset + sum((a - b) * s for a, b, s in zip(first, part.start, part.strides))
        # Along each dimension of the parameter a number that stands for its stride here, as memory may move.
        inner = contiguous(share.extent)
        offset = sum((a - b) * s for a, b, s in zip(first, share.start, inner))
        found = _rectangles(shape, Place(at, extent, part.strides), inner)
        if found is None:
            raise NotRecorded(f"{name}: has elements of {part.name} that are no rectangles")
        for start, size, there, strides in found:
            self._held.append(Held(name, shape, start, size, share.index, offset + there, strides, part, dtype))
            if part.steps or part.dtype != self._wholes[part.name][1]:
                self.computed[name] = ", ".join(map(str, part.steps or ())) or f"{dtype}"

    # ---- before each publish

    @functools.cached_property
    def computes(self):
        return any(self._is_made(h) for h in self._held) or bool(self._run)

    def _is_made(self, held):
        return held.part.steps is not None or held.part.dtype != self._wholes[held.part.name][1]

    @staticmethod
    def _view(held, here):
        """Of the local rectangle, which may have strides of its own."""
        dense = contiguous(tuple(here.shape))
        if here.stride() == dense or here.is_contiguous():
            return here.as_strided(held.extent, held.strides, here.storage_offset() + held.offset)
        own, rest = [], held.offset
        for d in dense:
            own.append(rest // d)
            rest %= d
        strides, reach = [], list(own)
        for n, s in zip(held.extent, held.strides):
            d = next((d for d, m in enumerate(dense) if s and s % m == 0 and here.shape[d] > 1), None)
            strides.append(0 if d is None or n == 1 else here.stride(d) * (s // dense[d]))
            if strides[-1]:
                reach[d] += (n - 1) * (s // dense[d])
        Converted._check_rows(held, here, reach)
        return here.as_strided(held.extent, strides, here.storage_offset() + sum(
            i * s for i, s in zip(own, here.stride())))

    @staticmethod
    def _check_rows(held, here, reach):
        """Refuses what runs over the end of a row of memory whose rows are not one behind the other. reach: the last
        element's place along each dimension, which may be behind the dimension's end."""
        moving = [d for d, n in enumerate(here.shape) if n > 1]
        for outer, d in reversed(list(zip(moving, moving[1:]))):
            over = reach[d] // here.shape[d]
            if over and here.stride(outer) != here.stride(d) * here.shape[d]:
                raise DrayError(EUNSUPPORTED, f"{held.name} runs over rows of {held.part.name}, which is expected to be"
                                f" contiguous here, and has strides {here.stride()} of {tuple(here.shape)}")
            reach[outer] += over

    def pairs(self):
        pairs, found = self._given.pairs(), []
        for i, held in enumerate(self._held):
            here = local(pairs[held.index][1])[0]
            if (tuple(here.shape), here.dtype) != self._extents[held.index]:
                shape, dtype = self._extents[held.index]
                raise stale(held.part.name, f"had {dtype} {shape} here, and has {here.dtype} {tuple(here.shape)}: "
                            "record it anew")
            if self._is_made(held):
                view = self._memory(("held", i), held.extent, held.dtype)
            else:
                view = self._view(held, here)
                view = view if view.dtype == held.dtype else view.view(held.dtype)
            found.append((held.name, Block(held.name, held.shape, view, held.start)))
        found += [(n, Block(n, shape, t, start)) for n, shape, start, t in self._constants]
        found += [(n, Block(n, shape, self._memory(n, shape, dtype))) for n, (shape, dtype, _) in self._run.items()]
        return found

    def places(self):
        return places(self.pairs())

    def _memory(self, key, shape, dtype):
        if key not in self._staged:
            from ..host import empty
            self._staged[key] = empty(*shape, dtype=dtype)
        return self._staged[key]

    def refresh(self, tensors=None):
        """Computes anew what is not in the parameters as it is in the checkpoint."""
        pairs = self._given.pairs()
        for i, held in enumerate(self._held):
            if self._is_made(held):
                view = self._view(held, local(pairs[held.index][1])[0])
                self._memory(("held", i), held.extent, held.dtype).copy_(held.part.made(view))
        if self._run:
            needed = set().union(*(sources for _, _, sources in self._run.values()))
            whole = {name: local(parameter)[0] for name, parameter in pairs
                     if name in needed and tuple(local(parameter)[0].shape) == self._wholes[name][0]}
            with torch.no_grad():
                for name, tensor in self._convert((n, t.detach().clone()) for n, t in whole.items()):
                    if name in self._run:
                        self._memory(name, *self._run[name][:2]).copy_(tensor)


def record_source(convert: Callable[[Iterable], Iterable], parameters: Any) -> Converted:
    """Which rectangle of which tensor of the checkpoint this rank's parameters are, found by running the trainer's own
    conversion once on tensors that have no data: for Publisher, in the place of a module.

    convert: called with an iterable of (name, tensor), whole parameters as the trainer names them; gives (name, tensor) of
    the checkpoint. parameters: what this rank has of them, as Publisher takes it: Blocks where they are cut (of the
    trainer's names and shapes: megatron_shards makes them), DTensors, whole tensors.
    Nothing is gathered or moved. What convert computes element by element (a cast, +1) each publish computes anew, of
    what this rank has; what it computes in another way convert makes anew, where the rank has all that it needs:
    NotRecorded, which names it, else."""
    return Converted(convert, parameters)


def megatron_shards(named: Any, tp: int = 1, tp_rank: int = 0, *, glu: Iterable[str] = ("linear_fc1",),
                    rename: Optional[Callable[[str], str]] = None) -> list:
    """Blocks of Megatron-Core's parameters, whole as its converters know them: what tensor parallelism has gathered.

    named: (name, parameter) pairs, or a module. How a parameter is cut is what Megatron wrote on it (`tensor_model_parallel`,
    `partition_dim`). glu: of names with these words each rank has its part of the gate, then of the up projection. rename:
    gives the name by which the converter knows it, of experts and pipeline stages that count on their own."""
    found = []
    for name, p in named.named_parameters() if hasattr(named, "named_parameters") else named:
        name = rename(name) if rename else name
        shape, dim = list(p.shape), getattr(p, "partition_dim", -1)
        if tp == 1 or not getattr(p, "tensor_model_parallel", False) or dim < 0:
            found.append(Block(name, tuple(shape), lambda p=p: p.detach()))
            continue
        halves = 2 if dim == 0 and any(word in name for word in glu) else 1
        rows = shape[dim] // halves
        shape[dim] *= tp
        for half in range(halves):
            start = [0] * len(shape)
            start[dim] = half * rows * tp + tp_rank * rows
            found.append(Block(name, tuple(shape), functools.partial(_rows, p, dim, half * rows, rows), tuple(start)))
    return found


def _rows(parameter, dim, at, count):
    return parameter.detach().narrow(dim, at, count)
