"""Parameters of real transformers modules, sharded by torch's distribute_tensor, as blocks over the
checkpoint's names: what lies where is held against the checkpoint that transformers makes of the
whole module (save_pretrained's conversion). Families whose modules pack experts into one parameter,
and one that does not; every rank of random meshes and placements."""

import ctypes as c
import os
import random
import warnings

from begin import needs, scale as SCALE, seed as SEED

os.environ["HF_HUB_OFFLINE"] = "1"
with needs:
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import (AutoModelForCausalLM, DeepseekV3Config, DeepseekV4Config, Glm4MoeConfig,
                              MixtralConfig, Qwen3Config, Qwen3MoeConfig)
    from transformers.core_model_loading import revert_weight_conversion

import dray

F32 = 2
warnings.filterwarnings("ignore")
torch.set_num_threads(1)


def random_config(rng):
    """transformers' and dray's."""
    experts, expert, heads = rng.randrange(1, 7), rng.randrange(1, 6), rng.choice([2, 4])
    sizes = dict(vocab_size=rng.randrange(5, 30), hidden_size=4 * heads,
                 intermediate_size=rng.randrange(3, 9), num_hidden_layers=rng.randrange(1, 3),
                 num_attention_heads=heads, num_key_value_heads=2, num_experts_per_tok=1,
                 tie_word_embeddings=rng.random() < 0.5)
    kind = rng.choice([MixtralConfig, Qwen3Config, Qwen3MoeConfig, DeepseekV3Config, DeepseekV4Config, Glm4MoeConfig])
    if kind is Qwen3Config:
        sizes["head_dim"] = 4
    if kind is MixtralConfig:
        sizes["num_local_experts"] = experts
    if kind is Qwen3MoeConfig:
        sizes.update(num_experts=experts, moe_intermediate_size=expert, head_dim=4)
    if kind in (DeepseekV3Config, Glm4MoeConfig):
        sizes.update(n_routed_experts=experts, moe_intermediate_size=expert, n_shared_experts=1,
                     first_k_dense_replace=rng.randrange(2), num_nextn_predict_layers=0)
    if kind is DeepseekV3Config:
        sizes.update(q_lora_rank=rng.choice([None, 4]), kv_lora_rank=4, qk_nope_head_dim=4,
                     qk_rope_head_dim=2, v_head_dim=4)
    if kind is DeepseekV4Config:  # hashed layers have tables of integers
        del sizes["intermediate_size"]
        layers = sizes["num_hidden_layers"]
        sizes.update(n_routed_experts=experts, moe_intermediate_size=expert, head_dim=4, num_key_value_heads=1, q_lora_rank=3,
                     o_groups=2, o_lora_rank=3, index_n_heads=2, index_head_dim=4, hc_mult=2, tie_word_embeddings=False,
                     layer_types=[rng.choice(["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"])
                                  for _ in range(layers)], mlp_layer_types=["moe"] * layers)
    return kind(**sizes)


def whole_module(config):
    """The module's parameters and buffers, all elements different, and the checkpoint of it."""
    model = AutoModelForCausalLM.from_config(config)
    at = 0
    with torch.no_grad():
        for t in dict(model.named_parameters()).values():
            t.copy_(torch.arange(at, at + t.numel()).reshape(t.shape))
            at += t.numel()
        for name, t in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                t.copy_(torch.arange(at, at + t.numel()))
                at += t.numel()
    assert at < 1 << 24  # exact in float32
    state = model.state_dict()
    checkpoint = revert_weight_conversion(model, dict(state))
    return state, {n: t.detach().numpy() for n, t in checkpoint.items()}


def shard(state, placements, shape, rank):
    """This rank's local tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=int(np.prod(shape)))
    try:
        mesh = init_device_mesh("cpu", tuple(shape))
        return {n: distribute_tensor(t.detach(), mesh, placements[n],
                                     src_data_rank=None).to_local().numpy()
                for n, t in state.items()}
    finally:
        dist.destroy_process_group()


def mesh_of(shape, placements):
    mesh = dray.Mesh(ndim=len(shape))
    mesh.shape[:len(shape)] = shape
    for i, p in enumerate(placements):
        mesh.placements[i] = dray.Placement(1, p.dim, 0) if isinstance(p, Shard) else \
            dray.Placement(0, 0, 0)
    return mesh


def add(layout, config, name, region, at, mesh, place, dtype=F32):
    local = (c.c_int64 * dray.MAX_DIMS)()
    dray.call(dray.lib.dray_layout_add_module, layout.handle, c.byref(config), name.encode(), dtype,
              region, c.c_uint64(at), c.byref(mesh) if mesh else None, dray.i64s(place), local)
    return list(local)


def check_rank(config, tied, locals_, placements, shape, place, checkpoint, seen):
    layout, at, memory = dray.Layout(), 0, []
    size = sum(a.nbytes for a in locals_.values())
    region = layout.add_region(size)
    for name, array in locals_.items():
        if tied and name == "lm_head.weight":
            add(layout, config, name, region, at, None, [0])
            continue
        got = add(layout, config, name, region, at, mesh_of(shape, placements[name]), place)
        assert got[:array.ndim] == list(array.shape), (name, got, array.shape)
        memory.append(array.tobytes())
        at += array.nbytes
    memory = np.frombuffer(b"".join(memory) + bytes(size - at), np.float32)
    tensors = layout.tensors()
    for index, _, start, extent, offset, stride in layout.blocks():
        name = tensors[index].name.decode()
        box = tuple(slice(s, s + e) for s, e in zip(start, extent))
        view = np.lib.stride_tricks.as_strided(memory[offset // 4:], extent, stride)
        assert np.array_equal(view, checkpoint[name][box]), (name, start, extent)
        seen[name][box] = True
    for t in tensors:
        assert list(t.shape)[:t.ndim] == list(checkpoint[t.name.decode()].shape), t.name


def check_flat(rng, config, theirs, state, checkpoint):
    """FSDP1's flat parameters of the same module: one after the other, cut in equal parts."""
    names = [n for n in state if "e_score_correction_bias" not in n
             and not (theirs.tie_word_embeddings and n == "lm_head.weight")]
    rng.shuffle(names)
    flat = np.concatenate([state[n].detach().numpy().ravel() for n in names])
    world = rng.randrange(1, 6)
    each, seen = -(-flat.size // world), 0
    for rank in range(world):
        mine = flat[rank * each:(rank + 1) * each]
        pad = each - mine.size
        memory = np.concatenate([mine, np.full(pad, -1, np.float32)])
        pieces, at, shard = (dray.FlatPiece * len(names))(), 0, rank * each
        for p, name in zip(pieces, names):
            t, end = state[name], at + state[name].numel()
            p.name, p.ndim = name.encode(), t.ndim
            p.shape[:t.ndim] = list(t.shape)
            low, high = max(at, shard), min(end, shard + mine.size)
            p.offset, p.first, p.last = (low - shard, low - at, high - at - 1) \
                if low < high else (0, 0, -1)
            at = end
        layout = dray.Layout()
        region = layout.add_region(memory.nbytes)
        parameter = dray.FlatParameter(c.sizeof(dray.FlatParameter), F32, None, each, pad, pieces,
                                       len(names), c.pointer(config))
        dray.call(dray.lib.dray_layout_add_flat, layout.handle, region, c.c_uint64(0),
                  c.byref(parameter))
        tensors = layout.tensors()
        for index, _, start, extent, offset, stride in layout.blocks():
            box = tuple(slice(s, s + e) for s, e in zip(start, extent))
            view = np.lib.stride_tricks.as_strided(memory[offset // 4:], extent, stride)
            assert np.array_equal(view, checkpoint[tensors[index].name.decode()][box]), start
            seen += view.size
        held = {t.name.decode(): list(t.shape)[:t.ndim] for t in tensors}
        assert all(held[n] == list(checkpoint[n].shape) for n in held)
    assert seen == flat.size, (seen, flat.size)
    pieces[0].shape[0] += 1
    layout = dray.Layout()
    layout.add_region(memory.nbytes)
    try:
        dray.call(dray.lib.dray_layout_add_flat, layout.handle, 0, c.c_uint64(0),
                  c.byref(parameter))
        raise AssertionError("another shape was accepted")
    except dray.DrayError as error:
        assert "expected" in str(error), str(error)


def check(rng, folder):
    theirs = random_config(rng)
    theirs.save_pretrained(folder)
    config = dray.ModelConfig()
    dray.call(dray.lib.dray_model_config_load, folder.encode(), c.byref(config))
    state, checkpoint = whole_module(theirs)
    shape = [rng.randrange(1, 4) for _ in range(rng.randrange(1, 3))]
    placements = {n: [rng.choice([Replicate(), Shard(rng.randrange(t.ndim))]) for _ in shape]
                  for n, t in state.items()}
    seen = {n: np.zeros(t.shape, bool) for n, t in checkpoint.items()}
    for rank in range(int(np.prod(shape))):
        place = [int(i) for i in np.unravel_index(rank, shape)]
        locals_ = shard(state, placements, shape, rank)
        check_rank(config, theirs.tie_word_embeddings, locals_, placements, shape, place,
                   checkpoint, seen)
    check_flat(rng, config, theirs, state, checkpoint)
    for name, mask in seen.items():
        assert mask.all() or theirs.tie_word_embeddings and name == "lm_head.weight", name
    return config


def check_errors(config):
    layout = dray.Layout()
    region = layout.add_region(1 << 16)
    packed = b"model.layers.0.mlp.experts.gate_up_proj"
    for name, dtype, at, says in (
            (b"model.layers.9.mlp.experts.gate_up_proj", F32, 0, "has no parameter"),
            (b"model.layers.0.mlp.experts.gate_up_proj.weight", F32, 0, "has no parameter"),
            (b"lm_head.weight", F32, 0, "no tensor model.embed_tokens.weight"),
            (packed, 0, 0, "unknown dtype"), (packed, F32, (1 << 16) - 4, "outside region")):
        try:
            add(layout, config, name.decode(), region, at, None, [0], dtype)
            raise AssertionError(f"{name} was accepted")
        except dray.DrayError as error:
            assert says in str(error), (name, str(error))
    add(layout, config, packed.decode(), region, 0, None, [0])
    before = dray.packed(layout)
    try:
        add(layout, config, packed.decode(), region, 0, None, [0], 3)
        raise AssertionError("another dtype was accepted")
    except dray.DrayError as error:
        assert "is in the layout as F32" in str(error), str(error)
    assert dray.packed(layout) == before


def main():
    import tempfile
    rng = random.Random(SEED)
    torch.manual_seed(SEED)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(25 * SCALE):
            check(rng, folder)
    check_errors(dray.ModelConfig(
        family=b"qwen3_moe", vocab_size=8, hidden_size=4, intermediate_size=4, layers=1, heads=1,
        kv_heads=1, head_dim=4, tied=1, dtype=F32, experts=2, moe_intermediate_size=3))
    print(f"ok {25 * SCALE} modules")


main()
