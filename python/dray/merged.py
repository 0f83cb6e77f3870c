"""A model with adapters (PEFT's LoRA) as its plain checkpoint: each publish computes the merged weights of what adapters change, of
this rank's part, into memory of their own; the model and its adapters stay what they are."""
from __future__ import annotations

import collections
from typing import Any

import torch

from ._declared import EUNSUPPORTED
from ._library import DrayError
from .parameters import Given, clean, local

_PREFIX = "base_model.model."


def _refuse(path, found):
    raise DrayError(EUNSUPPORTED, f"{path}: a plain LoRA of a linear layer expected, found {', '.join(found)}")


def _variant(module, adapter):
    """The name of what PEFT computes in LoRA's place, such as aLoRA, which is for some tokens; "" of plain LoRA."""
    variant = getattr(module, "lora_variant", {}).get(adapter)
    return getattr(variant, "__name__", type(variant).__name__) if variant is not None else ""


class _Target:
    """A weight that an adapter changes."""

    def __init__(self, path, module, adapter):
        self._path, self._module, self._adapter, self._memory = path, module, adapter, None

    def check(self):
        """Before each publish: merge_adapter() puts the adapter into the base's weight, unmerge_adapter() takes it out."""
        if getattr(self._module, "merged", False):
            _refuse(self._path, ["merged weights"])

    def weight(self):
        return self._module.base_layer.weight

    def published(self):
        """The weight as it is to be read, cut as the base's is."""
        weight = self.weight()
        here, mesh, placements = local(weight)
        known, wanted = self._memory, (here.shape, here.dtype, here.device)
        if known is None or (known.shape, known.dtype, known.device) != wanted:
            from .host import empty
            self._memory = torch.empty_like(here) if here.is_cuda else empty(*here.shape, dtype=here.dtype)
        if mesh is None:
            return self._memory
        from torch.distributed.tensor import DTensor
        return DTensor.from_local(self._memory, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())

    @torch.no_grad()
    def compute(self):
        """W + scaling · B A, as PEFT's merge() does. Of sharded adapters the adapters alone are gathered."""
        weight = self.weight()
        here, mesh, placements = local(weight)
        a, b = (each.full_tensor() if hasattr(each, "full_tensor") else each
                for each in (self._module.lora_A[self._adapter].weight, self._module.lora_B[self._adapter].weight))
        start = (0, 0)
        if mesh is not None:
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
            _, start = compute_local_shape_and_global_offset(weight.shape, mesh, placements)
        rows, columns = here.shape
        delta = (b[start[0]:start[0] + rows] @ a[:, start[1]:start[1] + columns]) * self._module.scaling[self._adapter]
        self._memory.copy_(here + delta)


class Merged(Given):
    computes = True

    def __init__(self, model, adapter="default"):
        self._model, self._targets = model, {}
        for path, module in model.named_modules():
            if not hasattr(module, "lora_A") or not hasattr(module, "base_layer"):
                continue
            if adapter not in module.lora_A:
                if adapter in getattr(module, "lora_embedding_A", {}):
                    raise DrayError(EUNSUPPORTED, f"{path}: an adapter of an embedding is not merged")
                continue
            wrong = [what for what, is_so in (
                ("DoRA", getattr(module, "use_dora", {}).get(adapter)), ("bias", getattr(module, "lora_bias", {}).get(adapter)),
                (_variant(module, adapter), _variant(module, adapter)),
                ("fan_in_fan_out", getattr(module, "fan_in_fan_out", False)), ("merged weights", getattr(module, "merged", False)),
                (f"a weight of {module.base_layer.weight.dim()} dimensions", module.base_layer.weight.dim() != 2)) if is_so]
            if wrong:
                _refuse(path, wrong)
            [(name, _)] = clean([(f"{path}.base_layer.weight", None)])  # as in pairs(), also within what wraps modules
            self._targets[name] = _Target(path, module, adapter)
        if not self._targets:
            raise ValueError(f"merged: a module with adapter {adapter} expected, found none in {type(model).__name__}")

    def pairs(self):
        found, left = [], dict(self._targets)
        named = list(self._model.named_parameters(remove_duplicate=False))
        names = collections.Counter(id(parameter) for _, parameter in named)
        for name, parameter in clean(named):
            if name in left and names[id(parameter)] > 1:  # it would change the other, too
                raise DrayError(EUNSUPPORTED, f"{name}: a weight of its own expected, found one that another name has, too")
        for name, parameter in clean(self._model.named_parameters()):
            if ".lora_" in name:
                continue
            if ".modules_to_save." in name:
                raise DrayError(EUNSUPPORTED, f"{name}: modules_to_save are not merged")
            target = left.pop(name, None)
            name = name.removeprefix(_PREFIX).replace(".base_layer.", ".")
            found.append((name, target.published() if target else parameter))
        for name in left:  # else the adapter would be lost
            raise DrayError(EUNSUPPORTED, f"{name}: a parameter of the model expected, found none")
        return found

    def refresh(self, tensors=None):
        for target in self._targets.values():
            target.check()
        for target in self._targets.values():
            target.compute()


def merged(model: Any, adapter: str = "default") -> Merged:
    """What dray.Publisher takes, of a module with PEFT's LoRA: the plain checkpoint's names, W + scaling · B A where the
    adapter changes a weight, computed by each publish of this rank's part (so a second copy of those weights, and nothing
    of the model is gathered); all else where it lies. DrayError (EUNSUPPORTED): DoRA, biases, embeddings and others that this
    does not compute."""
    return Merged(model, adapter)
