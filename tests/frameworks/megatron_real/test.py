"""dray.weights.record_source with mbridge's own converters of Megatron-Core's parameters, and with slime's, where $DRAY_UPSTREAM has
slime: tensor-parallel ranks' blocks, put together, against what the converters make of whole tensors, all bytes; and, of the families
that dray has, the checkpoint's names and shapes. And StreamDataLoader's micro-batches, fed to Megatron-Core's forward_backward_func:
gradients as torch's."""
import importlib
import json
import os
import pathlib
import sys
import tempfile
import types

import torch
import transformers

sys.modules.setdefault("torchvision", None)
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from mbridge.core.parallel_states import ParallelStates
from mbridge.models import deepseek_v3, llama, mixtral, qwen2, qwen3, qwen3moe

import dray
from dray.weights import megatron_parameters, megatron_shards, record_source

COMMON = dict(vocab_size=203, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
              max_position_embeddings=128, head_dim=8, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0)
MODELS = {
    "llama": (llama.LLaMABridge, transformers.LlamaConfig, dict(COMMON)),
    "qwen2": (qwen2.Qwen2Bridge, transformers.Qwen2Config, dict(COMMON)),
    "qwen3": (qwen3.Qwen3Bridge, transformers.Qwen3Config, {**COMMON, "head_dim": 16}),
    "qwen3_moe": (qwen3moe.Qwen3MoEBridge, transformers.Qwen3MoeConfig,
                  dict({**COMMON, "head_dim": 16}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)),
    "mixtral": (mixtral.MixtralBridge, transformers.MixtralConfig, dict(COMMON, num_local_experts=4, num_experts_per_tok=2)),
}
CUT = {"word_embeddings.weight": 0, "output_layer.weight": 0, "linear_qkv.weight": 0, "linear_qkv.bias": 0, "linear_proj.weight": 1,
       "linear_fc1.weight": 0, "linear_fc2.weight": 1}


def dimension(name):
    """Along which Megatron-Core cuts a parameter; None: not at all."""
    plain = name.rstrip("0123456789")
    return next((d for end, d in CUT.items() if plain.endswith(end)), None)


def part(name, whole, tp, rank):
    d = dimension(name)
    if d is None or tp == 1:
        local = whole.clone()
    elif "linear_fc1" in name:
        local = torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
    else:
        local = whole.chunk(tp, d)[rank].clone()
    made = torch.nn.Parameter(local.contiguous(), requires_grad=False)
    if d is not None:
        made.tensor_model_parallel, made.partition_dim = True, d
    return made


def bridge_of(kind, config, padded):
    made = kind.__new__(kind)  # without its TransformerConfig, which wants GPUs
    made.hf_config, made.mpu = config, ParallelStates.__new__(ParallelStates)
    made.config = type("Config", (), {"num_moe_experts": getattr(config, "num_experts", None), "mtp_num_layers": None})()
    made.make_vocab_size_divisible_by, made.vocab_size, made.padded_vocab_size = 128, config.vocab_size, padded
    return made


def slime_of(name, config):
    """slime's conversion of a family; None: it has none, or slime is not here."""
    folder = pathlib.Path(os.environ.get("DRAY_UPSTREAM", "/nowhere"), "slime")
    if not folder.is_dir() or name == "mixtral":
        return None
    for package in ("slime", "slime.backends", "slime.backends.megatron_utils"):  # without what they begin with
        if package not in sys.modules:
            sys.modules[package] = made = types.ModuleType(package)
            made.__path__ = [str(folder / package.replace(".", "/"))]
    to_hf = importlib.import_module("slime.backends.megatron_utils.megatron_to_hf").convert_to_hf
    args = types.SimpleNamespace(hidden_size=config.hidden_size, num_attention_heads=config.num_attention_heads,
                                 num_query_groups=config.num_key_value_heads, kv_channels=config.head_dim,
                                 vocab_size=config.vocab_size, q_lora_rank=None)

    def convert(named):
        for each, tensor in named:
            yield from to_hf(args, name, f"module.module.{each}", tensor)
    return convert


def tried(name, kind, config, sizes):
    torch.manual_seed(7)
    config = config(**sizes)
    with tempfile.TemporaryDirectory() as folder:
        config.architectures = [type(config).__name__.replace("Config", "ForCausalLM")]
        pathlib.Path(folder, "config.json").write_text(json.dumps({**config.to_dict(), "torch_dtype": "bfloat16"}), encoding="utf-8")
        listed = {tp: megatron_parameters(folder, tp=tp, etp=tp) for tp in (1, 2, 4)}
        wanted_names = dray.weights.tensors(folder)
    counts = []
    for tp in (1, 2, 4):
        padded = -(-config.vocab_size // (128 * tp)) * 128 * tp
        whole = {}
        for each, (shape, dtype, _) in listed[1].items():
            shape = (padded, *shape[1:]) if "word_embeddings" in each or "output_layer" in each else shape
            whole[each] = torch.randn(shape).to(dtype)
        bridge = bridge_of(kind, config, padded)

        def convert(named):
            for each, tensor in named:
                yield from zip(*bridge._weight_to_hf_format(each, tensor))
        wanted = dict(convert(whole.items()))
        assert {n: tuple(t.shape) for n, t in wanted.items()} == {n: tuple(of[0]) for n, of in wanted_names.items()}
        for what in filter(None, (convert, slime_of(name, config))):
            made = {n: torch.full_like(t, 7) for n, t in wanted.items()}
            for rank in range(tp):
                held = {each: part(each, tensor, tp, rank) for each, tensor in whole.items()}
                for each, parameter in held.items():  # the shapes that dray's own tables have for this rank
                    assert tuple(parameter.shape) == tuple(listed[tp][each][0]), (each, parameter.shape, listed[tp][each])
                source = record_source(what, megatron_shards(held.items(), tp, rank))
                assert not source.computed, source.computed
                for block in [block for _, block in source.pairs()]:
                    view = block.tensor
                    made[block.name][tuple(slice(s, s + n) for s, n in zip(block.start or (0,) * view.dim(), view.shape))] = view
                counts.append(len(source.pairs()))
            for each, tensor in wanted.items():
                assert torch.equal(made[each], tensor), f"{name} TP{tp}: {each}"
    return len(wanted), sum(counts)


class OnCpu(torch.overrides.TorchFunctionMode):
    """Megatron-Core's schedules count tokens on a GPU."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        named = named or {}
        return function(*arguments, **{**named, "device": "cpu"} if named.get("device") == "cuda" else named)


def fed():
    """Each batch is a step: what its micro-batches leave in grad is what torch makes of its rows at once."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    draw = torch.Generator().manual_seed(11)
    rows = [torch.randn(int(n), generator=draw, dtype=torch.float64) for n in torch.randint(1, 30, (61,), generator=draw)]
    model = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    model.config, model.model_type = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1), ModelType.encoder_or_decoder
    model.set_input_tensor = lambda given: None  # of another pipeline stage
    taken, steps = [], 0

    def loss_of(values, weights, lengths):
        return (model(values[:, None])[:, 0] * torch.repeat_interleave(weights, lengths)).sum()

    def step(loader, model):
        batch = next(loader)
        values, offsets = batch.ragged("tokens")
        weights = torch.as_tensor(batch.weights, dtype=torch.float64)
        taken.extend(slot for slot, weight in zip(batch.slots.tolist(), weights) if weight)
        return loss_of(values, weights, offsets.diff()), lambda loss: (loss * batch.micros, {"loss": loss.detach()})

    with dray.Queue("fed", tasks={"actor": (["tokens"], [])}, timeout=20) as queue:
        queue.insert({"tokens": rows}, "0", tags={"tokens": [len(row) for row in rows]}, seal=True)
        with dray.StreamDataLoader("actor", ["tokens"], 20, "fed", "0", micro=True, policy="lockstep", dp_rank=0, dp_size=1, token_cap=96,
                                   framework="torch", timeout=20) as loader, OnCpu():
            while micros := loader.num_microbatches():
                begun = len(taken)
                model.zero_grad()
                losses = get_forward_backward_func()(forward_step_func=step, data_iterator=loader, model=model, num_microbatches=micros,
                                                     seq_length=1, micro_batch_size=1)
                found = [p.grad.clone() for p in model.parameters()]
                model.zero_grad()
                these = [rows[slot] for slot in taken[begun:]]
                loss = loss_of(torch.cat(these), torch.ones(len(these), dtype=torch.float64), torch.tensor([len(row) for row in these]))
                loss.backward()
                torch.testing.assert_close(sum(each["loss"] for each in losses), loss.detach(), rtol=1e-12, atol=1e-12)
                for one, p in zip(found, model.parameters()):
                    torch.testing.assert_close(one, p.grad, rtol=1e-12, atol=1e-12)
                assert len(losses) == micros
                steps += 1
            loader.flush()
    assert sorted(taken) == list(range(len(rows))) and steps > 2, (taken, steps)
    return steps


def main():
    seen = []
    for name, (kind, config, sizes) in MODELS.items():
        tensors, blocks = tried(name, kind, config, sizes)
        print(f"{name}: {tensors} tensors, {blocks} blocks of 7 ranks{', and of slime' if 'slime' in sys.modules and name != 'mixtral' else ''}",
              flush=True)
        seen.append(name)
    slime = f"; slime's of {', '.join(n for n in seen if n != 'mixtral')}, too" if "slime" in sys.modules else ""
    with dray.serve():
        steps = fed()
    print(f"mbridge's converters of {', '.join(seen)} recorded at TP1, 2 and 4: blocks equal what they convert, and dray's own names and shapes{slime}; "
          f"{steps} steps of Megatron-Core's forward_backward_func, fed by StreamDataLoader")


main()
