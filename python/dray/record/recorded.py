"""What a recording found: Blocks of the parameters that can be filled in place, constants, and what is
left to the engine's loader."""
from __future__ import annotations

from typing import NamedTuple, Optional

import torch

from .. import _library as _l
from .._library import DrayError
from ..parameters import Block, Given, folded_block, place, stale
from .module import tensors_of
from .provenance import Codes, Computed, Fill, Rect, exact, rectangles, rounding
from .rectangles import MOST_BOXES, Place, boxes, contiguous, inside


class Part(NamedTuple):
    """A rectangle of a tensor of the checkpoint, and where it lies in an engine's tensor."""
    name: str
    start: tuple
    extent: tuple
    offset: int       # in elements, of the engine's tensor's own memory: 0 is its first element
    strides: tuple
    dtype: torch.dtype
    steps: Optional[tuple] = None  # by which it is computed, behind an update into memory of its own; None: it is not

    def view(self, tensor):
        """Of the engine's tensor."""
        seen = tensor if self.steps is not None or self.dtype == tensor.dtype else tensor.view(self.dtype)
        return seen.as_strided(self.extent, self.strides, seen.storage_offset() + self.offset)

    def made(self, values):
        """What the engine's tensor has of the checkpoint's elements."""
        values = values.to(self.dtype)
        for step in self.steps or ():
            values = step(values)
        return values


class Parameter(NamedTuple):
    """Of an engine's tensor: what fills it, or why only the loader does."""
    shape: tuple
    strides: tuple
    dtype: torch.dtype
    parts: list
    fills: list       # (offset, sizes, strides, value)
    reason: str       # "": in place
    sources: frozenset


def describe(recording, tensor, store):
    """The Parameter that a tensor is by the end of a recording; None: nothing was written into it."""
    book, origin = recording.book, tensor.storage_offset()
    place = Place(origin, tuple(tensor.shape), tuple(tensor.stride()))
    if not place.count:
        return None
    if tensor.dtype.itemsize != store.dtype.itemsize:
        return _left(tensor, "bytes seen as another dtype", {
            s for w in store.writes for s in book.sources_of(w.value)}, book) if store.writes else None
    pieces = store.read(place)
    if pieces is None:
        codes = store.codes(place)
        if codes is None:
            return _left(tensor, "pieces of too large a tensor", {
                s for w in store.writes for s in book.sources_of(w.value)}, book)
        pieces = [(place, Codes(codes))]
    else:
        pieces = [(place if p.found is None else inside(place, p.found, p.sizes), p.value)
                  for p in pieces]
    if not pieces:
        return None
    if tensor.dtype != store.dtype:
        pieces = [(at, _seen_as(book, value, tensor.dtype)) for at, value in pieces]
    if not store.target and sum(p.count for p, _ in pieces) < place.count:
        pieces.append((place, Computed("memory that load_weights has not written")))
    parts, fills, why, sources = [], [], "", set()
    for at, value in pieces:
        sources |= book.sources_of(value)
        for at, value in _plain(book, at, value):
            if isinstance(value, Fill):
                fills.append((at.offset - origin, at.sizes, at.strides, value.value))
                continue
            made = f"is computed: {value.how}" if isinstance(value, Computed) else \
                _parts(book, tensor, origin, at, value, parts)
            why = why or made
    if len(parts) > MOST_BOXES and not why:
        why = f"takes more than {MOST_BOXES} rectangles"
    if why:
        return _left(tensor, why, sources, book)
    if not parts and not fills:
        return None
    return Parameter(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, parts, fills, "",
                     frozenset(book.names[s] for s in sources))


def _seen_as(book, value, dtype):
    """The same bits, of memory that was written to as another dtype."""
    seen = value if isinstance(value, Computed) else book.map(value, lambda i: book.seen_as(i, dtype))
    return seen or Computed("bits of another dtype", frozenset(book.sources_of(value)))


def _left(tensor, why, sources, book):
    return Parameter(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, [], [], why,
                     frozenset(book.names[s] for s in sources))


def _plain(book, at, value):
    """Codes as rectangles, constants and the like."""
    if not isinstance(value, Codes):
        yield at, value
        return
    found = rectangles(book, value.array, MOST_BOXES)
    if found is None:
        yield at, Computed(f"it takes more than {MOST_BOXES} rectangles")
        return
    dense = contiguous(at.sizes)
    for part, code, strides in found:
        start, rest = [], part.offset
        for d in dense:
            start.append(rest // d)
            rest %= d
        here = Place(at.offset + sum(i * s for i, s in zip(start, at.strides)), part.sizes, at.strides)
        if code > 0:
            index = book.variant_of(code)
            yield here, Rect(index, code - book.base(index), strides)
        elif code < 0:
            yield here, book.value_of(code)


def _parts(book, tensor, origin, at, value, parts):
    """Adds a rectangle's parts; why not, else."""
    variant = book.variants[value.variant]
    name, shape, dtype = (of[variant.source] for of in (book.names, book.shapes, book.dtypes))
    if variant.bits is not None and variant.bits != tensor.dtype:
        return f"has bits of {name} as {variant.bits}"
    steps, seen = None, dtype if variant.bits is not None else tensor.dtype
    if variant.steps or variant.bits is None and variant.rounded not in (None, seen) or \
            seen != dtype and not _converts(dtype, seen):
        rounded = () if variant.rounded in (None, dtype) else (rounding(dtype, variant.rounded),)
        steps, seen = (*rounded, *variant.steps), dtype
    found = boxes(shape, Place(value.offset, at.sizes, value.strides), at.strides)
    if found is None:
        return f"has elements of {name} that are no rectangles"
    if len(shape) > _l.MAX_DIMS and steps is None:
        try:  # is it a rectangle in as few dimensions as the library has?
            for start, extent, offset, strides in found:
                folded_block(name, shape, start, extent, strides)
        except DrayError as refused:
            return f"has {refused}"
    for start, extent, offset, strides in found:
        parts.append(Part(name, start, extent, at.offset - origin + offset, strides, seen, steps))
    return ""


def _converts(before, after):
    """Does an update do that on its way?"""
    return before.is_floating_point and after.is_floating_point and min(before.itemsize, after.itemsize) > 1


class Recorded(Given):
    """An engine's tensors as its loader fills them, for Subscriber.

    in_place: {name of the engine's tensor: tensors of the checkpoint in it}. by_loader: {name: why}.
    load_tensors: those of the checkpoint that the loader is given in each update. blocks: Block of all
    that is in place. fill(): writes the constants (padding)."""

    def __init__(self, load, into, tensors, found, read):
        self._load, self._into = load, into
        self.tensors, self._found = tensors, found
        self.certified = False
        self._read = dict(read)  # {tensor of the checkpoint: why the loader needs it in any case}
        self._staged = {}
        self._before_steps = {}  # (engine's tensor, number of its part): memory that the update writes
        self._settle()

    def _settle(self):
        """What one tensor of the checkpoint cannot be at once: its dtype is one, in all its blocks."""
        while True:
            left = set(self._read).union(*(p.sources for p in self._found.values() if p.reason))
            dtypes = {name: self.tensors[name][1] for name in left}
            again = False
            for name, p in sorted(self._found.items(), key=lambda f: any(q.steps is not None for q in f[1].parts)):
                for i, part in enumerate(p.parts):
                    if part.dtype != dtypes.setdefault(part.name, part.dtype):
                        if part.steps is not None and exact(part.dtype, dtypes[part.name]):
                            p.parts[i] = part._replace(dtype=dtypes[part.name])
                            continue
                        self.leave(name, f"has {part.name} as {part.dtype}, others as "
                                         f"{dtypes[part.name]}", settle=False)
                        again = True
                        break
            if not again:
                self.load_tensors = sorted(left)
                return

    def leave(self, name, why, settle=True):
        """This tensor of the engine is its loader's to fill from now on."""
        self._found[name] = self._found[name]._replace(reason=why, parts=[], fills=[])
        if settle:
            self._settle()

    @property
    def in_place(self):
        return {n: sorted(p.sources) for n, p in self._found.items() if not p.reason}

    @property
    def by_loader(self):
        return {n: p.reason for n, p in self._found.items() if p.reason}

    @property
    def computed(self):
        return {n: ", ".join(map(str, part.steps)) for n, p in self._found.items() for part in p.parts[:1] if part.steps}

    @property
    def blocks(self):
        return [block for _, block in self._blocks()]

    def _now(self, name, tensors):
        """The engine's tensor of a name, as it was recorded."""
        p, tensor = self._found[name], tensors.get(name)
        if tensor is None:
            raise stale(name, "is no tensor of the engine any more: record it anew")
        if (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype) != (p.shape, p.strides, p.dtype):
            raise stale(name, f"was {p.dtype} {p.shape}, and is {tensor.dtype} {tuple(tensor.shape)}: "
                              "record it anew")
        return tensor.detach()

    def _filled(self, wanted):
        """(name, tensor now, what was found of it) where that is wanted, but for what is the memory of a tensor before
        it: a head that is tied."""
        now, seen = tensors_of(self._into), set()
        for name, p in self._found.items():
            if wanted(p):
                tensor = self._now(name, now)
                if place(tensor) not in seen:
                    seen.add(place(tensor))
                    yield name, tensor, p

    def _blocks(self):
        for name, tensor, p in self._filled(lambda p: p.parts):
            for i, part in enumerate(p.parts):
                view = part.view(tensor) if part.steps is None else self._held(name, i, part)
                yield part.name, Block(part.name, self.tensors[part.name][0], view, part.start)

    def _held(self, name, i, part):
        """Memory for what a tensor of the engine's is computed of."""
        held = self._before_steps.get((name, i))
        if held is None or (held.shape, held.dtype) != (part.extent, part.dtype):
            from ..host import empty
            held = self._before_steps[name, i] = empty(*part.extent, dtype=part.dtype)
        return held

    # ---- what Subscriber asks ----------------------------------------------------------------

    def pairs(self):
        from ..host import empty
        self._staged = {n: self._staged[n] if n in self._staged else
                        empty(*self.tensors[n][0], dtype=self.tensors[n][1]) for n in self.load_tensors}
        return [*self._blocks(), *((n, Block(n, tuple(t.shape), t)) for n, t in self._staged.items())]

    def places(self):
        now = tensors_of(self._into)
        return [(n, place(self._now(n, now))) for n, p in self._found.items() if p.parts] + \
            [(n, "staged") for n in self.load_tensors]

    def updated(self):
        """After an update of the blocks: constants, and what only the loader does."""
        self.fill()
        if self._staged:
            self._load((n, t.clone()) for n, t in self._staged.items())

    def fill(self):
        """What the blocks' bytes alone are not: constants, and what is computed of elements."""
        for name, tensor, p in self._filled(lambda p: p.fills or any(part.steps is not None for part in p.parts)):
            for i, part in enumerate(p.parts):
                if part.steps is not None:
                    part.view(tensor).copy_(part.made(self._held(name, i, part)))
            for offset, sizes, strides, value in p.fills:
                tensor.as_strided(sizes, strides, tensor.storage_offset() + offset).fill_(value)

    def certificate(self):
        return None if self.certified else self.certify()

    def certify(self, load=None):
        """A Certificate, of one load of the whole checkpoint. load: another way into the same loader."""
        from .certify import Certificate
        return Certificate(self, load)
