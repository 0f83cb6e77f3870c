"""Operators that torch does not have, tried: run alone on copies of their arguments that hold the digits of
each element's number. One that only moves elements gives all digits back, in their new places; whether it
does is then seen by other values."""
from __future__ import annotations

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

DIGITS, BITS = 6, 7   # 42 bits of a number; 127 is a whole number in every dtype that is tried
MOST = 1 << 22        # elements of an argument
SIZES = (1e-3, 1, 300)


def _tried(recording, tensor):
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1 or \
        recording.store_of(tensor) is not None


def probe(recording, function, arguments, keywords, into):
    """Codes of what it writes (into), or (codes, dtype) of what it returns; None: it does not only move."""
    flat, spec = tree_flatten((arguments, keywords))
    codes = {}
    for i, a in enumerate(flat):
        if isinstance(a, torch.Tensor) and _tried(recording, a):
            if a.numel() > MOST or a.dtype.itemsize == 1 and a.dtype.is_floating_point:
                return None
            codes[i] = recording.codes(a)
    dtypes = list({flat[i].dtype for i in codes})
    if len(dtypes) != 1:
        return None
    shift = 1 + max((-int(c.min()) for c in codes.values() if c.numel()), default=0)
    written = [i for i, a in enumerate(flat) if any(a is t for t in into)]

    def run(values):
        tried = list(flat)
        for i, a in enumerate(flat):
            if i in codes:
                tried[i] = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype)
                tried[i].copy_(values(codes[i] + shift))
            elif isinstance(a, torch.Tensor):
                tried[i] = a.detach().clone()
        arguments, keywords = tree_unflatten(tried, spec)
        out = function(*arguments, **keywords)
        made = [tried[i] for i in written] if into else \
            [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        return [(t.to(torch.float64), t.dtype) for t in made]

    try:
        found = None
        for digit in range(DIGITS):
            out = [t for t, _ in run(lambda c: (c >> (BITS * digit)) & (2**BITS - 1))]
            if any(not torch.isfinite(t).all() or (t != t.round()).any() or (t < 0).any() or
                   (t >= 2**BITS).any() for t in out):
                return None
            out = [t.long() << (BITS * digit) for t in out]
            found = out if found is None else [a + b for a, b in zip(found, out)]
        for size in SIZES:
            mixed = run(lambda c: _value(c, size))
            if not all(torch.equal(t, _value(c, size).to(dtypes[0]).double())
                       for (t, _), c in zip(mixed, found)):
                return None
    except Exception:  # it does not take such values: nothing is known of it
        return None
    known = torch.unique(torch.cat([c.flatten() for c in codes.values()])) + shift
    if not all(torch.isin(c, known).all() for c in found):
        return None
    if not found:
        return None
    return [c - shift for c in found] if into else \
        [(c - shift, dtype) for c, (_, dtype) in zip(found, mixed)]


def _value(codes, size):
    """A number of about that size, below and above 0, which says little of the order."""
    return (((codes * 2654435761) >> 7) % 1009 - 504) * (size / 300)
