"""All tensors that a module has, by name, and what it was before a loader was recorded."""
from __future__ import annotations

import torch

_HELD = ("_parameters", "_buffers", "_modules")


def _of(value, name, depth=2):
    """Tensors in an attribute: it, or what lists and dicts of it hold."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)) and depth:
        for i, each in enumerate(value):
            yield from _of(each, f"{name}.{i}", depth - 1)
    elif isinstance(value, dict) and depth:
        for key, each in value.items():
            yield from _of(each, f"{name}.{key}", depth - 1)


def tensors_of(into):
    """{name: tensor}: parameters, buffers, and tensors that are attributes; of pairs or a mapping, those."""
    if not hasattr(into, "named_modules"):
        return dict(into.items() if hasattr(into, "items") else into)
    found = {}
    for path, module in into.named_modules():
        at = f"{path}." if path else ""
        for held in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, held).items():
                if tensor is not None:
                    found[at + name] = tensor
        for name, value in vars(module).items():
            if name not in _HELD:
                found.update((n, t) for n, t in _of(value, at + name) if n not in found)
    return found


def _copied(value):
    return type(value)(value) if type(value) in (dict, list) else value


class Snapshot:
    """What modules are made of. restore() makes it so again."""

    def __init__(self, into):
        self._modules = [(m, {k: v for k, v in vars(m).items()},
                          {k: dict(getattr(m, k)) for k in _HELD},
                          {k: _copied(v) for k, v in vars(m).items() if type(v) in (dict, list)})
                         for m in into.modules()] if hasattr(into, "modules") else []
        self._tensors = {}  # the object: its attributes and memory
        for tensor in tensors_of(into).values():
            self._tensors.setdefault(id(tensor), (tensor, dict(vars(tensor)), tensor.data))

    def restore(self):
        for module, attributes, held, containers in self._modules:
            for key in _HELD:
                inner = getattr(module, key)
                inner.clear()
                inner.update(held[key])
            vars(module).clear()
            vars(module).update(attributes)
            for key, before in containers.items():
                if key not in _HELD:
                    now = attributes[key]
                    now.clear()
                    (now.extend if isinstance(now, list) else now.update)(before)
        for tensor, attributes, data in self._tensors.values():
            vars(tensor).clear()
            vars(tensor).update(attributes)
            if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
                tensor.data = data
