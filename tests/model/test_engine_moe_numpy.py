"""The engine's layout of models with experts, latent attention and FP8 against the weight loaders of
SGLang and vLLM (engines.py). Random configurations and sizes; where the engine refuses a size, dray
must, too. Every element carries its own number, and goes through dray's planner from whole tensors
into the engine's memory."""

import ctypes as c

from begin import needs, rng, scale as SCALE

with needs:
    import numpy as np

import dray
import engines
from engines import BF16, BLOCK, PADDING, TENSOR


# ---- random cases ------------------------------------------------------------------------------

def often(likely, *others):
    return likely if rng.random() < 0.9 else rng.choice(others)


def random_config(tp, ep, dp, block):
    family = rng.choice(["qwen3_moe", "mixtral", "deepseek_v3", "kimi_k2", "glm4_moe", "qwen3"])
    moe, latent = family != "qwen3", family in ("deepseek_v3", "kimi_k2")
    unit = block * often(1, 0) or 1  # sizes are multiples of the block, or of nothing
    attention = tp // dp
    kv = rng.choice([k for k in (1, 2, 4, 8) if k % attention == 0 or attention % k == 0])
    heads = kv * rng.choice([g for g in (1, 2, 3, 4, 6, 8) if kv * g % attention == 0])
    cf = dray.ModelConfig(
        family=family.encode(), vocab_size=rng.randrange(1, 100), hidden_size=unit * rng.randrange(1, 3),
        intermediate_size=tp * unit * rng.randrange(1, 3), layers=rng.randrange(1, 5), heads=heads,
        kv_heads=heads if latent else kv, head_dim=unit * rng.randrange(1, 3), max_positions=8,
        rms_norm_eps=1e-6, rope_theta=1e4, qkv_bias=not latent and rng.random() < 0.5,
        qk_norm=not latent and rng.random() < 0.5, tied=rng.random() < 0.4, dtype=BF16)
    if moe:
        cf.experts = ep * rng.randrange(1, 4) + often(0, 1)
        cf.moe_intermediate_size = tp // ep * unit * rng.randrange(1, 3)
        cf.sparse_step = rng.choice([0, 1, 2]) if family == "qwen3_moe" else 0
        cf.first_k_dense = rng.randrange(3) if family not in ("qwen3_moe", "mixtral") else 0
        if family not in ("qwen3_moe", "mixtral"):
            cf.shared_experts = rng.choice([0, 1, 1, tp // np.gcd(tp, int(cf.moe_intermediate_size))])
            cf.mtp_layers = rng.choice([0, 1, 1, 2])
    if latent:
        cf.q_lora_rank = rng.choice([0, unit * rng.randrange(1, 3)])
        cf.kv_lora_rank = unit * rng.randrange(1, 3)
        cf.qk_nope_head_dim, cf.v_head_dim = unit * rng.randrange(1, 3), unit * rng.randrange(1, 3)
        cf.qk_rope_head_dim = unit * rng.randrange(1, 3)
        cf.head_dim = cf.qk_nope_head_dim + cf.qk_rope_head_dim
    return cf


# ---- dray --------------------------------------------------------------------------------------

def checkpoint(case):
    """Every tensor of the full layout and, of matrices, the scales that a quantised one would have."""
    handle = c.c_void_p()
    dray.call(dray.lib.dray_layout_full, c.byref(case.config), 0, 1, c.byref(handle))
    layout = dray.Layout(handle)
    tensors, next_id = {}, 0

    def add(name, shape):
        nonlocal next_id
        n = int(np.prod(shape))
        tensors[name] = np.arange(next_id, next_id + n).reshape(shape)
        next_id += n

    b = case.block
    for t in layout.tensors():
        if t.alias_of >= 0:
            continue
        name, shape = t.name.decode(), list(t.shape)[:t.ndim]
        add(name, shape)
        if len(shape) == 2 and case.quant == BLOCK:
            add(name + "_scale_inv", [-(-s // b) for s in shape])
        elif len(shape) == 2 and case.quant == TENSOR:
            add(name + "_scale", [])
    return tensors


def source_of(tensors, like):
    """A layout that holds, whole, what `like` wants, in its dtypes; and the ids at every byte."""
    layout = dray.Layout()
    wanted = [t for t in like.tensors() if t.alias_of < 0]
    size = sum(tensors[t.name.decode()].size * 4 for t in wanted)
    region = layout.add_region(size)
    ids, at = np.full(size, PADDING, dtype=np.int64), 0
    for t in wanted:
        data = tensors[t.name.decode()]
        element = dray.lib.dray_dtype_size(t.dtype)
        index = layout.add_tensor(t.name.decode(), t.dtype, data.shape)
        ids[at:at + data.size * element:element] = data.ravel()
        dray.call(dray.lib.dray_layout_add_dense, layout.handle, index, region,
                  dray.i64s([0] * data.ndim), dray.i64s(data.shape), c.c_uint64(at))
        at += data.size * element
    for i in range(dray.lib.dray_layout_tensor_count(like.handle)):
        quant = dray.lib.dray_layout_quant(like.handle, i)
        if like.tensor(i).alias_of < 0 and quant:
            q = quant.contents
            mine = dray.Quant(q.kind, q.scale_format, layout.find(like.tensor(q.scales).name), q.block)
            dray.call(dray.lib.dray_layout_set_quant, layout.handle,
                      layout.find(like.tensor(i).name), c.byref(mine))
    return layout, ids


def planned(tensors, layout):
    """The engine's memory by byte, as dray's plan fills it from whole tensors."""
    source, ids = source_of(tensors, layout)
    memory = np.full(layout.region(0).bytes, PADDING, dtype=np.int64)
    for copy in dray.plan([source], layout):
        n = copy.ndim
        extent = list(copy.extent)[:n]
        take = np.lib.stride_tricks.as_strided(ids[copy.source_offset:], extent,
                                               [s * 8 for s in list(copy.source_stride)[:n]])
        put = np.lib.stride_tricks.as_strided(memory[copy.destination_offset:], extent,
                                              [s * 8 for s in list(copy.destination_stride)[:n]])
        assert copy.source_dtype == copy.destination_dtype
        assert (put == PADDING).all(), "filled twice"
        put[...] = take
    return memory


def parameter(case, spec, name):
    offset, ndim = c.c_uint64(), c.c_uint32()
    shape = (c.c_int64 * dray.MAX_DIMS)()
    dray.call(dray.lib.dray_engine_parameter, c.byref(case.config), c.byref(spec), name.encode(),
              c.byref(offset), c.byref(ndim), shape)
    return offset.value, tuple(shape[:ndim.value])


def compare(say, case, spec, want, memory):
    used = np.zeros(len(memory), dtype=bool)
    seen = {}
    for name, p in want.items():
        offset, shape = parameter(case, spec, name)
        assert offset % 256 == 0 and shape == p.data.shape, (say, name, shape, p.data.shape)
        size = p.data.size * p.element
        got = memory[offset:offset + size:p.element].reshape(shape)
        assert (got == p.data).all(), f"{say}: {name}"
        if id(p) in seen:
            assert seen[id(p)] == offset, f"{say}: {name} is not shared"
            continue
        seen[id(p)] = offset
        assert not used[offset:offset + size].any(), f"{say}: {name} overlaps"
        used[offset:offset + size] = True
    assert (memory[~used] == PADDING).all(), f"{say}: a block outside all parameters"


def one_case(i):
    case = engines.Case(rng, random_config, [0, BLOCK, BLOCK, TENSOR])
    tensors = checkpoint(case)
    wide = rng.randrange(case.tp * case.pp)  # one rank of each case, and all of some
    for r in range(case.tp * case.pp):
        if r != wide and i % 4:
            continue
        tp_rank, pp_rank = r % case.tp, r // case.tp
        say = f"case {i}: {case.config.family.decode()}, tp {case.tp} rank {tp_rank}, stage {pp_rank} " \
              f"of {case.pp}, ep {case.ep}, dp {case.dp}"
        spec, keep = case.spec(tp_rank, pp_rank)
        handle = c.c_void_p()
        try:
            want = engines.Loader(case, tensors, tp_rank, pp_rank).params
        except engines.Refused as why:
            want = why
        try:
            dray.call(dray.lib.dray_layout_engine, c.byref(case.config), c.byref(spec),
                      c.byref(handle))
        except dray.DrayError as error:
            assert isinstance(want, engines.Refused), f"{say}: {error}"
            return "refused", case
        assert not isinstance(want, engines.Refused), f"{say}: accepted, but: {want}"
        compare(say, case, spec, want, planned(tensors, dray.Layout(handle)))
        del keep
    return "loaded", case


CASES = 250 * SCALE
count = {}
for i in range(CASES):
    outcome, case = one_case(i)
    count[outcome] = count.get(outcome, 0) + 1
    if outcome == "loaded":
        for key in ("map", "quant", "ignore", "transposed", "fused", "redundant", "up_first"):
            count[key] = count.get(key, 0) + bool(getattr(case, key))
        count["pp"] = count.get("pp", 0) + (case.pp > 1)
        count["dp"] = count.get("dp", 0) + (case.dp > 1)
        count["copies"] = count.get("copies", 0) + (case.draft == engines.COPIES and case.config.mtp_layers > 0)
print(f"ok {CASES} cases: {count}")
assert min(count.values()) > CASES // 50, count
