"""The arithmetic of places: a place is (offset, sizes, strides) in a row of elements, as torch's
as_strided takes them. No data, no torch."""
from __future__ import annotations

import math
from typing import NamedTuple, Optional

MOST_BOXES = 4096  # of one place: what needs more is no layout


class Place(NamedTuple):
    offset: int
    sizes: tuple
    strides: tuple

    @property
    def count(self):
        return math.prod(self.sizes)

    @property
    def last(self):
        return self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides))


class Found(NamedTuple):
    """Where an inner place lies in an outer one: its first element's coordinates there, and for each
    of its dimensions the outer one that it runs along, and by how much (None, 0: it stands still)."""
    start: tuple
    along: tuple


def contiguous(sizes):
    strides, step = [], 1
    for n in reversed(sizes):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _loops(place):
    """Its dimensions that move, the longest stride first; None where they are no mixed radix."""
    moving = sorted((d for d, n in enumerate(place.sizes) if n > 1), key=lambda d: -place.strides[d])
    reach = 0
    for d in reversed(moving):
        if place.strides[d] <= reach:
            return None
        reach += (place.sizes[d] - 1) * place.strides[d]
    return moving


def locate(outer: Place, inner: Place) -> Optional[Found]:
    """Of an inner place that lies in the outer one as a rectangle; None: it does not."""
    loops = _loops(outer)
    if loops is None:
        return None
    start, rest = [0] * len(outer.sizes), inner.offset - outer.offset
    if rest < 0:
        return None
    for d in loops:
        start[d] = min(rest // outer.strides[d], outer.sizes[d] - 1)
        rest -= start[d] * outer.strides[d]
    if rest:
        return None
    reach, along = list(start), []
    for n, stride in zip(inner.sizes, inner.strides):
        if n == 1 or stride == 0:
            along.append((None, 0))
            continue
        d = next((d for d in loops if stride % outer.strides[d] == 0), None)
        if d is None:
            return None
        step = stride // outer.strides[d]
        reach[d] += step * (n - 1)
        if reach[d] >= outer.sizes[d]:
            return None
        along.append((d, step))
    return Found(tuple(start), tuple(along))


def refined(outer: Place, inner: Place, other):
    """The inner place, and strides that go with it, with dimensions that run over the end of an outer one
    cut into turns of that."""
    loops = _loops(outer)
    if loops is None:
        return inner, other
    made, left = [], list(zip(inner.sizes, inner.strides, other))
    while left:
        n, s, o = left.pop()
        d = next((d for d in loops if s and s % outer.strides[d] == 0), None)
        if d is not None and n > 1:
            step = s // outer.strides[d]
            turn, rest = divmod(outer.sizes[d], step)
            if not rest and 1 < turn < n and n % turn == 0:
                left.append((n // turn, s * turn, o * turn))
                n = turn
        made.append((n, s, o))
    made.reverse()
    return Place(inner.offset, tuple(m[0] for m in made), tuple(m[1] for m in made)), \
        tuple(m[2] for m in made)


def inside(place: Place, found: Found, sizes) -> Place:
    """What `found` says, of sizes, as a place of the row that `place` lies in."""
    return Place(place.offset + sum(i * s for i, s in zip(found.start, place.strides)), tuple(sizes),
                 tuple(0 if d is None else step * place.strides[d] for d, step in found.along))


def merged(place: Place, other: Optional[tuple] = None):
    """The same elements in as few dimensions as can be; `other`: strides that go with them."""
    other = place.strides if other is None else other
    loops = [[n, s, o] for n, s, o in zip(place.sizes, place.strides, other) if n != 1]
    loops.sort(key=lambda loop: -loop[1])
    made = []
    for n, s, o in loops:
        if made and made[-1][1] == n * s and made[-1][2] == n * o:
            made[-1] = [made[-1][0] * n, s, o]
        else:
            made.append([n, s, o])
    return (Place(place.offset, tuple(m[0] for m in made), tuple(m[1] for m in made)),
            tuple(m[2] for m in made))


def apart(a: Place, b: Place) -> bool:
    """Do they share no element, as far as is easily seen?"""
    if a.last < b.offset or b.last < a.offset:
        return True
    step = math.gcd(*(s for p in (a, b) for n, s in zip(p.sizes, p.strides) if n > 1), 0)
    if step and (a.offset - b.offset) % step:
        return True
    # Both as rectangles of rows of the longest stride that they have in common.
    common = {s for p in (a, b) for n, s in zip(p.sizes, p.strides) if n > 1 and s}
    for width in common:
        spans = []
        for p in (a, b):
            inner = sum((n - 1) * s for n, s in zip(p.sizes, p.strides) if s % width)
            at = p.offset % width
            spans.append((at, at + inner) if at + inner < width else None)
        if None not in spans and (spans[0][1] < spans[1][0] or spans[1][1] < spans[0][0]):
            return True
    return False


def boxes(shape, source: Place, strides):
    """A place in a dense tensor of `shape`, as rectangles of it: (start, extent, offset, strides) of
    each, where offset and strides are of the memory that goes with it (strides: that memory's, along
    source's dimensions). None: not to be had in MOST_BOXES."""
    dense = contiguous(shape)
    loops = [[n, s, m] for n, s, m in zip(source.sizes, source.strides, strides) if n > 1]
    start, rest = [], source.offset
    for d in dense:
        start.append(rest // d)
        rest %= d
    split = _split(loops, shape, dense, start)
    if split is None:
        return None
    found = [(tuple(start), 0)]
    inner = {}  # dimension of the tensor: (extent, stride in memory)
    for n, d, step, m in sorted(split, key=lambda loop: (loop[2] if loop[1] is not None else 0)):
        size, stride = inner.get(d, (1, 0))
        if d is not None and step == size and (size == 1 or m == stride * size):
            inner[d] = size * n, m if size == 1 else stride
            continue
        if len(found) * n > MOST_BOXES:
            return None
        found = [(tuple(x + (i * step if k == d else 0) for k, x in enumerate(at)), offset + i * m)
                 for at, offset in found for i in range(n)]
    extent = tuple(inner.get(d, (1, 0))[0] for d in range(len(shape)))
    steps = tuple(inner.get(d, (1, 0))[1] for d in range(len(shape)))
    return [(at, extent, offset, steps) for at, offset in found]


def _split(loops, shape, dense, start):
    """Loops over elements of a dense tensor as loops each along one dimension of it:
    (count, dimension, step, stride in memory)."""
    made = []
    for n, s, m in loops:
        if s == 0:
            made.append((n, None, 0, m))
            continue
        d = next(d for d in range(len(shape)) if s % dense[d] == 0 and shape[d] > 1 or dense[d] == 1)
        step = s // dense[d]
        made.append([n, d, step, m])
    done = []
    while made:
        n, d, step, m = made.pop()
        if d is None:
            done.append((n, d, step, m))
            continue
        reach = start[d] + sum((k - 1) * t for k, e, t, _ in made + done if e == d) + (n - 1) * step
        if reach < shape[d]:
            done.append((n, d, step, m))
            continue
        # It runs over the end of the dimension: whole turns of it, if it begins at its start.
        if shape[d] % step or start[d] >= step:
            return None
        turn = shape[d] // step
        if d == 0 or n % turn or turn == 1:
            return None
        done.append((turn, d, step, m))
        outer = d - 1
        while outer > 0 and shape[outer] == 1:
            outer -= 1
        made.append((n // turn, outer, 1, m * turn))
    # Each dimension's reach once more, now that all loops are there.
    for d in range(len(shape)):
        if start[d] + sum((n - 1) * t for n, e, t, _ in done if e == d) >= shape[d]:
            return None
    return done
