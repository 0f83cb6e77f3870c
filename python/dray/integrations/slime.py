"""slime's weight updates by dray: `--custom-megatron-init-path dray.integrations.slime.init` sets the class that updates
weights, and `--data-source-path dray.integrations.slime.DataSource` takes prompts from a queue. docs/slime.md shows how
they are used."""
from __future__ import annotations

import importlib
import inspect
import os

from .upstream import Upstream

_MEGATRON = "slime.backends.megatron_utils"
_ACTOR = f"{_MEGATRON}.actor"
_UPDATER = ["self", "args", "model", "weights_getter", "model_name", "quantization_config"]
_REPLACED = ("UpdateWeightFromDistributed", "UpdateWeightFromTensor")
UPSTREAM = Upstream(
    "slime", "slime", "624b824",
    methods={
        **{(_ACTOR, f"{name}.__init__"): _UPDATER for name in _REPLACED},
        **{(_ACTOR, f"{name}.connect_rollout_engines"): ["self", "rollout_engines", "rollout_engine_lock",
                                                         "engine_gpu_counts", "engine_gpu_offsets",
                                                         "engine_parallel_configs"] for name in _REPLACED},
        **{(_ACTOR, f"{name}.{method}"): ["self"] for name in _REPLACED for method in ("update_weights", "pop_metrics")},
        (f"{_MEGATRON}.update_weight.common", "named_params_and_buffers"): ["args", "model", "convert_to_global_name",
                                                                            "translate_gpu_to_cpu"],
        (f"{_MEGATRON}.megatron_to_hf", "convert_to_hf"): ["args", "model_name", "name", "param", "quantization_config",
                                                           "transform_ue8m0"],
        ("slime.utils.distributed_utils", "get_gloo_group"): [],
    })


def init(args) -> None:
    """--custom-megatron-init-path: slime calls it in each process of the trainer before it chooses the class that updates
    weights. RuntimeError: this slime is another one than the one that was tried; ValueError: an option that dray's class
    has no way for. Both change nothing."""
    UPSTREAM.check()
    actor = importlib.import_module(_ACTOR)
    source = inspect.getsource(actor.MegatronTrainRayActor.init)
    if missing := [name for name in _REPLACED if name not in source]:
        raise RuntimeError(f"dray's plug-in was tried with slime {UPSTREAM.tried}, in which MegatronTrainRayActor.init "
                           f"chooses {' or '.join(_REPLACED)}; here it does not name {missing[0]}")
    for option, wanted in (("update_weight_mode", "full"), ("update_weight_transport", "nccl")):
        if getattr(args, option, wanted) != wanted:
            raise ValueError(f"--{option.replace('_', '-')}: {wanted} expected with dray, found {getattr(args, option)}")
    if not os.environ.get("DRAY_ADDRESS"):
        raise ValueError("dray: no coordinator is named: start `dray serve`, and set DRAY_ADDRESS where Ray starts")
    from .slime_trainer import DrayWeightUpdater
    for name in _REPLACED:
        setattr(actor, name, DrayWeightUpdater)


def __getattr__(name):
    """What slime imports by a path."""
    if name == "DataSource":
        from .slime_data import DataSource
        return DataSource
    if name == "DrayWeightUpdater":
        from .slime_trainer import DrayWeightUpdater
        return DrayWeightUpdater
    raise AttributeError(f"module {__name__} has no {name}")
