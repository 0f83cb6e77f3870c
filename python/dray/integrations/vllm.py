"""vLLM's weight transfer by dray: backend "dray" of its factories, which its processes find by the entry point
`vllm.general_plugins`. docs/vllm.md shows how it is used."""
from __future__ import annotations

import inspect
import logging

TRIED = "0.32.0"  # the version of vLLM that this was tried with
_log = logging.getLogger("vllm.dray")

# What the plug-in needs of vLLM: the arguments that it gives, or is given, by name.
_METHODS = {
    ("vllm.distributed.weight_transfer.factory", "WeightTransferEngineFactory.register_engine"):
        ["name", "module_path_or_cls", "class_name"],
    ("vllm.distributed.weight_transfer.factory", "WeightTransferTrainerFactory.register_engine"):
        ["name", "module_path_or_cls", "class_name"],
    ("vllm.distributed.weight_transfer.base", "WeightTransferEngine.__init__"):
        ["self", "config", "vllm_config", "device", "model"],
    ("vllm.distributed.weight_transfer.base", "TrainerWeightTransferEngine.__init__"):
        ["self", "client", "source", "is_sender"],
    ("vllm.model_executor.model_loader.reload", "initialize_layerwise_reload"): ["model"],
    ("vllm.model_executor.model_loader.reload.layerwise", "get_layerwise_info"): ["layer"],
    ("vllm.model_executor.model_loader.reload.layerwise", "finalize_layerwise_processing"):
        ["model", "model_config"],
    ("vllm.model_executor.model_loader.mtp_validation", "disable_mtp_completeness_check"): [],
}
_ABSTRACT = {
    "WeightTransferEngine": {"init_transfer_engine", "start_weight_update", "finish_weight_update",
                             "receive_weights", "shutdown"},
    "TrainerWeightTransferEngine": {"trainer_init", "send_weights"},
}


def differences() -> list:
    """Where this vLLM is not the one that the plug-in was written for, in words; []: nowhere."""
    import importlib
    found = []
    for (module, path), wanted in _METHODS.items():
        try:
            what = importlib.import_module(module)
            for part in path.split("."):
                what = getattr(what, part)
        except (ImportError, AttributeError):
            found.append(f"{module} has no {path}")
            continue
        given = list(inspect.signature(what).parameters)
        if given != wanted:
            found.append(f"{path} takes {', '.join(given) or 'nothing'}, expected {', '.join(wanted) or 'nothing'}")
    try:
        base = importlib.import_module("vllm.distributed.weight_transfer.base")
    except ImportError:
        return found
    for name, wanted in _ABSTRACT.items():
        given = set(getattr(getattr(base, name, None), "__abstractmethods__", ()))
        if given != wanted:
            found.append(f"{name} asks for {', '.join(sorted(given)) or 'nothing'}, expected "
                         f"{', '.join(sorted(wanted))}")
    return found


def check() -> None:
    """RuntimeError, which says how this vLLM differs from the one that was tried."""
    if found := differences():
        import vllm
        raise RuntimeError(f"dray's plug-in was tried with vLLM {TRIED}, and vLLM {vllm.__version__} differs from "
                           f"that: {'; '.join(found)}")


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
        _log.warning("dray: no weight transfer here, this vLLM is not as %s, which was tried: %s", TRIED, error)


def __getattr__(name):
    """What trainers import, without vLLM's import before it is asked for."""
    if name in ("DrayTrainer", "DrayTrainerInitInfo"):
        from . import vllm_trainer
        return getattr(vllm_trainer, name)
    if name in ("DrayEngine", "DrayInitInfo"):
        from . import vllm_engine
        return getattr(vllm_engine, name)
    raise AttributeError(f"module {__name__} has no {name}")
