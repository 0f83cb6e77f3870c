"""What the slime plug-in imports: with the repository in $DRAY_UPSTREAM/slime its own modules, of which what they import
of packages that are not here has stand-ins; without it the names alone, as slime 624b824 declares them."""
import argparse
import importlib.abc
import importlib.machinery
import os
import pathlib
import re
import sys
import types
import unittest.mock

try:
    import torch
    import torch.distributed as dist
except ImportError as missing:
    print(missing)
    sys.exit(77)

if "DRAY_UPSTREAM" not in os.environ:  # else the environment has the wheel
    sys.path.insert(0, os.path.join(os.environ["DRAY_SOURCE_DIR"], "python"))

UPSTREAM = pathlib.Path(os.environ.get("DRAY_UPSTREAM", "/nowhere"), "slime")
TP = EP = 2
HIDDEN, HEADS, GROUPS, D, INNER, EXPERTS, VOCABULARY, PADDED = 64, 8, 4, 16, 32, 4, 203, 256
ARGS = argparse.Namespace(
    hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=D, vocab_size=VOCABULARY,
    num_experts=EXPERTS, q_lora_rank=None, rollout_num_gpus_per_engine=1, update_weight_mode="full",
    update_weight_transport="nccl", colocate=False, offload_train=False)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that have everything."""
    NAMES = ("megatron", "sglang", "ray", "torch_memory_saver", "transformer_engine", "sglang_router", "wandb",
             "triton", "omegaconf", "datasets", "pyarrow", "aiohttp", "requests", "pylatexenc", "qwen_vl_utils", "blobfile",
             "polars", "psutil", "ring_flash_attn", "flash_attn", "tensorboard", "mbridge", "IPython", "PIL")

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = self._missing
        return module

    def exec_module(self, module):
        module.__version__ = "0"

    @staticmethod
    def _missing(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return unittest.mock.MagicMock(name=name)


def module(name, **names):
    parent, _, last = name.rpartition(".")
    if parent and parent not in sys.modules:
        module(parent)
    made = sys.modules.get(name) or types.ModuleType(name)
    made.__path__ = getattr(made, "__path__", [])
    vars(made).update(names)
    sys.modules[name] = made
    if parent:
        setattr(sys.modules[parent], last, made)
    return made


# ---- as slime declares them --------------------------------------------------------------------

class UpdateWeightFromDistributed:
    def __init__(self, args, model, weights_getter, *, model_name, quantization_config): ...
    def connect_rollout_engines(self, rollout_engines, rollout_engine_lock, engine_gpu_counts=None, engine_gpu_offsets=None,
                                engine_parallel_configs=None): ...
    def update_weights(self): ...
    def pop_metrics(self): ...


class UpdateWeightFromTensor(UpdateWeightFromDistributed):
    pass


class MegatronTrainRayActor:
    def init(self, args, role):
        self.weight_updater = (UpdateWeightFromTensor if args.colocate else UpdateWeightFromDistributed)


def named_params_and_buffers(args, model, convert_to_global_name=True, translate_gpu_to_cpu=False):
    """Names of the whole model: experts count through all ranks."""
    for part in model:
        for name, parameter in part.named_parameters():
            if found := re.fullmatch(r"(.*mlp\.experts\..*weight)(\d+)", name):
                name = f"{found[1]}{int(found[2]) + dist.get_rank() * EXPERTS // EP}"
            yield "module." + name, parameter


def convert_to_hf(args, model_name, name, param, quantization_config=None, transform_ue8m0=True):
    """Of Qwen3-MoE."""
    name = name.removeprefix("module.module.")
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return [("model.embed_tokens.weight" if "embedding" in name else "lm_head.weight", param[:args.vocab_size])]
    if name == "decoder.final_layernorm.weight":
        return [("model.norm.weight", param)]
    _, _, layer, rest = name.split(".", 3)
    at = f"model.layers.{layer}"
    if rest == "self_attention.linear_qkv.weight":
        each = args.num_attention_heads // args.num_query_groups
        q, k, v = param.view(args.num_query_groups, -1, args.kv_channels, args.hidden_size).split([each, 1, 1], 1)
        return [(f"{at}.self_attn.{n}_proj.weight", t.reshape(-1, args.hidden_size)) for n, t in zip("qkv", (q, k, v))]
    if found := re.fullmatch(r"mlp\.experts\.linear_fc1\.weight(\d+)", rest):
        gate, up = param.chunk(2, 0)
        return [(f"{at}.mlp.experts.{found[1]}.gate_proj.weight", gate), (f"{at}.mlp.experts.{found[1]}.up_proj.weight", up)]
    if found := re.fullmatch(r"mlp\.experts\.linear_fc2\.weight(\d+)", rest):
        return [(f"{at}.mlp.experts.{found[1]}.down_proj.weight", param)]
    known = {"self_attention.linear_proj.weight": "self_attn.o_proj.weight", "mlp.router.weight": "mlp.gate.weight",
             "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
             "pre_mlp_layernorm.weight": "post_attention_layernorm.weight"}
    return [(f"{at}.{known[rest]}", param)]


# ---- what is there -----------------------------------------------------------------------------

def install(rank):
    """Of a rank of a trainer with TP2 for all but the experts, and EP2 for these."""
    if UPSTREAM.is_dir():
        import torch._dynamo, torch._inductor.runtime.triton_heuristics, torch.utils.flop_counter  # before triton has a stand-in
        import transformers
        transformers.AutoProcessor, transformers.AutoTokenizer  # found now
        sys.path.insert(0, str(UPSTREAM))
        sys.meta_path.append(Absent())
    mpu = dict(get_tensor_model_parallel_world_size=lambda: TP, get_tensor_model_parallel_rank=lambda: rank,
               get_expert_tensor_parallel_world_size=lambda: 1, get_expert_tensor_parallel_rank=lambda: 0,
               get_expert_model_parallel_world_size=lambda: EP, get_expert_model_parallel_rank=lambda: rank)
    import importlib
    if UPSTREAM.is_dir():
        importlib.import_module("megatron.core.transformer.transformer_layer")
        sys.modules["megatron.core.transformer.transformer_layer"].get_transformer_layer_offset = lambda config: 0
        importlib.import_module("ray")
    module("megatron.core.mpu", **mpu)
    module("ray", get=lambda of: [each.result() for each in of] if isinstance(of, list) else of.result())
    module("sglang.srt.distributed", get_tensor_model_parallel_world_size=lambda: 1, get_tensor_model_parallel_rank=lambda: 0,
           get_pp_group=lambda: types.SimpleNamespace(world_size=1, rank_in_group=0))
    if UPSTREAM.is_dir():
        actor = importlib.import_module("slime.backends.megatron_utils.actor")
        importlib.import_module("slime.utils.distributed_utils").set_gloo_group(dist.group.WORLD)
        return actor, sys.modules["slime.backends.megatron_utils.megatron_to_hf"].convert_to_hf
    at = "slime.backends.megatron_utils"
    module(f"{at}.update_weight.common", named_params_and_buffers=named_params_and_buffers)
    module(f"{at}.megatron_to_hf", convert_to_hf=convert_to_hf)
    module("slime.utils.distributed_utils", get_gloo_group=lambda: dist.group.WORLD)
    return module(f"{at}.actor", **{each.__name__: each for each in (
        MegatronTrainRayActor, UpdateWeightFromDistributed, UpdateWeightFromTensor)}), convert_to_hf


# ---- a model of Megatron-Core's parameters ------------------------------------------------------

def whole(version):
    """{name as Megatron's whole model has it: tensor} of a version."""
    shapes = {"embedding.word_embeddings.weight": (PADDED, HIDDEN), "output_layer.weight": (PADDED, HIDDEN),
              "decoder.final_layernorm.weight": (HIDDEN,)}
    for layer in range(2):
        at = f"decoder.layers.{layer}"
        shapes.update({f"{at}.self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * D, HIDDEN),
                       f"{at}.self_attention.linear_proj.weight": (HIDDEN, HEADS * D), f"{at}.mlp.router.weight": (EXPERTS, HIDDEN),
                       f"{at}.self_attention.linear_qkv.layer_norm_weight": (HIDDEN,), f"{at}.pre_mlp_layernorm.weight": (HIDDEN,)})
        for expert in range(EXPERTS):
            shapes[f"{at}.mlp.experts.linear_fc1.weight{expert}"] = (2 * INNER, HIDDEN)
            shapes[f"{at}.mlp.experts.linear_fc2.weight{expert}"] = (HIDDEN, INNER)
    generator = torch.Generator().manual_seed(version)
    return {"module." + name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def checkpoint(version, convert):
    """{name: tensor} that slime's conversion makes of a version."""
    found = {}
    for name, tensor in whole(version).items():
        found.update(convert(ARGS, "qwen3moe", "module." + name, tensor))
    return found


class Chunk:
    """This rank's part of the model."""
    CUT = {"word_embeddings.weight": 0, "output_layer.weight": 0, "linear_qkv.weight": 0, "linear_proj.weight": 1}

    def __init__(self, rank):
        self.config, self._rank, self._held = argparse.Namespace(), rank, {}
        self.write(0)

    def write(self, version):
        for name, tensor in whole(version).items():
            found = re.fullmatch(r"(.*mlp\.experts\..*weight)(\d+)", name)
            each = EXPERTS // EP
            if found and int(found[2]) // each != self._rank:
                continue
            name = f"{found[1]}{int(found[2]) % each}" if found else name
            dim = next((d for end, d in self.CUT.items() if name.endswith(end)), None)
            part = tensor if dim is None else tensor.chunk(TP, dim)[self._rank]
            if name not in self._held:
                self._held[name] = torch.nn.Parameter(part.clone().contiguous(), requires_grad=False)
                self._held[name].tensor_model_parallel = dim is not None
                self._held[name].partition_dim = -1 if dim is None else dim
                self._held[name].partition_stride = 1
            self._held[name].data.copy_(part)

    def named_parameters(self):
        return iter(self._held.items())

    def named_buffers(self):
        return iter(())
