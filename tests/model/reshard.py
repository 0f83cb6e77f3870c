"""The suite behind test_reshard.py and soak_reshard.py: random models of every family, random
placements on both sides, dray's plan between them, and an oracle in numpy for what every byte of
every member's memory must be.

A side is what all members of one placement hold: `layouts` as dray builds them, and memory(poison)
as the framework's own rules cut the checkpoint, written here from those rules and never by asking
dray where anything goes (only where in its region a parameter begins). Memory in no block is filled
with the poison, which differs on the two sides: a plan that moved one byte too many shows.

A trainer or an engine is added by a function (case) -> Side in TRAINERS or ENGINES."""

import ctypes as c
import os
import random

import numpy as np

import dray
import engines

F32, I64 = 2, 7
DTYPES = {F32: np.float32, I64: np.int64}
TRAINER_POISON, ENGINE_POISON = 0xA5, 0x5A
ALIGN = 256
FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "kimi_k2", "glm4_moe"]

_copies = c.CDLL(os.path.join(os.path.dirname(os.environ["DRAY_LIBRARY"]),
                              "model_shared_copies.so"))


class Case:
    """A model, its checkpoint and a source of random choices. Every element of the checkpoint has
    its own number; what is never cast is F32, all else I64."""

    def __init__(self, seed):
        self.seed = seed
        self.rng = random.Random(seed)
        self.config = random_config(self.rng)
        full = dray.model_layout(dray.lib.dray_layout_full, self.config, 0, 1)
        self.full, self.names, at = {}, [], 0
        for t in full.tensors():
            name = t.name.decode()
            self.names.append(name)
            if t.alias_of < 0:
                shape = list(t.shape)[:t.ndim]
                n = int(np.prod(shape))
                self.full[name] = np.arange(at, at + n).reshape(shape).astype(DTYPES[t.dtype])
                at += n
        assert at < 1 << 24  # exact in F32


def random_config(rng):
    """Sizes that many parallel sizes divide."""
    family = rng.choice(FAMILIES)
    kv = rng.choice([1, 2, 2, 4])
    heads = kv * rng.choice([1, 2, 4])
    config = dray.ModelConfig(
        family=family.encode(), vocab_size=rng.randrange(1, 70), hidden_size=4 * rng.randrange(1, 3),
        intermediate_size=4 * rng.randrange(1, 4), layers=rng.randrange(1, 5), heads=heads,
        kv_heads=kv, head_dim=2 * rng.randrange(1, 3), max_positions=8, rms_norm_eps=1e-6,
        rope_theta=1e4, tied=rng.random() < 0.4, dtype=I64)
    flags = ["o_bias", "qk_norm"] if family not in ("mixtral", "deepseek_v3", "kimi_k2") else []
    flags += ["qkv_bias"] * bool(flags) + ["mlp_bias"] * (family == "llama")
    for flag in flags:
        setattr(config, flag, rng.random() < 0.5)
    if family in ("llama", "qwen2", "qwen3"):
        return config
    config.experts = rng.choice([1, 2, 4, 4, 6, 8])
    config.moe_intermediate_size = 4 * rng.randrange(1, 3)
    if family == "qwen3_moe":
        config.sparse_step = rng.choice([0, 1, 2])
        config.dense_layers[0] = rng.choice([0, 0, 1, 5])
    if family in ("deepseek_v3", "kimi_k2", "glm4_moe"):
        config.first_k_dense = rng.randrange(config.layers + 1)
        config.shared_experts = rng.randrange(3)
        config.mtp_layers = rng.choice([0, 0, 1, 2])
    if family in ("deepseek_v3", "kimi_k2"):
        config.kv_heads = heads
        config.q_lora_rank = rng.choice([0, 4, 8])
        config.kv_lora_rank = 4 * rng.randrange(1, 3)
        config.qk_nope_head_dim, config.qk_rope_head_dim = rng.choice([(2, 2), (4, 2), (1, 3)])
        config.head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        config.v_head_dim = rng.randrange(1, 4)
    return config


def is_moe(config, layer):
    """Does the layer have experts? (modeling_qwen3_moe.py, modeling_deepseek_v3.py)"""
    if not config.experts or layer < config.first_k_dense:
        return False
    mlp_only = config.dense_layers[0] >> layer & 1
    return not mlp_only and (layer + 1) % max(1, config.sparse_step) == 0


class Member:
    """One member's region: arrays at offsets."""

    def __init__(self, layout):
        self.layout = layout
        self.parts = []  # offset, array, rows that are not padding (None: all)

    def memory(self, poison):
        out = np.full(self.layout.region(0).bytes, poison, np.uint8)
        for offset, array, rows in self.parts:
            data = np.ascontiguousarray(array if rows is None else array[:rows])
            out[offset:offset + data.nbytes] = np.frombuffer(data.tobytes(), np.uint8)
        return out


class Side:
    def __init__(self, name, members):
        self.name, self.members = name, members


def aligned(at):
    return (at + ALIGN - 1) // ALIGN * ALIGN


# ---- trainers ------------------------------------------------------------------------------------

def full_side(case):
    member = Member(dray.model_layout(dray.lib.dray_layout_full, case.config, 0, 1))
    at = 0
    for array in case.full.values():
        member.parts.append((at, array, None))
        at = aligned(at + array.nbytes)
    return Side("full", [member])


def chunk(array, dim, parts, index):
    """torch.chunk, with empty pieces at the end."""
    size = array.shape[dim]
    each = -(-size // parts)
    start = min(size, each * index)
    return np.take(array, range(start, min(size, start + each)), axis=dim)


def fsdp_side(case):
    world = case.rng.randrange(1, 7)
    members = []
    for rank in range(world):
        member = Member(dray.model_layout(dray.lib.dray_layout_fsdp, case.config, 0, rank, world,
                                          1))
        at = 0
        for array in case.full.values():
            part = chunk(array, 0, world, rank)
            member.parts.append((at, part, None))
            at = aligned(at + part.nbytes)
        members.append(member)
    return Side(f"fsdp:{world}", members)


def fsdp1_side(case):
    """FullyShardedDataParallel, a unit for each decoder layer and one for the root: parameters one
    after the other, with padding where original parameters are kept; chunk() of all; buffers
    whole."""
    world, orig = case.rng.randrange(1, 6), case.rng.randrange(2)
    align = 16 // 8 if orig else 1
    units, buffers = {}, []
    for name, array in case.full.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        if array.dtype != DTYPES[I64]:
            buffers.append(array)
            continue
        units.setdefault(int(layer) + 1 if layer else 0, []).append(array.ravel())
    members = []
    for rank in range(world):
        spec = dray.Fsdp1Spec(c.sizeof(dray.Fsdp1Spec), rank, world, I64, orig, 0, 1)
        member = Member(dray.model_layout(dray.lib.dray_layout_fsdp1, case.config, c.byref(spec)))
        members.append(member)
        at = 0
        for unit in sorted(units):
            parts, held, end = [], [], 0  # what is padding is told by `held`
            for array in units[unit]:
                pad = -end % align
                parts += [np.zeros(pad, np.int64), array]
                held += [False] * pad + [True] * array.size
                end += pad + array.size
            total = end + (-end % world if orig else 0)
            each = -(-total // world)
            flat = np.concatenate(parts + [np.zeros(total - end, np.int64)])
            held = np.array(held + [False] * (total - end))
            mine = slice(each * rank, min(total, each * (rank + 1)))
            start = at
            for i, keep in enumerate(held[mine]):
                if keep:
                    member.parts.append((start + i * 8, flat[mine][i:i + 1], None))
            at = aligned(at + each * 8)
        for array in buffers:
            member.parts.append((at, array, None))
            at = aligned(at + array.nbytes)
    return Side(f"fsdp1 {world} orig {orig}", members)


def dtensor_side(case):
    """Every tensor with placements of its own on one mesh."""
    shape = [case.rng.randrange(1, 4) for _ in range(case.rng.randrange(1, 4))]
    placements = {n: [case.rng.choice([None, 0, a.ndim - 1]) for _ in shape]
                  for n, a in case.full.items()}
    members = []
    for rank in range(int(np.prod(shape))):
        place = [int(i) for i in np.unravel_index(rank, shape)]
        locals_ = {}
        for name, array in case.full.items():
            for size, at, dim in zip(shape, place, placements[name]):
                array = array if dim is None else chunk(array, dim, size, at)
            locals_[name] = array
        layout = dray.Layout()
        member = Member(layout)
        region = layout.add_region(sum(aligned(a.nbytes) for a in locals_.values()))
        at, index = 0, {}
        for name, array in locals_.items():
            whole = case.full[name]
            dtype = F32 if whole.dtype == np.float32 else I64
            index[name] = layout.add_tensor(name, dtype, whole.shape)
            local = layout.add_dtensor(
                index[name], region, at, shape,
                [(0, 0, 0) if d is None else (1, d, 0) for d in placements[name]], place)
            assert tuple(local) == array.shape, (name, local, array.shape)
            member.parts.append((at, array, None))
            at += aligned(array.nbytes)
        for name in case.names:
            if name not in index:
                layout.add_alias(name, index[alias_target(case, name)])
        members.append(member)
    return Side(f"dtensor {shape}", members)


def alias_target(case, name):
    """What a tied name is another name of."""
    if name.endswith("embed_tokens.weight") or case.config.tied:
        return "model.embed_tokens.weight"
    return "lm_head.weight"


# Megatron-Core, from its own rules.

def megatron_sizes(case):
    """Sizes that Megatron accepts for this model."""
    rng, config = case.rng, case.config
    width = [config.hidden_size, config.intermediate_size]
    if config.kv_lora_rank == 0:
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        width.append(rows)
    if config.experts:
        width.append(max(1, config.shared_experts) * config.moe_intermediate_size)
    tp = rng.choice([t for t in (1, 1, 2, 4) if config.heads % t == 0 and
                     all(w % t == 0 for w in width)
                     and (config.kv_heads % t == 0 or t % config.kv_heads == 0)])
    cp, dp = rng.choice([1, 1, 2]), rng.choice([1, 1, 2, 3])
    ep = etp = 1
    if config.experts:
        pairs = [(e, t) for e in (1, 2, 3, 4) for t in (1, 2, 4)
                 if config.experts % e == 0 and config.moe_intermediate_size % t == 0
                 and tp * cp * dp % (e * t) == 0]
        ep, etp = rng.choice(pairs)
    pp = rng.choice([p for p in (1, 1, 2, 3, 4) if p <= config.layers])
    s = dict(tp=tp, cp=cp, ep=ep, etp=etp, dp=dp, pp=pp, vpp=1, first=0, last=0, emb=0, loss=0,
             experts=rng.randrange(3), vocab=rng.choice([0, 1, 8]))
    layers = config.layers
    if layers % pp == 0:
        s["vpp"] = rng.choice([v for v in (1, 1, 2, 4) if layers // pp % v == 0
                               and (pp > 1 or v == 1)])
        return s
    first, last = [(f, l) for f in range(layers + 1) for l in range(layers + 1)
                   if f + l and (pp - (f > 0) - (l > 0) > 0)
                   and (layers - f - l) >= 0
                   and (layers - f - l) % (pp - (f > 0) - (l > 0)) == 0][0]
    s["first"], s["last"] = first, last
    if (layers + 1) % pp == 0 and rng.random() < 0.5:
        s["first"], s["last"], s[rng.choice(["emb", "loss"])] = 0, 0, 1
    return s


def megatron_chunk(config, s, pp_rank, vp):
    """Numbers of the layers of a model chunk (get_num_layers_to_build and
    get_transformer_layer_offset)."""
    layers, pp, vpp = config.layers, s["pp"], s["vpp"]
    if s["first"] or s["last"]:
        middle = (layers - s["first"] - s["last"]) // (pp - bool(s["first"]) - bool(s["last"]))
        counts = [middle] * pp
        if s["first"]:
            counts[0] = s["first"]
        if s["last"]:
            counts[-1] = s["last"]
        start = sum(counts[:pp_rank])
        return range(start, start + counts[pp_rank])
    total = layers + s["emb"] + s["loss"]
    count = total // pp // vpp
    start = vp * (total // vpp) + pp_rank * count
    if s["emb"]:
        if pp_rank == 0 and vp == 0:
            count -= 1
        else:
            start -= 1
    if s["loss"] and pp_rank == pp - 1 and vp == vpp - 1:
        count -= 1
    return range(start, start + count)


class MegatronRank:
    """The parameters of one rank: {(chunk, name): (array, rows that are not padding)}."""

    def __init__(self, case, s, rank):
        self.c, self.t, self.s = case.config, case.full, s
        stage = s["tp"] * s["cp"] * s["dp"]
        self.tp, self.pp = rank % s["tp"], rank // stage
        self.etp, self.ep = rank % stage % s["etp"], rank % stage // s["etp"] % s["ep"]
        self.params = {}
        for vp in range(s["vpp"]):
            self.vp = vp
            first = self.pp == 0 and vp == 0
            last = self.pp == s["pp"] - 1 and vp == s["vpp"] - 1
            if first or last and self.c.mtp_layers:
                self.vocab("embedding.word_embeddings.weight", "model.embed_tokens.weight")
            for local, layer in enumerate(megatron_chunk(self.c, s, self.pp, vp)):
                self.layer(f"decoder.layers.{local}.", layer)
            if last:
                self.last(first)

    def put(self, name, array, rows=None):
        self.params[self.vp, name] = array, rows

    def vocab(self, name, tensor):
        whole, tp = self.t[tensor], self.s["tp"]
        multiple = (self.s["vocab"] or 128) * tp
        padded = -(-len(whole) // multiple) * multiple
        rows = padded // tp
        start = self.tp * rows
        local = np.zeros((rows,) + whole.shape[1:], whole.dtype)
        mine = whole[start:start + rows]
        local[:len(mine)] = mine
        self.put(name, local, len(mine))

    def last(self, first):
        self.put("decoder.final_layernorm.weight", self.t["model.norm.weight"])
        if not self.c.tied:
            self.vocab("output_layer.weight", "lm_head.weight")
        elif not first:
            self.vocab("output_layer.weight", "model.embed_tokens.weight")
        for i in range(self.c.mtp_layers):
            to, of = f"mtp.layers.{i}.", f"model.layers.{self.c.layers + i}."
            self.put(to + "enorm.weight", self.t[of + "enorm.weight"])
            self.put(to + "hnorm.weight", self.t[of + "hnorm.weight"])
            self.put(to + "eh_proj.weight", self.column(self.t[of + "eh_proj.weight"]))
            self.put(to + "final_layernorm.weight", self.t[of + "shared_head.norm.weight"])
            self.layer(to + "transformer_layer.", self.c.layers + i)

    def column(self, whole):
        return np.split(whole, self.s["tp"])[self.tp]

    def row(self, whole):
        return np.split(whole, self.s["tp"], axis=1)[self.tp]

    def layer(self, to, layer):
        of = f"model.layers.{layer}."
        if self.c.kv_lora_rank:
            self.put(to + "input_layernorm.weight", self.t[of + "input_layernorm.weight"])
            self.latent(to + "self_attention.", of + "self_attn.")
        else:
            self.put(to + "self_attention.linear_qkv.layer_norm_weight",
                     self.t[of + "input_layernorm.weight"])
            self.attention(to + "self_attention.", of + "self_attn.")
        norm = self.t[of + "post_attention_layernorm.weight"]
        if is_moe(self.c, layer):
            self.put(to + "pre_mlp_layernorm.weight", norm)
            moe = "block_sparse_moe." if self.c.family == b"mixtral" else "mlp."
            self.moe(to + "mlp.", of + moe)
        else:
            self.put(to + "mlp.linear_fc1.layer_norm_weight", norm)
            self.mlp(to + "mlp.", of + "mlp.")

    def attention(self, to, of):
        groups, dim = self.c.kv_heads, self.c.head_dim
        for kind in ["weight"] + ["bias"] * self.c.qkv_bias:
            q, k, v = (self.t[f"{of}{x}_proj.{kind}"] for x in "qkv")
            rest = q.shape[1:]
            whole = np.concatenate([q.reshape((groups, -1) + rest),
                                    k.reshape((groups, dim) + rest),
                                    v.reshape((groups, dim) + rest)], axis=1)
            self.put(f"{to}linear_qkv.{kind}", self.column(whole.reshape((-1,) + rest)))
        self.put(to + "linear_proj.weight", self.row(self.t[of + "o_proj.weight"]))
        if self.c.o_bias:
            self.put(to + "linear_proj.bias", self.t[of + "o_proj.bias"])
        if self.c.qk_norm:
            self.put(to + "q_layernorm.weight", self.t[of + "q_norm.weight"])
            self.put(to + "k_layernorm.weight", self.t[of + "k_norm.weight"])

    def latent(self, to, of):
        t = self.t
        if self.c.q_lora_rank:
            self.put(to + "linear_q_down_proj.weight", t[of + "q_a_proj.weight"])
            self.put(to + "linear_q_up_proj.layer_norm_weight", t[of + "q_a_layernorm.weight"])
            self.put(to + "linear_q_up_proj.weight", self.column(t[of + "q_b_proj.weight"]))
        else:
            self.put(to + "linear_q_proj.weight", self.column(t[of + "q_proj.weight"]))
        self.put(to + "linear_kv_down_proj.weight", t[of + "kv_a_proj_with_mqa.weight"])
        self.put(to + "linear_kv_up_proj.layer_norm_weight", t[of + "kv_a_layernorm.weight"])
        self.put(to + "linear_kv_up_proj.weight", self.column(t[of + "kv_b_proj.weight"]))
        self.put(to + "linear_proj.weight", self.row(t[of + "o_proj.weight"]))

    def mlp(self, to, of):
        for kind in ["weight"] + ["bias"] * self.c.mlp_bias:
            gate, up = (self.column(self.t[f"{of}{x}_proj.{kind}"]) for x in ("gate", "up"))
            self.put(f"{to}linear_fc1.{kind}", np.concatenate([gate, up]))
        self.put(to + "linear_fc2.weight", self.row(self.t[of + "down_proj.weight"]))
        if self.c.mlp_bias:
            self.put(to + "linear_fc2.bias", self.t[of + "down_proj.bias"])

    def expert(self, of, index):
        """Linear weights of a global expert: fc1 [2 x intermediate / etp, hidden] and fc2."""
        names = ("w1", "w3", "w2") if "block_sparse_moe" in of else (
            "gate_proj", "up_proj", "down_proj")
        gate, up, down = (self.t[f"{of}experts.{index}.{n}.weight"] for n in names)
        fc1 = [np.split(x, self.s["etp"])[self.etp] for x in (gate, up)]
        return np.concatenate(fc1), np.split(down, self.s["etp"], axis=1)[self.etp]

    def moe(self, to, of):
        self.put(to + "router.weight", self.t[of + "gate.weight"])
        if of + "gate.e_score_correction_bias" in self.t:
            self.put(to + "router.expert_bias", self.t[of + "gate.e_score_correction_bias"])
        local = self.c.experts // self.s["ep"]
        experts = [self.expert(of, self.ep * local + i) for i in range(local)]
        if self.s["experts"] == 1:  # the weights of all experts, transposed, in one
            hidden = self.c.hidden_size
            self.put(to + "experts.weight1",
                     np.stack([fc1.T for fc1, _ in experts]).reshape(hidden, -1))
            self.put(to + "experts.weight2",
                     np.stack([fc2.T for _, fc2 in experts]).reshape(-1, hidden))
        for i, (fc1, fc2) in enumerate(experts):
            if self.s["experts"] == 0:
                self.put(f"{to}experts.linear_fc1.weight{i}", fc1)
                self.put(f"{to}experts.linear_fc2.weight{i}", fc2)
            if self.s["experts"] == 2:
                self.put(f"{to}experts.local_experts.{i}.linear_fc1.weight", fc1)
                self.put(f"{to}experts.local_experts.{i}.linear_fc2.weight", fc2)
        if self.c.shared_experts:
            self.mlp(to + "shared_experts.", of + "shared_experts.")


def megatron_spec(s):
    return dray.MegatronSpec(
        size=c.sizeof(dray.MegatronSpec), tp=s["tp"], cp=s["cp"], ep=s["ep"], etp=s["etp"],
        dp=s["dp"], pp=s["pp"], vpp=s["vpp"], experts=s["experts"], kind=1,
        vocab_multiple=s["vocab"], first_stage_layers=s["first"], last_stage_layers=s["last"],
        embedding_in_split=s["emb"], loss_in_split=s["loss"])


def megatron_parameters(config, spec):
    listed, count = c.POINTER(dray.MegatronParameter)(), c.c_uint32()
    dray.call(dray.lib.dray_megatron_parameters, c.byref(config), c.byref(spec), c.byref(listed),
              c.byref(count))
    out = [dray.MegatronParameter.from_buffer_copy(listed[i]) for i in range(count.value)]
    dray._libc.free(listed)
    return out


def add_by_name(config, spec, parameters, size):
    """The same layout, parameter by parameter, as an adapter registers them."""
    layout = dray.Layout()
    region = layout.add_region(size, name=b"weights")
    for p in parameters:
        dray.call(dray.lib.dray_layout_add_megatron, layout.handle, c.byref(config), c.byref(spec),
                  p.vp_stage, b"module.module." + p.name, p.dtype, p.ndim, p.shape, region,
                  c.c_uint64(p.offset))
    return layout


def megatron_side(case):
    s = megatron_sizes(case)
    members, checked = [], case.rng.random() < 0.1
    world = s["tp"] * s["cp"] * s["dp"] * s["pp"]
    for rank in range(world):
        spec = megatron_spec(s)
        dray.call(dray.lib.dray_megatron_place, c.byref(spec), rank, None)
        layout = dray.model_layout(dray.lib.dray_layout_megatron, case.config, c.byref(spec))
        member = Member(layout)
        oracle = MegatronRank(case, s, rank).params
        listed = megatron_parameters(case.config, spec)
        names = {(p.vp_stage, p.name.decode()) for p in listed}
        assert names == set(oracle), (s, rank, names ^ set(oracle))
        for p in listed:
            array, rows = oracle[p.vp_stage, p.name.decode()]
            assert tuple(p.shape[:p.ndim]) == array.shape, (p.name, list(p.shape), array.shape)
            assert DTYPES[p.dtype] == array.dtype
            member.parts.append((p.offset, array, rows))
        if checked:
            again = add_by_name(case.config, spec, listed, layout.region(0).bytes)
            assert dray.packed(again) == dray.packed(layout), (s, rank)
        members.append(member)
    return Side(f"megatron {s}", members)


# ---- engines -------------------------------------------------------------------------------------

def engine_side(case):
    """SGLang or vLLM in sizes that the model's divide; whole tensors where none were found."""
    for _ in range(20):
        sizes = engines.Case(case.rng, lambda *_: case.config, [0])
        sizes.transposed &= 31
        try:
            members = [engine_member(case, sizes, rank, stage) for stage in range(sizes.pp)
                       for rank in range(sizes.tp)]
        except engines.Refused:
            continue
        return Side(f"engine tp {sizes.tp} ep {sizes.ep} dp {sizes.dp} pp {sizes.pp}", members)
    return full_side(case)


def engine_member(case, sizes, rank, stage):
    params = engines.Loader(sizes, case.full, rank, stage).params
    spec, keep = sizes.spec(rank, stage)
    member = Member(dray.model_layout(dray.lib.dray_layout_engine, case.config, c.byref(spec)))
    member.keep = keep
    placed = set()
    for name, param in params.items():
        offset, ndim, shape = c.c_uint64(), c.c_uint32(), (c.c_int64 * dray.MAX_DIMS)()
        dray.call(dray.lib.dray_engine_parameter, c.byref(case.config), c.byref(spec),
                  name.encode(), c.byref(offset), c.byref(ndim), shape)
        array = param.data.astype(DTYPES[F32 if param.element == 4 else I64])
        assert tuple(shape[:ndim.value]) == array.shape, (name, array.shape)
        rows = None
        if (param.data == engines.PADDING).any():  # of the vocabulary
            rows = int((param.data[:, 0] != engines.PADDING).sum())
        if offset.value not in placed:
            member.parts.append((offset.value, array, rows))
        placed.add(offset.value)
    return member


TRAINERS = [full_side, fsdp_side, fsdp1_side, dtensor_side, megatron_side, megatron_side, megatron_side]
ENGINES = [full_side, fsdp_side, dtensor_side, megatron_side] + 6 * [engine_side]


# ---- the check ------------------------------------------------------------------------------------

def plan_members(side, base):
    array = (dray.PlanMember * len(side.members))()
    for i, m in enumerate(side.members):
        array[i] = dray.PlanMember(layout=m.layout.handle, member=base + i, host=1,
                                   process=base + i)
    return array


def check(seed):
    case = Case(seed)
    trainer = case.rng.choice(TRAINERS)(case)
    engine = case.rng.choice(ENGINES)(case)
    what = f"seed {seed}: {case.config.family.decode()} {trainer.name} -> {engine.name}"
    memory = [m.memory(TRAINER_POISON) for m in trainer.members]
    bases = [(c.c_void_p * 1)(m.ctypes.data) for m in memory]
    sources = (c.c_void_p * len(bases))(*[c.addressof(b) for b in bases])
    index = c.c_void_p()
    places = plan_members(trainer, 1)  # the index borrows them
    try:
        dray.call(dray.lib.dray_plan_index_new, places, len(places), c.byref(index))
        for member, place in zip(engine.members, plan_members(engine, 1000)):
            plan = c.c_void_p()
            dray.call(dray.lib.dray_plan_from_index, index, c.byref(place), None, c.byref(plan))
            got = np.full(member.layout.region(0).bytes, ENGINE_POISON, np.uint8)
            into = (c.c_void_p * 1)(got.ctypes.data)
            count = dray.lib.dray_plan_count(plan)
            assert _copies.copies_run(c.c_void_p(dray.lib.dray_plan_copies(plan)),
                                      c.c_uint64(count), sources, into) == 0, what
            dray.lib.dray_plan_free(plan)
            want = member.memory(ENGINE_POISON)
            if not np.array_equal(got, want):
                wrong = np.flatnonzero(got != want)
                raise AssertionError(f"{what}: member {place.member - 1000}: {len(wrong)} of "
                                     f"{len(want)} bytes differ, the first at {wrong[0]}")
    except dray.DrayError as error:
        raise AssertionError(f"{what}: {error}") from error
    finally:
        dray.lib.dray_plan_index_free(index)


def run(count, first):
    """Seeds first, first + 1, ..."""
    for seed in range(first, first + count):
        try:
            check(seed)
        except Exception:
            print("failed: DRAY_TEST_SEED =", seed, flush=True)
            raise
    print(f"ok {count} random reshardings")
