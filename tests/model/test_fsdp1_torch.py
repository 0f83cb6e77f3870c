"""FSDP1's flat parameters against PyTorch: real FullyShardedDataParallel ranks over gloo, of which
every element of every local shard is compared, with and without original parameters, under mixed
precision, with wrapped and checkpointed modules; the whole-model builder against a transformers
model; ranges of random shapes against one element at a time; ShardedTensor chunks against Shard(0).
"""

import ctypes as c
import os
import random
import tempfile
import warnings

from begin import end_well, forked, needs, scale as SCALE, seed as SEED

with needs:
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, \
        ShardedStateDictConfig, ShardingStrategy, StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    import transformers

import dray

RANKS = 3
F32, BF16, I64 = 2, 3, 7
PADDING = -1
warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)


def fill(memory, layout, tensors):
    """Puts every block's elements of `tensors` into the region; returns how many blocks a tensor has."""
    counts = {}
    size = memory.itemsize
    names = [t.name.decode() for t in layout.tensors()]
    for tensor, _, start, extent, offset, stride in layout.blocks():
        full = tensors[names[tensor]]
        view = np.lib.stride_tricks.as_strided(memory[offset // size:], extent, stride)
        assert (view == PADDING).all(), f"{names[tensor]} overlaps another block"
        view[...] = full[tuple(slice(s, s + e) for s, e in zip(start, extent))]
        counts[names[tensor]] = counts.get(names[tensor], 0) + 1
    return counts


def ranges(count):
    """Elements [a, b) of random tensors, one at a time."""
    rng = random.Random(SEED)
    most = {1: 0, 2: 0, 3: 0, 4: 0}
    for i in range(count):
        ndim = rng.randrange(0, 5)
        shape = [rng.choice([0, 1, 1, 2, 3, 4, 5, 7]) if rng.random() < 0.9 else 1
                 for _ in range(ndim)]
        numel = int(np.prod(shape))
        first = rng.randrange(numel + 1)
        n = rng.choice([0, numel - first, rng.randrange(numel - first + 1)])
        if i < 4:  # all but the corners: as many rectangles as there can be
            ndim, shape, numel, first = i + 1, [3] * (i + 1), 3 ** (i + 1), 1
            n = numel - 2
        layout = dray.Layout()
        region = layout.add_region((n + 5) * 8)
        tensor = layout.add_tensor("t", I64, shape)
        dray.call(dray.lib.dray_layout_add_range, layout.handle, tensor, region, c.c_uint64(16),
                  c.c_int64(first), c.c_int64(n))
        memory = np.full(n + 5, PADDING)
        blocks = fill(memory, layout, {"t": np.arange(numel).reshape(shape)}).get("t", 0)
        want = list(range(first, first + n))
        assert memory.tolist() == [PADDING] * 2 + want + [PADDING] * 3, (shape, first, n)
        limit = 2 * max(1, ndim) - 1 if n else 0
        assert blocks <= limit, f"{shape} [{first}, +{n}): {blocks} blocks"
        if ndim:
            most[ndim] = max(most[ndim], blocks)
    assert most == {1: 1, 2: 3, 3: 5, 4: 7}, most  # the bound is reached
    print(f"ok {count} ranges")


def add_flat(layout, region, offset, flat_param, prefix, dtype):
    """What an adapter does with a FlatParameter."""
    infos = flat_param._shard_param_infos
    pieces = (dray.FlatPiece * max(1, len(infos)))()
    for piece, fqn, shape, info in zip(pieces, flat_param._fqns, flat_param._shapes, infos):
        piece.name, piece.ndim = fqn.encode(), len(shape)
        piece.shape[:len(shape)] = shape
        piece.first, piece.last = 0, -1
        if info.in_shard:
            piece.offset = info.offset_in_shard
            piece.first, piece.last = info.intra_param_start_idx, info.intra_param_end_idx
    flat = dray.FlatParameter(c.sizeof(dray.FlatParameter), dtype, prefix.encode(),
                              flat_param.numel(), flat_param._shard_numel_padded, pieces, len(infos))
    dray.call(dray.lib.dray_layout_add_flat, layout.handle, region, c.c_uint64(offset),
              c.byref(flat))


class Block(torch.nn.Module):
    def __init__(self, rng):
        super().__init__()
        inner, outer = rng.randrange(1, 9), rng.randrange(1, 9)
        self.first = torch.nn.Linear(inner, outer, bias=rng.random() < 0.5)
        self.norm = torch.nn.LayerNorm(outer)
        self.second = torch.nn.Linear(outer, inner)
        self.cube = torch.nn.Parameter(torch.empty([rng.randrange(1, 5) for _ in range(3)]))
        self.shared = self.first.weight if rng.random() < 0.3 else None


def numbered(model):
    """Every element of every parameter gets its own number; returns them by clean name."""
    tensors, at = {}, 1
    for name, p in model.named_parameters():
        with torch.no_grad():
            p.copy_(torch.arange(at, at + p.numel()).reshape(p.shape))
        clean = name.replace("_checkpoint_wrapped_module.", "")
        tensors[clean] = np.arange(at, at + p.numel()).reshape(p.shape)
        at += p.numel()
    assert at < 1 << 24  # exact in f32
    return tensors


def flat_parameters(model):
    """(clean prefix, FlatParameter) of every FSDP unit."""
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
            name = name.replace("_fsdp_wrapped_module", "").replace("..", ".").strip(".")
            yield (name + "." if name else ""), module._handle.flat_param


def real_shards(rank, count):
    rng = random.Random(SEED)
    padded = 0
    for i in range(count):
        orig, low = rng.random() < 0.5, rng.random() < 0.5
        strategy = rng.choice([ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP,
                               ShardingStrategy.NO_SHARD])
        blocks = [Block(rng) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.5:
            blocks = [checkpoint_wrapper(b) for b in blocks]
        model = torch.nn.Sequential(torch.nn.Embedding(rng.randrange(1, 9), 3), *blocks)
        tensors = numbered(model)
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=orig,
            device_id=torch.device("cpu"), sharding_strategy=strategy,
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) if low else None)
        for prefix, flat in flat_parameters(model):
            layout = dray.Layout()
            region = layout.add_region(64 + flat.numel() * 8)
            add_flat(layout, region, 64, flat, prefix, I64)
            memory = np.full(8 + flat.numel(), PADDING)
            fill(memory, layout, tensors)
            local = flat.detach().double().numpy().astype(np.int64)
            assert (memory[:8] == PADDING).all()
            held = memory[8:] != PADDING
            assert (memory[8:][held] == local[held]).all(), f"rank {rank}, case {i}: {prefix}"
            # What is in no block is padding: no parameter has such values.
            wrong = set(local[~held].tolist()) & set(range(1, 1 << 20))
            assert not wrong - {42}, f"rank {rank}, case {i}: {prefix} holds {wrong}"
            padded += int((~held).sum() > 0)
    of_all = torch.tensor(padded)  # how many a single rank has is chance
    dist.all_reduce(of_all)
    assert of_all > count // 4, of_all


def sharded_tensors(rank):
    """FSDP1's SHARDED_STATE_DICT without a mesh: ShardedTensors cut as Shard(0)."""
    rng = random.Random(SEED)
    model = Block(rng)
    numbered(model)
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT,
                                                  ShardedStateDictConfig()):
        state = model.state_dict()
    for name, tensor in state.items():
        shards = tensor.local_shards()
        layout = dray.Layout()
        shape = list(tensor.size())
        region = layout.add_region(int(np.prod(shape)) * 8)
        index = layout.add_tensor(name, I64, shape)
        layout.add_dtensor(index, region, 0, [RANKS], [(1, 0, 0)], [rank])
        want = [(list(s.metadata.shard_offsets), list(s.metadata.shard_sizes)) for s in shards
                if 0 not in s.metadata.shard_sizes]
        assert [(b[2], b[3]) for b in layout.blocks()] == want, (rank, name)


def config_of(hidden, layers, vocab, tied, rng):
    heads = rng.choice([2, 4])
    return transformers.Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=rng.randrange(1, 40),
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=2,
        tie_word_embeddings=tied, max_position_embeddings=16)


def whole_models(rank, folder, count):
    """The builder's shards of a transformers model wrapped a decoder layer at a time."""
    rng = random.Random(SEED + 1)
    for i in range(count):
        orig, tied = rng.random() < 0.5, rng.random() < 0.5
        low = rng.choice([None, torch.bfloat16])
        config = config_of(8 * rng.randrange(1, 4), rng.randrange(1, 4), rng.randrange(5, 40), tied,
                           rng)
        path = os.path.join(folder, f"{rank}.json")
        config.architectures = ["Qwen2ForCausalLM"]
        config.to_json_file(path)
        model = transformers.Qwen2ForCausalLM(config).float()
        tensors = numbered(model)
        layer = type(model.model.layers[0])
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({layer}), use_orig_params=orig,
            device_id=torch.device("cpu"),
            mixed_precision=MixedPrecision(param_dtype=low) if low else None)
        ours, handle = dray.ModelConfig(), c.c_void_p()
        dray.call(dray.lib.dray_model_config_load, path.encode(), c.byref(ours))
        spec = dray.Fsdp1Spec(c.sizeof(dray.Fsdp1Spec), rank, RANKS, I64, orig,
                              BF16 if low else F32, 1)
        dray.call(dray.lib.dray_layout_fsdp1, c.byref(ours), c.byref(spec), c.byref(handle))
        layout = dray.Layout(handle)
        memory = np.full(layout.region(0).bytes // 8, PADDING)
        fill(memory, layout, tensors)
        at = 0
        for prefix, flat in flat_parameters(model):
            local = flat.detach().double().numpy().astype(np.int64)
            got = memory[at:at + flat.numel()]
            held = got != PADDING
            assert (got[held] == local[held]).all(), f"rank {rank}, case {i}: {prefix}"
            assert held.sum() == sum(x.numel_in_shard for x in flat._shard_param_infos if x.in_shard)
            at += -(-flat.numel() // 32) * 32
        assert at == len(memory)


def one_rank(rank, folder):
    torch.manual_seed(SEED)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=RANKS)
    real_shards(rank, 10 * SCALE)
    sharded_tensors(rank)
    whole_models(rank, folder, 3 * SCALE)
    dist.destroy_process_group()


def over_gloo():
    with tempfile.TemporaryDirectory() as folder:
        end_well([forked(one_rank, rank, folder) for rank in range(RANKS)])
    print(f"ok {RANKS} processes")


def refusals():
    def refused(says, pieces, numel=10, padding=0, dtype=I64, room=80):
        layout = dray.Layout()
        region = layout.add_region(room)
        array = (dray.FlatPiece * max(1, len(pieces)))(*pieces)
        flat = dray.FlatParameter(c.sizeof(dray.FlatParameter), dtype, None, numel, padding,
                                  array if pieces else None, len(pieces))
        try:
            dray.call(dray.lib.dray_layout_add_flat, layout.handle, region, c.c_uint64(0),
                      c.byref(flat))
        except dray.DrayError as error:
            assert says in str(error), error
            assert not layout.blocks() and not layout.tensors()
            return
        raise AssertionError(f"accepted; expected: {says}")

    def piece(offset, first, last, shape=(4, 5)):
        return dray.FlatPiece(b"t", len(shape), (c.c_int64 * 4)(*shape), offset, first, last)

    refused("StateDictType.SHARDED_STATE_DICT", [])
    refused("elements 0 to 20 of 20", [piece(0, 0, 20)], numel=30, room=240)
    refused("elements -1 to 3 of 20", [piece(0, -1, 3)])
    refused("expected between 0 and 10", [piece(0, 0, 10)])
    refused("expected between 0 and 7", [piece(0, 0, 9)], padding=3)
    refused("expected between 5 and 10", [piece(0, 0, 4), piece(4, 0, 4)])
    refused("expected between 0 and 10", [piece(-1, 0, 4)])
    refused("end outside region", [piece(0, 0, 9)], room=79)
    refused("unknown dtype", [piece(0, 0, 9)], dtype=99)
    refused("of which 11 are padding", [], padding=11)
    refused("shape [4, -5]", [piece(0, 0, 9, (4, -5))])
    print("ok refusals")


if __name__ == "__main__":
    print("seed", SEED)
    ranges(4000 * SCALE)
    refusals()
    over_gloo()
