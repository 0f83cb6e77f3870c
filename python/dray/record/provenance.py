"""Where the elements of a row of memory come from: rectangles of the checkpoint's tensors, constants,
what was computed; and, where rectangles do not compose, a number for each element that says the same."""
from __future__ import annotations

import bisect
from typing import Any, NamedTuple, Optional

import torch

from .rectangles import Place, apart, contiguous, inside, locate, merged, refined

MOST_CODES = 1 << 25  # elements that get a number each
MOST_STEPS = 8        # of elements that are computed
HERE = object()       # where in a step's arguments the tensor goes


class Step(NamedTuple):
    """A function of each element alone: one of torch's operators with its numbers. Run again, it makes the same."""
    function: Any
    arguments: tuple      # HERE for the tensor; else (type, number)
    keywords: tuple       # (name, (type, number))
    given: torch.dtype
    made: torch.dtype

    def __call__(self, tensor):
        tensor = tensor.to(self.given, copy=True)  # some write into what they are given
        return self.function(*(tensor if a is HERE else a[1] for a in self.arguments),
                             **{name: value for name, (_, value) in self.keywords}).to(self.made)

    def __str__(self):
        name = self.function._schema.name.split("::")[1].rstrip("_")
        if name == "to":
            return str(self.made).replace("torch.", "")
        numbers = ", ".join(repr(a[1]) for a in (*self.arguments[1:], *(v for _, v in self.keywords)) if a is not HERE)
        return f"{name}({numbers})" if numbers else name


class Variant(NamedTuple):
    """A tensor of the checkpoint as it is seen by now: rounded to a dtype on its way, its bits taken
    for those of another, computed element by element."""
    source: int
    rounded: Optional[torch.dtype] = None
    bits: Optional[torch.dtype] = None
    steps: tuple = ()


class Rect(NamedTuple):
    """Elements of a variant, from `offset` on with `strides`, a stride for each dimension of what
    they are in."""
    variant: int
    offset: int
    strides: tuple


class Fill(NamedTuple):
    value: Any


class Computed(NamedTuple):
    """What no layout says: how it was made, and of which tensors of the checkpoint."""
    how: str
    sources: frozenset = frozenset()


class Codes(NamedTuple):
    """A number for each element: 0, what was there before; above, a variant's element; below, an entry
    of the book."""
    array: torch.Tensor


class Piece(NamedTuple):
    """A part of a view: where in it, how large, and what is there."""
    found: Any
    sizes: tuple
    value: Any


def grid(offset, sizes, strides):
    at = torch.full((), offset, dtype=torch.int64)
    for n, s in zip(sizes, strides):
        at = at.unsqueeze(-1) + torch.arange(n) * s
    return at


def rounding(given, made):
    return Step(torch.ops.aten.to.dtype, (HERE, (torch.dtype, made)), (), given, made)


def exact(a, b):
    """Has dtype b every value of a?"""
    if a == b:
        return True
    if a.is_floating_point and a.itemsize == 1:  # quantised: means nothing without its scales
        return False
    return torch.promote_types(a, b) == b and a.is_floating_point == b.is_floating_point


class Book:
    """The checkpoint's tensors, their variants, and the numbers that codes are."""

    def __init__(self):
        self.names, self.shapes, self.dtypes, self.counts = [], [], [], []
        self.variants, self._index, self._bases = [], {}, []
        self._next, self._entries, self._entry = 1, [], {}

    def add(self, name, shape, dtype):
        self.names.append(name)
        self.shapes.append(tuple(shape))
        self.dtypes.append(dtype)
        self.counts.append(Place(0, tuple(shape), ()).count)
        return self.variant(Variant(len(self.names) - 1))

    def variant(self, variant):
        if variant not in self._index:
            self._index[variant] = len(self.variants)
            self.variants.append(variant)
            self._bases.append(self._next)
            self._next += max(1, self.counts[variant.source])
        return self._index[variant]

    def base(self, index):
        return self._bases[index]

    def variant_of(self, code):
        return bisect.bisect_right(self._bases, code) - 1

    def entry(self, value):
        """The number of a Fill or of something computed."""
        if value not in self._entry:
            self._entries.append(value)
            self._entry[value] = -len(self._entries)
        return self._entry[value]

    def value_of(self, code):
        return self._entries[-code - 1]

    def cast(self, index, before, after):
        """The variant that a cast makes of one; None: no layout says it."""
        variant = self.variants[index]
        if variant.bits is not None:
            return None
        if exact(now := self._now(variant), after):
            return index
        if variant.rounded is None and not variant.steps:
            return self.variant(variant._replace(rounded=after))
        return self.step(index, rounding(now, after))

    def _now(self, variant):
        """The dtype that has every value of it."""
        return variant.steps[-1].made if variant.steps else variant.rounded or self.dtypes[variant.source]

    def step(self, index, step):
        """The variant that a step makes of one; None: no layout says it."""
        variant = self.variants[index]
        if variant.bits is not None or len(variant.steps) == MOST_STEPS:
            return None
        return self.variant(variant._replace(steps=(*variant.steps, step)))

    def seen_as(self, index, dtype):
        """The variant of the same bits as another dtype's; None: no layout says it."""
        variant = self.variants[index]
        of = self.dtypes[variant.source]
        if variant.rounded is not None or variant.steps or of.itemsize != dtype.itemsize:
            return None
        return self.variant(variant._replace(bits=None if dtype == of else dtype))

    def sources_of(self, value):
        """Indices of the checkpoint's tensors that a value comes from."""
        if isinstance(value, Rect):
            return {self.variants[value.variant].source}
        if isinstance(value, Computed):
            return set(value.sources)
        if isinstance(value, Codes):
            return set().union(*(self._sources_of_code(c) for c in torch.unique(
                self._reduced(value.array)).tolist()))
        return set()

    def _reduced(self, codes):
        """Each variant's codes as that of its first element."""
        bases = torch.tensor(self._bases)
        at = torch.searchsorted(bases, codes.clamp(min=1).contiguous(), right=True) - 1
        return torch.where(codes > 0, bases[at], codes)

    def _sources_of_code(self, code):
        if code > 0:
            return {self.variants[self.variant_of(code)].source}
        return self.sources_of(self.value_of(code)) if code < 0 else set()

    def map(self, value, change, constant=None):
        """The value with its variants changed: change(index) is another index, None: not to be said.
        constant(number): the number that becomes of a constant; None: there may be none."""
        if isinstance(value, Rect):
            index = change(value.variant)
            return None if index is None else value._replace(variant=index)
        if isinstance(value, Fill):
            return None if constant is None else Fill(constant(value.value))
        codes = value.array.clone()
        for base in torch.unique(self._reduced(value.array)).tolist():
            if base <= 0:
                if base < 0 and isinstance(entry := self.value_of(base), Fill):
                    if constant is None:
                        return None
                    codes[value.array == base] = self.entry(Fill(constant(entry.value)))
                continue
            before = self.variant_of(base)
            index = change(before)
            if index is None:
                return None
            end = base + max(1, self.counts[self.variants[before].source])
            mine = (value.array >= base) & (value.array < end)
            codes[mine] += self._bases[index] - base
        return Codes(codes)


class Write(NamedTuple):
    place: Place
    value: Any


class Store:
    """A row of elements of one dtype, and what was written into it, in order. `own`: a tensor over what
    it held before (memory that was made while recording); None: an engine's, or nothing."""

    def __init__(self, book, count, dtype, own=None, target=False):
        self.book, self.count, self.dtype, self.own, self.target = book, count, dtype, own, target
        self.writes, self._codes, self._done = [], None, 0

    def write(self, place, value):
        if place.count:
            self.writes.append(self._merged(Write(place, value)))

    @staticmethod
    def _merged(write):
        place, value = write
        if isinstance(value, Codes):
            return write
        place, strides = merged(place, value.strides if isinstance(value, Rect) else None)
        return Write(place, value._replace(strides=strides) if isinstance(value, Rect) else value)

    def read(self, place):
        """Pieces of what is there; None: no rectangles say it."""
        here = []
        for write in reversed(self.writes):
            if apart(write.place, place):
                continue
            found = None if isinstance(write.value, Codes) else locate(write.place, place)
            if found is not None and not here:
                return [Piece(None, place.sizes, self._part(write, found, place))]
            here.append(write)
        if not here:
            return self._kept(place)
        return self._several(here, place)

    def _kept(self, place):
        if self.own is None:
            return []
        held = self.own.as_strided(place.sizes, place.strides, place.offset)
        if place.count and bool((held == held.flatten()[0]).all()):
            return [Piece(None, place.sizes, Fill(held.flatten()[0].item()))]
        return None

    @staticmethod
    def _part(write, found, place):
        if not isinstance(write.value, Rect):
            return write.value
        part = inside(Place(write.value.offset, write.place.sizes, write.value.strides), found, place.sizes)
        return write.value._replace(offset=part.offset, strides=part.strides)

    def _several(self, here, place):
        """Writes, the newest first, as pieces of a place that they all lie in."""
        taken, pieces = [], []
        for write in here:
            if isinstance(write.value, Codes):
                return None
            at, strides = refined(place, write.place, getattr(write.value, "strides", write.place.strides))
            found = locate(place, at)
            if found is None:
                return None
            taken.append(write.place)
            pieces.append(Piece(found, at.sizes, write.value._replace(strides=strides)
                                if isinstance(write.value, Rect) else write.value))
        taken = disjoint(taken)
        if taken is None:
            return None
        pieces = [pieces[i] for i in taken]
        left = place.count - sum(Place(0, p.sizes, ()).count for p in pieces)
        if left and self.own is not None:
            return None
        return pieces

    def codes(self, place):
        """A number for each element of a place; None: too many of them."""
        if self.count > MOST_CODES:
            return None
        if self._codes is None:
            self._codes = self._first_codes()
        for write in self.writes[self._done:]:
            there = self._codes.as_strided(write.place.sizes, write.place.strides, write.place.offset)
            there.copy_(self._codes_of(write.value, write.place.sizes))
        self._done = len(self.writes)
        return self._codes.as_strided(place.sizes, place.strides, place.offset)

    def _first_codes(self):
        if self.own is None:
            return torch.zeros(self.count, dtype=torch.int64)
        values, which = torch.unique(self.own.as_strided((self.count,), (1,), 0).double(),
                                     return_inverse=True)
        if len(values) > 1024:
            return torch.full((self.count,), self.book.entry(Computed("data of the loader's own")))
        return torch.tensor([self.book.entry(Fill(v)) for v in values.tolist()])[which.cpu()]

    def _codes_of(self, value, sizes):
        return codes_of(self.book, value, sizes)


def codes_of(book, value, sizes):
    if isinstance(value, Rect):
        return grid(value.offset + book.base(value.variant), sizes, value.strides)
    if isinstance(value, Codes):
        return value.array.expand(sizes)
    return torch.full((), book.entry(value), dtype=torch.int64).expand(sizes)


def disjoint(places):
    """Places, the newest first: the indices of those that are seen, where none is hidden in part;
    None: one is."""
    order = sorted(range(len(places)), key=lambda i: places[i].offset)
    hidden, open_ = set(), []
    for i in order:
        open_ = [j for j in open_ if places[j].last >= places[i].offset]
        for j in open_:
            if i in hidden or j in hidden or apart(places[i], places[j]):
                continue
            new, old = (i, j) if i < j else (j, i)
            if locate(places[new], places[old]) is None:
                return None
            hidden.add(old)
        open_.append(i)
    return [i for i in range(len(places)) if i not in hidden]


def rectangles(book, codes, most):
    """Codes as (place in the array, first code, strides) of rectangles; None: more than `most`."""
    made = []
    dense = contiguous(tuple(codes.shape))
    return made if _cover(book, codes, Place(0, tuple(codes.shape), dense), made, most) else None


def _affine(book, codes):
    """Strides, if the codes are a rectangle's of one tensor (or one entry's)."""
    first = codes.flatten()[0]
    strides = tuple(int(codes.select(d, 1).flatten()[0] - first) if n > 1 else 0
                    for d, n in enumerate(codes.shape))
    if any(s < 0 for s in strides) or (first <= 0 and any(strides)):
        return None
    last = int(codes.flatten()[-1])
    if first > 0 and (last <= 0 or book.variant_of(int(first)) != book.variant_of(last)):
        return None
    return strides if torch.equal(codes, grid(int(first), codes.shape, strides)) else None


def _cover(book, codes, place, made, most):
    if not codes.numel():
        return True
    if len(made) >= most:
        return False
    strides = _affine(book, codes)
    if strides is not None:
        made.append((place, int(codes.flatten()[0]), strides))
        return True
    cuts = {d: _runs(codes, d) for d, n in enumerate(codes.shape) if n > 1}
    broken = [d for d in cuts if len(cuts[d]) > 1]
    d = min(broken or cuts, key=lambda d: len(cuts[d]))
    runs = cuts[d] if broken else [(i, i + 1) for i in range(codes.shape[d])]
    if len(runs) + len(made) > most:
        return False
    for at, end in runs:
        part = Place(place.offset + at * place.strides[d],
                     place.sizes[:d] + (end - at,) + place.sizes[d + 1:], place.strides)
        if not _cover(book, codes.narrow(d, at, end - at), part, made, most):
            return False
    return True


def _runs(codes, d):
    """(first, end) of lines along a dimension that go on as they began."""
    lines = codes.movedim(d, 0).reshape(codes.shape[d], -1)
    step = lines[1:] - lines[:-1]
    same = (step[1:] == step[:-1]).all(1).tolist()
    runs, at, n = [], 0, codes.shape[d]
    while at < n:
        end = min(at + 2, n)
        while end < n and same[end - 2]:
            end += 1
        runs.append((at, end))
        at = end
    return runs
