"""vLLM's models as one of its ranks has them, on the CPU: its own parallel groups over a process group that
talks to nobody."""
import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import sys
import types

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")



class _Named(type):
    """Classes that have any attribute, and do nothing: of packages that images are prepared with, and models are not."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """PyPI's torchvision does not fit a torch for the CPU: modules of its names, so that models' files can be imported."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__, module.__version__ = [], "0"
        module.__getattr__ = lambda name: getattr(_Named("Absent", (), {}), name)
        return module

    def exec_module(self, module):
        pass


sys.modules.pop("torchvision", None)
sys.meta_path.insert(0, _Absent())

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.models import registry

_group = dist.new_group
# Transformers' lists of classes that vLLM knows some of.
TASKS = ("FOR_CAUSAL_LM_MAPPING", "FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "FOR_MULTIMODAL_LM_MAPPING", "FOR_SPEECH_SEQ_2_SEQ_MAPPING",
         "FOR_SEQUENCE_CLASSIFICATION_MAPPING", "FOR_TOKEN_CLASSIFICATION_MAPPING", "FOR_MASKED_LM_MAPPING",
         "FOR_RETRIEVAL_MAPPING", "MAPPING")


def _in_process(self):
    """What vLLM asks of a model's class, without a process of its own for each."""
    return registry._ModelInfo.from_model_cls(self.load_model_cls())


registry._LazyRegisteredModel.inspect_model_cls = _in_process


class Ranks:
    """`tp` ranks, of which this process is one."""

    def __init__(self, tp, rank):
        self.tp, self.rank = tp, rank
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp)
        dist.new_group = lambda *a, **k: _group(*a, **{**k, "backend": "fake"})
        parallel_state._node_count = lambda group: 1
        coordinator = parallel_state.GroupCoordinator
        begin = coordinator.__init__

        def alone(self, *arguments, **more):
            more.update(use_device_communicator=False, use_message_queue_broadcaster=False)
            begin(self, *arguments[:4], **more)
        coordinator.__init__ = alone

    def config(self, folder):
        model = json.loads(pathlib.Path(folder, "config.json").read_text(encoding="utf-8"))["architectures"][0].endswith("Model")
        config = ModelConfig(model=folder, runner="pooling" if model else "auto", skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
                             seed=0)
        return VllmConfig(model_config=config, device_config=DeviceConfig(device="cpu"),
                          load_config=LoadConfig(load_format="dummy"),
                          parallel_config=ParallelConfig(tensor_parallel_size=self.tp, rank=self.rank))

    def model(self, folder):
        config = self.config(folder)
        with set_current_vllm_config(config):
            if parallel_state._WORLD is None:
                parallel_state.init_distributed_environment(self.tp, self.rank, "env://", 0, "fake")
            parallel_state.destroy_model_parallel()  # whether there is a group for experts is the model's
            parallel_state.initialize_model_parallel(self.tp, 1, backend="fake")
            torch.set_default_dtype(torch.bfloat16)
            try:
                model = initialize_model(vllm_config=config, model_config=config.model_config)
            finally:
                torch.set_default_dtype(torch.float32)
        for p in model.parameters():
            p.requires_grad_(False)
        return model, config

    @staticmethod
    def finish(model, config):
        """What vLLM does after loading."""
        with set_current_vllm_config(config):
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))


def knows(architecture):
    return architecture in registry.ModelRegistry.get_supported_archs()


def around(config):
    return set_current_vllm_config(config)
