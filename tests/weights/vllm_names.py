"""What the vLLM plug-in imports, as vLLM 0.32.0 declares it, and an engine that it serves."""
import abc
import argparse
import contextlib
import dataclasses
import typing

import torch
import torch.distributed as dist
from slime_names import module

AT, RELOAD = "vllm.distributed.weight_transfer", "vllm.model_executor.model_loader.reload"
A, B = typing.TypeVar("A"), typing.TypeVar("B")


class Factory:
    _registry: dict = {}

    @classmethod
    def register_engine(cls, name, module_path_or_cls, class_name=None): ...


class HTTPVLLMWeightSyncClient:
    def _post(self, path, json=None): ...


@dataclasses.dataclass
class InitInfo(abc.ABC):
    pass


@dataclasses.dataclass
class TrainerInitInfo(InitInfo):
    rank: int = dataclasses.field(kw_only=True)
    is_sender = property(lambda self: self.rank == 0)


class WeightSource(abc.ABC):
    @abc.abstractmethod
    def metadata(self): ...
    @abc.abstractmethod
    def __iter__(self): ...


class ModuleSource(WeightSource):
    def __init__(self, module):
        self._module = module

    def metadata(self): ...
    def __iter__(self): ...


class WeightTransferEngine(abc.ABC, typing.Generic[A, B]):
    def __init__(self, config, vllm_config, device, model):
        self.config, self.vllm_config, self.device, self.model, self._default_model = config, vllm_config, device, model, model
        self.parallel_config, self.model_config = vllm_config.parallel_config, vllm_config.model_config

    def set_weight_update_target(self, model, model_config): ...
    @abc.abstractmethod
    def init_transfer_engine(self, init_info): ...
    @abc.abstractmethod
    def start_weight_update(self): ...
    @abc.abstractmethod
    def finish_weight_update(self): ...
    @abc.abstractmethod
    def receive_weights(self, update_info): ...
    @abc.abstractmethod
    def shutdown(self): ...


class TrainerWeightTransferEngine(abc.ABC, typing.Generic[A]):
    def __init__(self, *, client, source, is_sender=True):
        self.client, self.source, self.is_sender = client, source, is_sender

    @classmethod
    @abc.abstractmethod
    def trainer_init(cls, init_info, *, client, source): ...
    @abc.abstractmethod
    def send_weights(self): ...


def initialize_layerwise_reload(model): ...
def finalize_layerwise_processing(model, model_config): ...
def is_deferred_attention_layer(layer): ...


class Info:
    """Of a module, in a reload. missed: nothing came to its parameters' loaders."""
    restore_metadata, load_numel, kernel_tensors, missed = ({}, {}), 0, None, False

    def can_load(self):
        return self.missed


INFOS, CALLS = {}, []  # what a reload does for single modules


def get_layerwise_info(layer):
    return INFOS.setdefault(layer, Info())


def miss(layer):
    """vLLM's reload does not wait for this module's parameters."""
    info = get_layerwise_info(layer)
    info.missed, info.kernel_tensors = True, (dict(layer.named_parameters()), {})


def materialize_layer(layer, info):
    CALLS.append("materialise")


def _layerwise_process(layer, info):
    CALLS.append("process")


def disable_mtp_completeness_check():
    return contextlib.nullcontext()


def install():
    module("vllm.distributed.parallel_state", get_pp_group=lambda: argparse.Namespace(cpu_group=dist.group.WORLD))
    module("vllm.config", set_current_vllm_config=contextlib.nullcontext)
    module(f"{AT}.base", WeightTransferInitInfo=InitInfo, WeightTransferUpdateInfo=InitInfo, **{each.__name__: each for each in (
        TrainerInitInfo, WeightSource, ModuleSource, WeightTransferEngine, TrainerWeightTransferEngine)})
    module(f"{AT}.factory", WeightTransferEngineFactory=Factory, WeightTransferTrainerFactory=Factory)
    module(f"{AT}.clients", HTTPVLLMWeightSyncClient=HTTPVLLMWeightSyncClient, RayVLLMWeightSyncClient=type("Ray", (), {}))
    module("vllm.model_executor.model_loader.mtp_validation", disable_mtp_completeness_check=disable_mtp_completeness_check)
    module(RELOAD, initialize_layerwise_reload=initialize_layerwise_reload)
    module(f"{RELOAD}.layerwise", **{each.__name__: each for each in (finalize_layerwise_processing, get_layerwise_info, _layerwise_process,
                                                                      is_deferred_attention_layer)})
    module(f"{RELOAD}.meta", materialize_layer=materialize_layer)


class Worker:
    """A worker of vLLM, called as its server and its clients are. versions: those that it was told to be at. stages:
    the ranks of torch.distributed, of which this is one."""

    def __init__(self, model, name, rank=0, stages=1):
        from dray.integrations.vllm import DrayEngine
        place = argparse.Namespace(data_parallel_size=1, rank=rank, world_size=stages, pipeline_parallel_size=stages)
        self.model, self.versions = model, []
        self.engine = DrayEngine(None, argparse.Namespace(parallel_config=place, model_config=None, instance_id=name),
                                 torch.device("cpu"), model)

    def init_weight_transfer_engine(self, init_info):
        self.engine.init_transfer_engine(self.engine.init_info_cls(**init_info))

    def start_weight_update(self):
        self.engine.start_weight_update()

    def update_weights(self, update_info):
        self.engine.receive_weights(self.engine.update_info_cls(**update_info))

    def finish_weight_update(self, weight_version=None):
        self.engine.finish_weight_update()
        self.versions.append(weight_version)
