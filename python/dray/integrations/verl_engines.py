"""verl's training engines, which hand over their shards as they lie where backend "dray" asks for weights, and do all
else as they did: chosen by VERL_ENGINE_VENDOR=dray."""
from __future__ import annotations

import os

from verl.utils.fsdp_utils import fsdp_version
from verl.utils.model import convert_weight_keys
from verl.workers import engine as _engines

from .. import weights as _w
from ..parameters import given
from .verl import Shards, sending

VENDOR = "dray"
_PACKED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")  # experts that transformers packs into one parameter


def fsdp_shards(module, config) -> Shards:
    """Of FSDP1's or FSDP2's module, under the names that verl's own export gives. config: its folder."""
    inner = getattr(module, "_fsdp_wrapped_module", module)
    pairs = given(module, buffers=True).pairs() if fsdp_version(module) == 1 else module.state_dict().items()
    found = convert_weight_keys(dict(pairs), inner)
    return Shards(found.items(), config=config if any(name.endswith(_PACKED) for name in found) else None)


class FSDPShards:
    """What DrayFSDPEngine has beside verl's FSDPEngineWithLMHead."""

    def get_per_tensor_param(self, *arguments, **options):
        adapters = hasattr(getattr(self.module, "_fsdp_wrapped_module", self.module), "peft_config")
        if arguments or options or adapters or self._qat_enabled or not sending():
            return super().get_per_tensor_param(*arguments, **options)
        return fsdp_shards(self.module, self.model_config.local_path), None


class MegatronShards:
    """What DrayMegatronEngine has beside verl's MegatronEngineWithLMHead."""

    def get_per_tensor_param(self, *arguments, **options):
        if arguments or options or self.peft_cls is not None or self._qat_enabled or not sending():
            return super().get_per_tensor_param(*arguments, **options)
        config = self.model_config.local_path
        if self.is_param_offload_enabled:
            self.to("cuda", model=True, optimizer=False, grad=False)
        return Shards(_w.megatron(list(self.module), config).pairs(), tensors=_w.tensors(config)), None


_CLASSES = [("FSDPEngineWithLMHead", FSDPShards, "DrayFSDPEngine", ["fsdp", "fsdp2"]),
            ("MegatronEngineWithLMHead", MegatronShards, "DrayMegatronEngine", ["megatron"])]


def register() -> None:
    """Of those that this verl could import."""
    for base, shards, name, backends in _CLASSES:
        base = getattr(_engines, base, None)
        if base is not None:
            made = type(name, (shards, base), {"__module__": __name__, "__doc__": shards.__doc__})
            _engines.EngineRegistry.register("language_model", backends, device="cuda", vendor=VENDOR)(made)
            globals()[name] = made
