"""SGLang's models as one of its ranks has them, on the CPU: its own parallel groups over a process group that
talks to nobody. Packages that only computing needs are stand-ins."""
import contextlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
import unittest.mock

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.utils import import_utils

import_utils.is_torchvision_available()  # remembered: it is not there


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that have everything, of packages that are not here."""
    NAMES = ("torchvision", "sgl_kernel", "flashinfer", "decord", "av")

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _missing(name)
        return module

    def exec_module(self, module):
        module.__version__ = "0.0.0"


def _missing(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return unittest.mock.MagicMock(name=name)


sys.modules.pop("torchvision", None)
sys.meta_path.append(_StandIns())
for name in ("fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_moe_router_cpu",
             "fused_qk_gemma_rmsnorm_with_gate_cpu", "rmsnorm_cpu", "fused_qkvzba_split_reshape_cat_contiguous_cpu",
             "fused_dual_residual_rmsnorm_cpu"):  # taken at import
    setattr(torch.ops.sgl_kernel, name, _missing(name))

from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.layers.dp_attention import initialize_dp_attention_flags
from sglang.srt.model_loader.loader import _initialize_model
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import SpawnRanks, get_parallel, publish, reset_context
from sglang.srt.server_args import ServerArgs

_group = dist.new_group
# Transformers' lists of classes that SGLang knows some of.
TASKS = ("FOR_CAUSAL_LM_MAPPING", "FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "FOR_SEQUENCE_CLASSIFICATION_MAPPING", "MAPPING")


class Ranks:
    """`tp` ranks, of which this process is one."""

    def __init__(self, tp, rank):
        self.tp, self.rank = tp, rank
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp)
        dist.new_group = lambda *a, **k: _group(*a, **{**k, "backend": "fake"})
        coordinator = parallel_state.GroupCoordinator
        begin = coordinator.__init__

        def alone(self, *arguments, **more):
            for name in list(more):
                if name.startswith("use_"):
                    more[name] = False
            begin(self, *arguments, **more)
        coordinator.__init__ = alone

    def arguments(self, folder):
        """Models ask for attention of one kind or another, which is not run here."""
        for attention in ("torch_native", "intel_amx", "triton"):
            arguments = ServerArgs(model_path=folder, device="cpu", tp_size=self.tp, dtype="bfloat16",
                                   skip_tokenizer_init=True, load_format="dummy", disable_cuda_graph=True,
                                   attention_backend=attention, mamba_radix_cache_strategy="no_buffer",
                                   disable_overlap_schedule=True)
            try:
                arguments.resolve_once()
                return arguments
            except AssertionError as error:
                refusal = error
        raise refusal

    def model(self, folder):
        if parallel_state._WORLD is not None:
            parallel_state.destroy_model_parallel()
        reset_context()
        arguments = self.arguments(folder)
        publish(arguments, role="test", ranks=SpawnRanks(world_rank=self.rank))
        if parallel_state._WORLD is None:
            parallel_state.init_distributed_environment(world_size=self.tp, rank=self.rank, local_rank=0,
                                                        backend="fake")
        else:
            get_parallel().override_permanently(world_group=parallel_state._WORLD)
        parallel_state.initialize_model_parallel(backend="fake")
        initialize_dp_attention_flags(arguments)
        config = ModelConfig.from_server_args(arguments)
        for name in ("linear_num_key_heads", "linear_num_value_heads"):  # on CPUs it pads them where ranks need it
            if hasattr(config.hf_text_config, name):
                setattr(config.hf_text_config, f"{name}_cpu", getattr(config.hf_text_config, name))
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = _initialize_model(config, LoadConfig(load_format="dummy"))
        finally:
            torch.set_default_dtype(torch.float32)
        for p in model.parameters():
            p.requires_grad_(False)
        return model, config


def knows(architecture):
    return architecture in ModelRegistry.models


def around(config):
    return contextlib.nullcontext()
