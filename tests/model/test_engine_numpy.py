"""The engine's layout against the weight loaders of vLLM and SGLang, written again in numpy from
their documented behaviour: QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear and
VocabParallelEmbedding each copy, with narrow(), from a full checkpoint tensor into their parameter.
Random configurations, tensor-parallel sizes and ranks; every element carries its own number."""

import ctypes as c

from begin import needs, rng, scale as SCALE

with needs:
    import numpy as np

import dray

I64 = 7
PADDING = -1


def random_config():
    """A configuration and a tensor-parallel size that divides it."""
    tp = rng.choice([1, 2, 3, 4, 6, 8])
    kv = rng.choice([k for k in range(1, 13) if k % tp == 0 or tp % k == 0])
    heads = kv * rng.choice([g for g in range(1, 25) if kv * g % tp == 0])
    family = rng.choice(["llama", "qwen2", "qwen3"])
    return dray.ModelConfig(
        family=family.encode(), vocab_size=rng.randrange(1, 300),
        hidden_size=rng.randrange(1, 9), intermediate_size=tp * rng.randrange(1, 6),
        layers=rng.randrange(1, 4), heads=heads, kv_heads=kv, head_dim=rng.randrange(1, 6),
        max_positions=8, rms_norm_eps=1e-6, rope_theta=1e4, qkv_bias=rng.random() < 0.5,
        o_bias=rng.random() < 0.5, mlp_bias=rng.random() < 0.5, qk_norm=rng.random() < 0.5,
        tied=rng.random() < 0.5, dtype=I64), tp


def checkpoint(config):
    """Every tensor of the full layout, all elements different across the checkpoint."""
    handle = c.c_void_p()
    dray.call(dray.lib.dray_layout_full, c.byref(config), 0, 1, c.byref(handle))
    layout = dray.Layout(handle)
    tensors, next_id = {}, 0
    for t in layout.tensors():
        if t.alias_of < 0:
            shape = list(t.shape)[:t.ndim]
            n = int(np.prod(shape))
            tensors[t.name.decode()] = np.arange(next_id, next_id + n).reshape(shape)
            next_id += n
    return tensors


class Loader:
    """One rank's parameters, loaded as the engines load them."""

    def __init__(self, config, tensors, tp, rank, multiple):
        self.c, self.t, self.tp, self.rank = config, tensors, tp, rank
        self.params = {}
        padded = -(-config.vocab_size // multiple) * multiple
        assert padded % tp == 0
        self.vocab_per_rank = padded // tp
        self.vocab("model.embed_tokens.weight")
        for i in range(config.layers):
            self.layer(f"model.layers.{i}.")
        self.replicated("model.norm.weight")
        if config.tied:
            self.params["lm_head.weight"] = self.params["model.embed_tokens.weight"]
        else:
            self.vocab("lm_head.weight")

    def layer(self, p):
        kinds = ["weight"] + ["bias"] * self.c.qkv_bias
        for kind in kinds:
            self.qkv(p + "self_attn.", kind)
        self.row(p + "self_attn.o_proj", self.c.o_bias)
        if self.c.qk_norm:
            self.replicated(p + "self_attn.q_norm.weight")
            self.replicated(p + "self_attn.k_norm.weight")
        for kind in ["weight"] + ["bias"] * self.c.mlp_bias:
            self.merged(p + "mlp.", kind)
        self.row(p + "mlp.down_proj", self.c.mlp_bias)
        self.replicated(p + "input_layernorm.weight")
        self.replicated(p + "post_attention_layernorm.weight")

    def replicated(self, name):
        self.params[name] = self.t[name].copy()

    def vocab(self, name):
        loaded = self.t[name]
        param = np.full((self.vocab_per_rank, loaded.shape[1]), PADDING)
        start = self.rank * self.vocab_per_rank
        end = min(start + self.vocab_per_rank, loaded.shape[0])
        if end > start:
            param[:end - start] = loaded[start:end]
        self.params[name] = param

    def qkv(self, p, kind):
        size, tp = self.c.head_dim, self.tp
        num_heads = self.c.heads // tp
        if tp >= self.c.kv_heads:
            num_kv_heads, replicas = 1, tp // self.c.kv_heads
        else:
            num_kv_heads, replicas = self.c.kv_heads // tp, 1
        loaded = {s: self.t[f"{p}{s}_proj.{kind}"] for s in "qkv"}
        rows = (num_heads + 2 * num_kv_heads) * size
        param = np.full((rows,) + loaded["q"].shape[1:], PADDING)
        offsets = {"q": (0, num_heads * size),
                   "k": (num_heads * size, num_kv_heads * size),
                   "v": ((num_heads + num_kv_heads) * size, num_kv_heads * size)}
        for s, (shard_offset, shard_size) in offsets.items():
            shard_id = self.rank if s == "q" else self.rank // replicas
            start = shard_id * shard_size
            param[shard_offset:shard_offset + shard_size] = loaded[s][start:start + shard_size]
        self.params[f"{p}qkv_proj.{kind}"] = param

    def merged(self, p, kind):
        parts = []
        for s in ("gate", "up"):
            loaded = self.t[f"{p}{s}_proj.{kind}"]
            size = loaded.shape[0] // self.tp
            parts.append(loaded[self.rank * size:(self.rank + 1) * size])
        self.params[f"{p}gate_up_proj.{kind}"] = np.concatenate(parts)

    def row(self, p, bias):
        loaded = self.t[p + ".weight"]
        size = loaded.shape[1] // self.tp
        self.params[p + ".weight"] = loaded[:, self.rank * size:(self.rank + 1) * size]
        if bias:
            self.replicated(p + ".bias")


def engine_memory(config, tensors, spec):
    """The region's elements as dray's blocks fill it, and the bytes of all blocks."""
    handle = c.c_void_p()
    dray.call(dray.lib.dray_layout_engine, c.byref(config), c.byref(spec), c.byref(handle))
    layout = dray.Layout(handle)
    assert len(layout.regions()) == 1
    memory = np.full(layout.region(0).bytes // 8, PADDING)
    names = [t.name.decode() for t in layout.tensors()]
    for tensor, _, start, extent, offset, stride in layout.blocks():
        view = np.lib.stride_tricks.as_strided(memory[offset // 8:], extent, stride)
        assert (view == PADDING).all(), f"{names[tensor]} overlaps another block"
        view[...] = tensors[names[tensor]][tuple(slice(s, s + e) for s, e in zip(start, extent))]
    return memory


def parameter(config, spec, name):
    offset, ndim = c.c_uint64(), c.c_uint32()
    shape = (c.c_int64 * dray.MAX_DIMS)()
    dray.call(dray.lib.dray_engine_parameter, c.byref(config), c.byref(spec), name.encode(),
              c.byref(offset), c.byref(ndim), shape)
    return offset.value, tuple(shape[:ndim.value])


def one_case(i):
    config, tp = random_config()
    multiple = rng.choice([m for m in (1, 3, 8, 64, 120)
                           if -(-config.vocab_size // m) * m % tp == 0] or [tp])
    tensors = checkpoint(config)
    for rank in range(tp):
        spec = dray.EngineSpec(c.sizeof(dray.EngineSpec), tp, rank, 0,
                               0 if multiple == 64 else multiple, 0)
        want = Loader(config, tensors, tp, rank, multiple).params
        memory = engine_memory(config, tensors, spec)
        used = np.zeros(len(memory), dtype=bool)
        for name, param in want.items():
            offset, shape = parameter(config, spec, name)
            assert offset % 256 == 0 and shape == param.shape, (i, name, shape, param.shape)
            got = memory[offset // 8:offset // 8 + param.size].reshape(shape)
            assert (got == param).all(), f"case {i}, tp {tp}, rank {rank}: {name}"
            shared = name == "lm_head.weight" and config.tied
            assert shared or not used[offset // 8:offset // 8 + param.size].any(), name
            used[offset // 8:offset // 8 + param.size] = True
        assert (memory[~used] == PADDING).all(), "a block outside all parameters"
    return tp > config.kv_heads, config.vocab_size % multiple != 0


CASES = 600 * SCALE
results = [one_case(i) for i in range(CASES)]
replicated, padded = (sum(r[k] for r in results) for k in (0, 1))
assert replicated > CASES // 10 and padded > CASES // 10
print(f"ok {CASES} configurations: {replicated} with replicated KV heads, {padded} padded")
