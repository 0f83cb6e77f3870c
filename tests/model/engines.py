"""What SGLang and vLLM load into each rank's parameters, written again in numpy from their documented
rules: FusedMoE (w13, w2, expert maps, redundant and fused shared experts), Column-, Row-,
MergedColumn-, QKVParallel- and ReplicatedLinear with block and per-tensor scales, DeepSeek's
fused_qkv_a_proj_with_mqa, VocabParallelEmbedding, get_pp_indices, attention data parallelism."""

import ctypes as c

import numpy as np

import dray

SGLANG, VLLM = 0, 1
SHARED, COPIES, NO_DRAFT = 0, 1, 2
ATTENTION, DENSE, SHARED_PART, EXPERTS, ROUTER = 1, 2, 4, 8, 16
BLOCK, TENSOR = 1, 2
BF16 = 3
PADDING = -1


class Refused(Exception):
    """The engine cannot be started with these sizes."""


def divide(a, b):
    if a % b:
        raise Refused(f"{a} is not divisible by {b}")
    return a // b


def random_map(rng, cf, ep):
    """EPLB's: every expert somewhere, some several times, another one for every layer."""
    slots = -(-(cf.experts + rng.randrange(4)) // ep) * ep
    rows = []
    for _ in range(rng.randrange(cf.layers + cf.mtp_layers + 1)):
        row = list(range(cf.experts)) + [rng.randrange(cf.experts)
                                         for _ in range(slots - cf.experts)]
        rng.shuffle(row)
        rows.append(row)
    return slots, rows


class Case:
    """One engine: random sizes, and what the C spec says of them. make_config: (tp, ep, dp, block) ->
    a model that mostly suits them."""

    def __init__(self, rng, make_config, quants):
        self.ep = rng.choice([1, 1, 2, 3, 4])
        self.tp = self.ep * rng.choice([1, 1, 2])
        self.dp = rng.choice([d for d in range(1, self.tp + 1) if self.tp % d == 0])
        self.block = rng.choice([1, 2, 3])
        self.config = cf = make_config(self.tp, self.ep, self.dp, self.block)
        if not cf.experts:
            self.ep = 1
        self.scale_format = rng.randrange(2)
        self.pp = rng.choice([p for p in (1, 1, 1, 2, 3) if p <= cf.layers])
        self.kind = rng.choice([SGLANG, VLLM])
        self.draft = rng.choice([SHARED, COPIES if self.pp == 1 else SHARED, NO_DRAFT])
        self.multiple = rng.choice([m for m in (1, 3, 8, 64)
                                    if -(-cf.vocab_size // m) * m % self.tp == 0] or [self.tp])
        self.transposed = rng.choice([0, 0, 31, rng.randrange(32)])
        self.up_first = rng.random() < 0.4
        self.fused = cf.shared_experts == 1 and self.kind == SGLANG and rng.random() < 0.4
        self.slots, self.map = cf.experts, []
        self.redundant = 0
        if cf.experts and rng.random() < 0.3:
            self.slots, self.map = random_map(rng, cf, self.ep)
        elif cf.experts and rng.random() < 0.3:
            self.redundant = -cf.experts % self.ep + self.ep * rng.randrange(2)
            self.slots += self.redundant
        self.quant = rng.choice(quants)
        self.ignore = []
        if self.quant and rng.random() < 0.5:
            self.ignore = self.random_ignore(rng)
        groups = [g for g in range(1, self.tp + 1) if self.tp % g == 0]
        self.over = {k: rng.choice([0, 0, 0] + groups)
                     for k in ("dense_tp", "shared_tp", "embed_tp", "head_tp")}
        if cf.tied:
            self.over["embed_tp"] = self.over["head_tp"] = 0
        self.pp_layers = None
        if rng.random() < 0.3:
            cuts = sorted(rng.randrange(cf.layers + 1) for _ in range(self.pp - 1))
            edges = [0] + cuts + [cf.layers]
            self.pp_layers = [b - a for a, b in zip(edges, edges[1:])]

    def random_ignore(self, rng):
        layers = self.config.layers + self.config.mtp_layers
        out = ["lm_head"]
        for i in range(layers):
            p = rng.choice(["", "model."]) + f"layers.{i}."
            if rng.random() < 0.3:
                out += [p + f"self_attn.{x}" for x in
                        ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")]
            if rng.random() < 0.3:
                out += [p + "self_attn.o_proj", p + "self_attn.kv_b_proj"]
            if rng.random() < 0.3:
                out.append(p + rng.choice(["mlp.experts.0.up_proj", "mlp.experts",
                                           "block_sparse_moe.experts.0.w1"]))
            if rng.random() < 0.3:
                out += [p + "mlp.gate_proj", p + "mlp.up_proj"]
            if rng.random() < 0.03:
                out.append(p + "mlp.shared_experts.gate_proj")  # half of a fused parameter
        return out

    def spec(self, tp_rank, pp_rank):
        s = dray.EngineSpec(c.sizeof(dray.EngineSpec), self.tp, tp_rank, 0, self.multiple, 1)
        keep = [s]
        s.pp, s.pp_rank, s.ep, s.dp = self.pp, pp_rank, self.ep, self.dp
        s.engine, s.draft, s.fuse_shared = self.kind, self.draft, self.fused
        s.transposed, s.redundant = self.transposed, self.redundant
        s.w13_order = self.up_first
        for key, value in self.over.items():
            setattr(s, key, value)
        if self.pp_layers:
            layers = (c.c_uint32 * self.pp)(*self.pp_layers)
            s.pp_layers = c.addressof(layers)
            keep.append(layers)
        if self.map or self.slots != self.config.experts + self.redundant:
            flat = [e for row in self.map for e in row]
            experts = (c.c_int32 * max(1, len(flat)))(*flat)
            m = dray.ExpertMap(c.sizeof(dray.ExpertMap), 7, len(self.map), self.slots,
                               c.addressof(experts))
            s.experts = c.pointer(m)
            keep += [experts, m]
        if self.quant:
            names = (c.c_char_p * max(1, len(self.ignore)))(*[n.encode() for n in self.ignore])
            q = dray.EngineQuant(c.sizeof(dray.EngineQuant), self.quant, self.scale_format,
                                 (c.c_int64 * 2)(self.block, self.block), names, len(self.ignore))
            s.quant = c.pointer(q)
            keep += [names, q]
        return s, keep


# ---- the engines' loaders ----------------------------------------------------------------------

class Param:
    """A parameter that is being loaded; ids of elements, or padding."""

    def __init__(self, shape, element):
        self.data = np.full(shape, PADDING, dtype=np.int64)
        self.element = element


class Loader:
    def __init__(self, case, tensors, tp_rank, pp_rank):
        self.k, self.c, self.t = case, case.config, tensors
        self.rank, self.stage = tp_rank, pp_rank
        self.params = {}
        wide = case.tp if case.kind == SGLANG else case.tp // case.dp
        self.attn = case.tp // case.dp
        self.dense = case.over["dense_tp"] or wide
        self.shared = case.over["shared_tp"] or wide
        self.embed = case.over["embed_tp"] or self.attn
        self.head = case.over["head_tp"] or (self.embed if self.c.tied else wide)
        self.load()

    def layers(self):
        k, n = self.k, self.c.layers
        parts = k.pp_layers
        if not parts:
            parts = [n // k.pp] * k.pp
            left = n % k.pp
            for i in range(left):
                parts[-1 - i - (k.kind == VLLM)] += 1
        start = sum(parts[:self.stage])
        return range(start, start + parts[self.stage])

    def is_moe(self, i):
        cf = self.c
        return cf.experts > 0 and i >= cf.first_k_dense and not cf.dense_layers[0] >> i & 1 and \
            (cf.sparse_step < 2 or (i + 1) % cf.sparse_step == 0)

    def check_experts(self):
        """SGLang asserts it; so does vLLM's EPLB."""
        k = self.k
        if k.slots % k.ep and (k.kind == SGLANG or k.slots != self.c.experts or k.map or
                               k.slots < k.ep):
            raise Refused("experts")

    def load(self):
        self.check_experts()
        first, last = self.stage == 0, self.stage == self.k.pp - 1
        draft = self.c.mtp_layers and self.k.draft != NO_DRAFT
        if first or (last and (self.c.tied or draft)):
            self.vocab("model.embed_tokens.weight", self.embed)
        for i in self.layers():
            self.layer(i)
        if last:
            self.plain("model.norm.weight")
            if self.c.tied:
                self.params["lm_head.weight"] = self.params["model.embed_tokens.weight"]
            else:
                self.vocab("lm_head.weight", self.head)
        for i in range(self.c.layers, self.c.layers + self.c.mtp_layers) if last and draft else ():
            self.nextn(i)

    def nextn(self, i):
        p = f"model.layers.{i}."
        for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm"):
            self.plain(p + n + ".weight")
        for mine, theirs, tp in (("embed_tokens", "model.embed_tokens", self.embed),
                                 ("shared_head.head", "lm_head", self.head)):
            if self.k.draft == COPIES:
                source = "model.embed_tokens" if self.c.tied else theirs
                self.vocab(source + ".weight", tp, p + mine + ".weight")
            else:
                self.params[p + mine + ".weight"] = self.params[theirs + ".weight"]
        self.layer(i)

    def layer(self, i):
        p = f"model.layers.{i}."
        self.plain(p + "input_layernorm.weight")
        self.plain(p + "post_attention_layernorm.weight")
        if self.c.kv_lora_rank:
            self.mla(p + "self_attn.")
        else:
            self.gqa(p + "self_attn.")
        if self.is_moe(i):
            self.moe(i, p + ("block_sparse_moe." if self.c.family == b"mixtral" else "mlp."))
        else:
            self.mlp(p + "mlp.", self.dense, DENSE)

    # -- kinds of layers

    def element(self, name):
        return 4 if name.endswith("e_score_correction_bias") else 2

    def plain(self, name, part=0):
        data = self.t[name]
        p = Param(data.shape, self.element(name))
        p.data[...] = data
        self.put(name, p, part)

    def put(self, name, p, part):
        if self.k.transposed & part and p.data.ndim >= 2:
            p.data = np.ascontiguousarray(p.data.swapaxes(-1, -2))
        self.params[name] = p

    def vocab(self, source, tp, name=None):
        loaded = self.t[source]
        per_rank = divide(-(-self.c.vocab_size // self.k.multiple) * self.k.multiple, tp)
        p = Param((per_rank, loaded.shape[1]), 2)
        start = self.rank % tp * per_rank
        end = min(start + per_rank, loaded.shape[0])
        if end > start:
            p.data[:end - start] = loaded[start:end]
        self.params[name or source] = p

    def skipped(self, shards):
        """is_layer_skipped; SGLang also takes names without 'model.'"""
        ignored = ["model." + n.removeprefix("model.") for n in self.k.ignore]
        skip = {s in ignored for s in shards}
        if len(skip) > 1:
            raise Refused("some but not all shards are quantised")
        return skip.pop()

    def check_blocks(self, tp, total, parts, columns, total_columns):
        """validate_fp8_block_shape"""
        b = self.k.block
        if tp > 1 and total_columns // columns == tp and columns % b:
            raise Refused("input size")
        split, merged = tp > 1 and total // sum(parts) == tp, len(parts) > 1
        sizes = parts if split or not merged else parts[:-1]
        if (split or merged) and any(s % b for s in sizes):
            raise Refused("output size")

    def linear(self, p, name, shards, part, tp=1, total=None, columns=None):
        """shards: (module, first row, rows); columns: (first, how many). total: rows of all ranks."""
        whole = self.t[p + shards[0][0] + ".weight"].shape[1]
        first, width = columns or (0, whole)
        rows = [n for _, _, n in shards]
        quant = self.k.quant
        if quant and self.skipped([p + s for s, _, _ in shards]):
            quant = 0
        if quant == BLOCK:
            self.check_blocks(tp, total or sum(rows), rows, width, whole)
        param = Param((sum(rows), width), 1 if quant else 2)
        at = 0
        for s, start, n in shards:
            param.data[at:at + n] = self.t[p + s + ".weight"][start:start + n, first:first + width]
            at += n
        self.put(p + name + ".weight", param, part)
        if p + shards[0][0] + ".bias" in self.t:
            bias = Param((sum(rows),), 2)
            bias.data[...] = np.concatenate([self.t[f"{p}{s}.bias"][start:start + n]
                                             for s, start, n in shards])
            self.params[p + name + ".bias"] = bias
        if quant == BLOCK:
            b = self.k.block
            scale = Param((-(-sum(rows) // b), -(-width // b)), 4)
            at = 0
            for s, start, n in shards:
                loaded = self.t[p + s + ".weight_scale_inv"]
                shard_offset, shard_size = -(-at // b), -(-n // b)
                scale.data[shard_offset:shard_offset + shard_size] = \
                    loaded[start // b:start // b + shard_size, first // b:first // b + -(-width // b)]
                at += n
            self.put(p + name + ".weight_scale_inv", scale, part)
        elif quant == TENSOR:
            scale = Param((len(shards),), 4)
            for i, (s, _, _) in enumerate(shards):
                scale.data[i] = self.t[p + s + ".weight_scale"]
            self.params[p + name + ".weight_scale"] = scale

    def column(self, p, name, modules, tp, part):
        shards, total = [], 0
        for m in modules:
            n = divide(self.t[p + m + ".weight"].shape[0], tp)
            shards.append((m, self.rank % tp * n, n))
            total += n * tp
        self.linear(p, name, shards, part, tp, total)

    def row(self, p, name, tp, part):
        rows, columns = self.t[p + name + ".weight"].shape
        n = divide(columns, tp)
        self.linear(p, name, [(name, 0, rows)], part, tp, rows, (self.rank % tp * n, n))

    def gqa(self, p):
        size, tp, rank = self.c.head_dim, self.attn, self.rank % self.attn
        heads = divide(self.c.heads, tp)
        if tp >= self.c.kv_heads:
            kv, replicas = 1, divide(tp, self.c.kv_heads)
        else:
            kv, replicas = divide(self.c.kv_heads, tp), 1
        shards = [("q_proj", rank * heads * size, heads * size)]
        shards += [(m, rank // replicas * kv * size, kv * size) for m in ("k_proj", "v_proj")]
        self.linear(p, "qkv_proj", shards, ATTENTION, tp, (heads + 2 * kv) * size * tp)
        if self.c.qk_norm:
            self.plain(p + "q_norm.weight")
            self.plain(p + "k_norm.weight")
        self.row(p, "o_proj", tp, ATTENTION)

    def mla(self, p):
        divide(self.c.heads, self.attn)
        whole = lambda m: (m, 0, self.t[p + m + ".weight"].shape[0])
        if self.c.q_lora_rank:
            self.linear(p, "fused_qkv_a_proj_with_mqa",
                        [whole("q_a_proj"), whole("kv_a_proj_with_mqa")], ATTENTION)
            self.plain(p + "q_a_layernorm.weight")
            self.column(p, "q_b_proj", ["q_b_proj"], self.attn, ATTENTION)
        else:
            self.column(p, "q_proj", ["q_proj"], self.attn, ATTENTION)
            self.linear(p, "kv_a_proj_with_mqa", [whole("kv_a_proj_with_mqa")], ATTENTION)
        self.plain(p + "kv_a_layernorm.weight")
        self.column(p, "kv_b_proj", ["kv_b_proj"], self.attn, ATTENTION)
        self.row(p, "o_proj", self.attn, ATTENTION)

    def mlp(self, p, tp, part):
        self.column(p, "gate_up_proj", ["gate_proj", "up_proj"], tp, part)
        self.row(p, "down_proj", tp, part)

    def moe(self, i, p):
        k, cf = self.k, self.c
        self.plain(p + "gate.weight", ROUTER)
        if cf.family in (b"deepseek_v3", b"kimi_k2", b"glm4_moe"):
            self.plain(p + "gate.e_score_correction_bias")
        if cf.shared_experts and not k.fused:
            self.mlp(p + "shared_experts.", self.shared, SHARED_PART)
        names = ("w1", "w3", "w2") if cf.family == b"mixtral" else ("gate_proj", "up_proj", "down_proj")
        moe_tp = k.tp // k.ep
        group, tp_rank = self.rank // moe_tp, self.rank % moe_tp
        base, left = divmod(k.slots, k.ep)  # determine_expert_map
        local, first = base + (group < left), group * base + min(group, left)
        held = []
        for slot in range(first, first + local):
            logical = k.map[i][slot] if i < len(k.map) else slot % cf.experts
            held.append(f"{p}experts.{logical}.")
        if k.fused:
            held.append(p + "shared_experts.")
        self.experts(p + "experts", held, names, moe_tp, tp_rank)

    def experts(self, name, held, names, tp, rank):
        cf, b = self.c, self.k.block
        m, h = divide(cf.moe_intermediate_size, tp), cf.hidden_size
        quant = self.k.quant
        ignored = ["model." + n.removeprefix("model.") for n in self.k.ignore]
        if quant and any(name in n for n in ignored if "experts" in n):
            quant = 0
        if quant == BLOCK and m % b:
            raise Refused("intermediate size per partition")
        w13, w2 = Param((len(held), 2 * m, h), 1 if quant else 2), \
            Param((len(held), h, m), 1 if quant else 2)
        for slot, e in enumerate(held):
            gate, up, down = ((e + n) for n in (
                ("gate_proj", "up_proj", "down_proj") if "shared" in e else names))
            if self.k.up_first:  # SGLang's _load_w13, switch_w13
                gate, up = up, gate
            w13.data[slot, :m] = self.t[gate + ".weight"][rank * m:(rank + 1) * m]
            w13.data[slot, m:] = self.t[up + ".weight"][rank * m:(rank + 1) * m]
            w2.data[slot] = self.t[down + ".weight"][:, rank * m:(rank + 1) * m]
        self.put(name + ".w13_weight", w13, EXPERTS)
        self.put(name + ".w2_weight", w2, EXPERTS)
        if not quant:
            return
        mb, hb = -(-m // b), -(-h // b)
        shapes = ((2 * mb, hb), (hb, mb)) if quant == BLOCK else ((2,), ())
        s13, s2 = (Param((len(held),) + s, 4) for s in shapes)
        suffix = ".weight_scale_inv" if quant == BLOCK else ".weight_scale"
        for slot, e in enumerate(held):
            gate, up, down = (self.t[e + n + suffix] for n in (
                ("gate_proj", "up_proj", "down_proj") if "shared" in e else names))
            if quant == TENSOR:  # _load_per_tensor_weight_scale: by the shard's number
                s13.data[slot] = gate, up
                s2.data[slot] = down
                continue
            if self.k.up_first:
                gate, up = up, gate
            s13.data[slot, :mb] = gate[rank * mb:(rank + 1) * mb]
            s13.data[slot, mb:] = up[rank * mb:(rank + 1) * mb]
            s2.data[slot] = down[:, rank * mb:(rank + 1) * mb]
        self.put(name + ".w13" + suffix.replace(".", "_"), s13, EXPERTS if quant == BLOCK else 0)
        self.put(name + ".w2" + suffix.replace(".", "_"), s2, EXPERTS if quant == BLOCK else 0)
