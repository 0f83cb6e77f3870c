"""Tensors without data, which know what would be in them: what a loader is given, and what it makes
of them. A wrapper subclass: torch asks it in any thread, and it has no memory that could be read."""
from __future__ import annotations

import torch

from .rectangles import Place


class NotRecorded(RuntimeError):
    """What a loader did that no recording follows. `source`: the checkpoint's tensor that it did it to."""

    def __init__(self, message, sources=()):
        super().__init__(message)
        self.sources = frozenset(sources)


class Recorded(torch.Tensor):
    """A view of a Store. `shadow`: a meta tensor of its shape, strides and offset."""
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, recording, store, shadow, device):
        made = torch.Tensor._make_wrapper_subclass(
            cls, shadow.shape, strides=shadow.stride(), storage_offset=shadow.storage_offset(),
            dtype=shadow.dtype, device=device)
        made.recording, made.store, made.shadow = recording, store, shadow
        return made

    def __repr__(self, **_):
        return f"Recorded({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        mine = next(a for a in tensors_among(arguments, keywords or {}) if isinstance(a, Recorded))
        return mine.recording.run(function, arguments, keywords or {})

    def __reduce_ex__(self, protocol):
        raise NotRecorded("load_weights pickles or deep-copies a tensor")


def tensors_among(arguments, keywords):
    """Tensors in an operator's arguments, which may be in lists."""
    found = []
    for value in (*arguments, *keywords.values()) if keywords else arguments:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [v for v in value if isinstance(v, torch.Tensor)]
    return found


def place_of(tensor):
    return Place(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
