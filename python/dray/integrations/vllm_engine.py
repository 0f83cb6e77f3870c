"""A worker of vLLM as a rank of one of dray's engines."""
from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from .vllm import UPSTREAM

UPSTREAM.check()

from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_processing, get_layerwise_info)

from .rank import Handshake, Rank

_log = logging.getLogger("vllm.dray")


@dataclass
class DrayInitInfo(Handshake, WeightTransferInitInfo):
    """What the trainer tells the workers once."""


@dataclass
class DrayUpdateInfo(WeightTransferUpdateInfo):
    """version: that the worker is to hold afterwards, exactly."""
    version: int


def kept_elsewhere(model) -> str:
    """Which module's weights vLLM keeps in a form of its own, so that nothing written into its parameters would be
    seen: they have other shapes than load_weights fills, or a function of the module holds a copy. "": none does."""
    for path, module in model.named_modules():
        parameters, _ = get_layerwise_info(module).restore_metadata
        for name, wanted in parameters.items():
            now = module._parameters.get(name)
            if now is None or now.shape != wanted.shape or now.dtype != wanted.dtype:
                return f"{path}.{name} is {'gone' if now is None else f'{now.dtype} {tuple(now.shape)}'} after loading"
        for name, value in vars(module).items():
            for cell in getattr(value, "__closure__", None) or ():
                held = cell.cell_contents
                if isinstance(held, torch.Tensor) or type(held).__module__.startswith("vllm._custom_ops"):
                    return f"{path}.{name} holds a copy"
    return ""


def pack_experts(model, device) -> None:
    """What vLLM 0.32.0 does on CPUs when it first loads experts, and leaves out when it reloads them."""
    if device.type == "cpu":
        for module in model.modules():
            if type(module).__name__ == "RoutedExperts":
                module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def whole_modules(recorded) -> None:
    """vLLM reloads whole layers: what has one tensor that is its loader's is left to it, and so on with all that the
    loader is then given."""
    left = None
    while left != (left := set(recorded.by_loader)):
        modules = {name.rpartition(".")[0] for name in left}
        given = set(recorded.load_tensors)
        for name, sources in recorded.in_place.items():
            if name.rpartition(".")[0] in modules:
                recorded.leave(name, "another tensor of its module is left to the loader")
            elif given.intersection(sources):
                recorded.leave(name, f"the loader is given {min(given.intersection(sources))} for another module")


class DrayEngine(WeightTransferEngine[DrayInitInfo, DrayUpdateInfo]):
    """Backend "dray". report: of the last update; left: why tensors go by load_weights, by their names ("": all)."""
    init_info_cls = DrayInitInfo
    update_info_cls = DrayUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config, vllm_config, device, model) -> None:
        super().__init__(config, vllm_config, device, model)
        self._rank = None

    report = property(lambda self: self._rank and self._rank.report)
    left = property(lambda self: self._rank.left if self._rank else {})

    # ---- the handshake -----------------------------------------------------------------------

    def init_transfer_engine(self, init_info: DrayInitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        group = init_info.group or f"vllm-{self.vllm_config.instance_id}"
        if parallel.data_parallel_size > 1:
            group = f"{group}-dp{parallel.data_parallel_index}"
        self._rank = Rank(init_info, self.model, self.load_weights, framework="vLLM", log=_log, group=group,
                          rank=parallel.rank, world=parallel.world_size, why_not=kept_elsewhere(self.model),
                          begin=lambda: initialize_layerwise_reload(self.model), end=self._reloaded,
                          within=lambda: set_current_vllm_config(self.vllm_config), settle=whole_modules)

    def load_weights(self, named):
        """The model's own, of a part of the checkpoint."""
        with disable_mtp_completeness_check():
            self.model.load_weights(named)

    def _reloaded(self):
        finalize_layerwise_processing(self.model, self.model_config)
        pack_experts(self.model, self.device)

    # ---- an update ---------------------------------------------------------------------------

    def start_weight_update(self) -> None:
        """Nothing: vLLM's reload begins with the first bytes, so that a trainer that is late or gone costs nothing."""

    def receive_weights(self, update_info: DrayUpdateInfo) -> None:
        if self._rank is None:
            raise RuntimeError('weight transfer backend "dray": init_weight_transfer_engine is to be called first')
        self._rank.update(update_info.version)

    def finish_weight_update(self) -> None:
        """Nothing is left to do: an update is whole, or raised."""

    def shutdown(self) -> None:
        rank, self._rank = self._rank, None
        if rank is not None:
            rank.close()
