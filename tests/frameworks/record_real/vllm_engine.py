"""vLLM's models as one of its ranks has them, on the CPU: its own parallel groups over a process group that
talks to nobody."""
import os

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import DeviceConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.model_executor.models import registry

_group = dist.new_group


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
        config = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
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
