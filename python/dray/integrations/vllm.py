"""vLLM's weight transfer by dray: backend "dray" of its factories, which its processes find by the entry point
`vllm.general_plugins`. docs/vllm.md shows how it is used."""
from __future__ import annotations

import logging

from .upstream import Upstream

_log = logging.getLogger("vllm.dray")
_FACTORY, _BASE = "vllm.distributed.weight_transfer.factory", "vllm.distributed.weight_transfer.base"
_RELOAD = "vllm.model_executor.model_loader.reload"
UPSTREAM = Upstream(
    "vLLM", "vllm", "0.32.0",
    methods={
        (_FACTORY, "WeightTransferEngineFactory.register_engine"): ["name", "module_path_or_cls", "class_name"],
        (_FACTORY, "WeightTransferTrainerFactory.register_engine"): ["name", "module_path_or_cls", "class_name"],
        (_BASE, "WeightTransferEngine.__init__"): ["self", "config", "vllm_config", "device", "model"],
        (_BASE, "TrainerWeightTransferEngine.__init__"): ["self", "client", "source", "is_sender"],
        (_RELOAD, "initialize_layerwise_reload"): ["model"],
        (f"{_RELOAD}.layerwise", "get_layerwise_info"): ["layer"],
        (f"{_RELOAD}.layerwise", "finalize_layerwise_processing"): ["model", "model_config"],
        (f"{_RELOAD}.layerwise", "_layerwise_process"): ["layer", "info"],
        (f"{_RELOAD}.layerwise", "is_deferred_attention_layer"): ["layer"],
        ("vllm.distributed.parallel_state", "get_pp_group"): [],
        (f"{_RELOAD}.meta", "materialize_layer"): ["layer", "info"],
        (_BASE, "WeightTransferEngine.set_weight_update_target"): ["self", "model", "model_config"],
        ("vllm.distributed.weight_transfer.clients", "HTTPVLLMWeightSyncClient._post"): ["self", "path", "json"],
        ("vllm.model_executor.model_loader.mtp_validation", "disable_mtp_completeness_check"): [],
    },
    abstract={
        (_BASE, "WeightTransferEngine"): {"init_transfer_engine", "start_weight_update", "finish_weight_update",
                                          "receive_weights", "shutdown"},
        (_BASE, "TrainerWeightTransferEngine"): {"trainer_init", "send_weights"},
    })


def register() -> None:
    """The entry point: backend "dray" in both factories. Where vLLM has none, it says so and changes nothing: vLLM
    starts as it does without dray."""
    try:
        from vllm.distributed.weight_transfer import factory
        factories = factory.WeightTransferEngineFactory, factory.WeightTransferTrainerFactory
        for each, name in zip(factories, ("Engine", "Trainer")):
            if "dray" not in each._registry:
                each.register_engine("dray", f"{__name__}_{name.lower()}", f"Dray{name}")
    except (ImportError, AttributeError, TypeError) as error:
        _log.warning("dray: no weight transfer here, this vLLM is not as %s, which was tried: %s", UPSTREAM.tried,
                     error)


def __getattr__(name):
    """What trainers import, without vLLM's import before it is asked for."""
    if name in ("DrayTrainer", "DrayTrainerInitInfo"):
        from . import vllm_trainer
        return getattr(vllm_trainer, name)
    if name in ("DrayEngine", "DrayInitInfo"):
        from . import vllm_engine
        return getattr(vllm_engine, name)
    raise AttributeError(f"module {__name__} has no {name}")
