"""A worker of vLLM as a rank of one of dray's engines."""
from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .vllm import UPSTREAM

UPSTREAM.check()

from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _layerwise_process, finalize_layerwise_processing, get_layerwise_info, is_deferred_attention_layer)
from vllm.model_executor.model_loader.reload.meta import materialize_layer

from .rank import Handshake, Rank

_log = logging.getLogger("vllm.dray")
_DONE, _AGAIN, _FAILED = range(3)  # what became of an update, the worst last


@dataclass
class DrayInitInfo(Handshake, WeightTransferInitInfo):
    """What the trainer tells the workers once. draft: it is the draft model's trainer."""
    draft: bool = False


@dataclass
class DrayUpdateInfo(WeightTransferUpdateInfo):
    """version: that the worker is to hold afterwards, exactly; newer: or one behind it, if that is what there is."""
    version: int
    newer: bool = False


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


def pack_again(model, device) -> None:
    """What vLLM 0.32.0 does on CPUs when it first loads a model, and leaves out when it reloads it: it packs experts, and
    heads whose weight is the embedding's, which are given nothing to load."""
    if device.type != "cpu":
        return
    shared = {module.weight.data_ptr() for module in model.modules() if type(module).__name__ == "VocabParallelEmbedding"}
    for module in model.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if "RoutedExperts" in kinds:
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)
        elif "ParallelLMHead" in kinds and module.weight.data_ptr() in shared:
            module.quant_method.process_weights_after_loading(module)


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


class PastLoaders(RuntimeError):
    """A reload that is to be done once more."""


class Reload:
    """vLLM's layerwise reload of a model, to which all tensors of the checkpoint are given, so many, or some of recorded
    ones. It waits for the parameters' own loaders, and what load_weights writes past them is lost without a word (vLLM
    0.32.0's gpt-oss: experts, sinks): a reload that finds such modules raises PastLoaders, and from then on they have
    memory to be written to. recorded: the recording, once there is one."""

    def __init__(self, model, config, device, count):
        self._model, self._config, self._device, self._count = model, config, device, count
        self._given, self._past, self.recorded = set(), {}, None

    def load_weights(self, named) -> None:
        """The model's own, of a part of the checkpoint."""
        def noted():
            for name, tensor in named:
                self._given.add(name)
                yield name, tensor

        with disable_mtp_completeness_check():
            self._model.load_weights(noted())

    def begin(self) -> None:
        self._given = set()
        initialize_layerwise_reload(self._model)
        for module in self._past.values():
            materialize_layer(module, get_layerwise_info(module))

    def end(self) -> None:
        whole = len(self._given) == self._count
        found = self._missed() if whole else {}
        for path, module in self._past.items():
            if whole or any(self._given.intersection(self.recorded._found[name].sources) for name in
                            (f"{path}.{n}" for n in module._parameters) if name in self.recorded._found):
                _layerwise_process(module, get_layerwise_info(module))
        finalize_layerwise_processing(self._model, self._config)
        pack_again(self._model, self._device)
        if found:
            self._past.update(found)
            raise PastLoaders(f"vLLM's reload has lost what load_weights wrote into {', '.join(found)}")

    def _missed(self) -> dict:
        """{path: module} of those that have parameters of their own, none of which came to its loader."""
        infos = {path: (module, get_layerwise_info(module)) for path, module in self._model.named_modules()}
        loaded = {p.data_ptr() for module, info in infos.values() if not info.can_load() for p in module._parameters.values()
                  if p is not None}
        return {path: module for path, (module, info) in infos.items()
                if info.can_load() and info.load_numel <= 0 and path not in self._past and not is_deferred_attention_layer(module)
                and any(p.data_ptr() not in loaded for p in (info.kernel_tensors or ({},))[0].values())}


class Reports:
    """--worker-extension-cls, for those that speak to a server: what the last update was, by /collective_rpc."""

    def dray_report(self) -> dict:
        return self.weight_transfer_engine.report


class DrayEngine(WeightTransferEngine[DrayInitInfo, DrayUpdateInfo]):
    """Backend "dray". The draft model, where vLLM has one, is a group of its own. report: of the last update of the model
    itself; left: why tensors go by load_weights, by their names ("": all)."""
    init_info_cls = DrayInitInfo
    update_info_cls = DrayUpdateInfo
    supports_draft_weight_update = True

    def __init__(self, config, vllm_config, device, model) -> None:
        super().__init__(config, vllm_config, device, model)
        self._rank = self._draft = self._draft_told = None

    report = property(lambda self: self._rank and self._rank.report)
    left = property(lambda self: self._rank.left if self._rank else {})

    # ---- the handshake -----------------------------------------------------------------------

    def init_transfer_engine(self, init_info: DrayInitInfo) -> None:
        if init_info.draft:  # vLLM shows the draft model when its first update begins
            self._close("_draft")
            self._draft_told = init_info
        else:
            self._close("_rank")
            self._rank = self._joined(init_info, self.model, self.model_config, "")

    def _joined(self, told, model, config, suffix):
        """This worker as a rank of the group that takes the model's weights."""
        parallel = self.parallel_config
        group = told.group or f"vllm-{self.vllm_config.instance_id}{suffix}"
        if parallel.data_parallel_size > 1:
            group = f"{group}-dp{parallel.data_parallel_index}"

        reload = Reload(model, config, self.device, len(told.tensors))
        rank = Rank(told, model, reload.load_weights, framework="vLLM", log=_log, group=group, rank=parallel.rank,
                    world=parallel.world_size, why_not=kept_elsewhere(model), begin=reload.begin, end=reload.end,
                    within=lambda: set_current_vllm_config(self.vllm_config), settle=whole_modules)
        reload.recorded = rank._recorded
        return rank

    # ---- an update ---------------------------------------------------------------------------

    def _is_draft(self):
        return self.model is not self._default_model

    def start_weight_update(self) -> None:
        """Nothing but a draft's first handshake: vLLM's reload begins with the first bytes, so that a trainer that is late
        or gone costs nothing."""
        if self._is_draft() and self._draft is None and self._draft_told is not None:
            self._draft = self._joined(self._draft_told, self.model, self.model_config, "-draft")

    def receive_weights(self, update_info: DrayUpdateInfo) -> None:
        rank = self._draft if self._is_draft() else self._rank
        if rank is None:
            what = "with draft=True " if self._is_draft() else ""
            raise RuntimeError(f'weight transfer backend "dray": init_weight_transfer_engine is to be called {what}first')
        outcome, failure = _DONE, None
        try:
            rank.update(update_info.version, update_info.newer)
        except PastLoaders as found:
            outcome, failure = _AGAIN, found
        except Exception as found:
            outcome, failure = _FAILED, found
        if self._worst_of_stages(outcome) == _AGAIN:
            _log.info("dray: %s: once more, with memory for these", failure or "another stage has lost weights")
            rank.update(update_info.version, update_info.newer)
        elif failure is not None:
            raise failure

    def _worst_of_stages(self, outcome):
        """What became of the update on any pipeline stage: each has other modules, and all of them update, or none."""
        if self.parallel_config.pipeline_parallel_size == 1:
            return outcome
        worst = torch.tensor([outcome])
        dist.all_reduce(worst, dist.ReduceOp.MAX, group=get_pp_group().cpu_group)
        return int(worst)

    def finish_weight_update(self) -> None:
        """Nothing is left to do: an update is whole, or raised."""

    def shutdown(self) -> None:
        self._close("_rank")
        self._close("_draft")

    def _close(self, which) -> None:
        rank = getattr(self, which)
        setattr(self, which, None)
        if rank is not None:
            rank.close()
