"""Updates of tensors in the formats of engines (MXFP8, MXFP4, NVFP4, INT4, DeepGEMM's packed exponents)
against PyTorch: what bf16 and f32 of FSDP ranks become in engines that dray lays out, and random tensors cut
at random, on one host and across hosts. Every rank's memory must be what formats.py makes of the gathered
tensors, bit for bit."""
import ctypes as c
import random
import tempfile

from begin import needs

with needs:
    import torch

import formats
import test_quant_torch as base
from test_quant_torch import dray, lib

ROUNDS = 6 * base.SCALE
TORCH = {torch.float32: base.F32, torch.bfloat16: base.BF16, torch.float16: base.F16,
         torch.float8_e4m3fn: base.E4M3, torch.int32: 8, torch.uint8: 14}
SUFFIXES = {formats.DEEPGEMM: ["", "_scale_inv"], formats.MXFP8: ["", "_scale"],
            formats.MXFP4: ["_packed", "_scale"],
            formats.NVFP4: ["_packed", "_scale", "_global_scale"],
            formats.INT4: ["_packed", "_scale"],
            formats.INT4_ZERO: ["_packed", "_scale", "_zero_point"]}


def cells(kind, suffix, block):
    """Rows and columns that one element of a part stands for."""
    if suffix == "_packed":
        return (1, 2) if kind in (formats.MXFP4, formats.NVFP4) else (1, 8)
    if suffix == "_zero_point":
        return (8, block[1])
    if suffix == "":
        return (1, 1)
    return (1, {formats.MXFP8: 32, formats.MXFP4: 32, formats.NVFP4: 16}.get(kind, block[1]))


class Tensor:
    """A random tensor, and what it becomes in a format. numbers: "random", "edges" or "ties"."""

    def __init__(self, rng, index, kind, numbers):
        self.name, self.kind = "layer.%d.weight" % index, kind
        self.block = [rng.choice([128, 32]), rng.choice([128, 40])]
        group = {formats.MXFP8: 32, formats.MXFP4: 32, formats.NVFP4: 16}.get(kind)
        if kind >= formats.INT4:
            self.block = [1, rng.choice([16, 32, 64, 128, 256, 24])]
            group = self.block[1]
        columns = rng.randint(1, 330) if kind == formats.DEEPGEMM else group * rng.randint(1, 9)
        self.shape = [rng.randint(8, 120), columns]
        if rng.random() < 0.2:
            self.shape = [rng.randint(1, 4)] + self.shape
        self.dtype = rng.choice([torch.float32, torch.bfloat16, torch.bfloat16, torch.float16])
        self.engine = rng.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        x = torch.randn(self.shape, generator=generator)
        self.x = (x * 10.0 ** rng.uniform(-5, 2)).to(self.dtype)
        if numbers == "edges" and len(self.shape) == 2:
            self.x = formats.special(self.x)
        elif numbers == "ties":
            self.dtype = self.engine = torch.float32
            self.x = formats.near_ties(kind, self.shape, group, generator)
        self.parts = formats.quantise(kind, self.x, self.engine, self.block)
        self.ndim = len(self.shape)


def hold(rng, members, t):
    """Cut along rows, at the edge of what belongs together, or not; global scales on every rank."""
    for suffix in SUFFIXES[t.kind]:
        part, own = t.parts[suffix], cells(t.kind, suffix, t.block)
        for m in members:
            index = m.add(t.name + suffix, TORCH[part.dtype], list(part.shape))
            m.parts.setdefault(t.name, {})[suffix] = index
        if suffix == "_global_scale":
            for m in members:
                m.hold(rng, t.name + suffix, TORCH[part.dtype], part, [(0, 1)])
            continue
        pieces = base.cuts(rng, t.shape[-2], len(members))
        if own[0] > 1:
            pieces = [(s // own[0], -(-e // own[0])) for s, e in pieces]
        for m, (s, e) in zip(members, pieces):
            ranges = [(0, n) for n in part.shape]
            ranges[-2] = (s, e)
            if t.kind == formats.DEEPGEMM and suffix:
                for column in range(0, part.shape[-1], 4):
                    ranges[-1] = (column, min(column + 4, part.shape[-1]))
                    m.hold(rng, t.name + suffix, TORCH[part.dtype], part, ranges)
            else:
                m.hold(rng, t.name + suffix, TORCH[part.dtype], part, ranges)
    for m in members:
        found = m.parts[t.name]
        named = found.get("") if "" in found else m.add(t.name, TORCH[t.engine], t.shape)
        second = found.get(SUFFIXES[t.kind][-1], 0)
        q = dray.Quant(t.kind, 0, found[SUFFIXES[t.kind][1]], (c.c_int64 * 2)(*t.block),
                       found.get("_packed", named), second, named)
        dray.call(lib.dray_layout_set_quant, m.layout.handle, named, c.byref(q))


def members(count):
    made = [base.Member(1 << 23) for _ in range(count)]
    for m in made:
        m.parts = {}
    return made


def round_of(rng, address, number):
    hosts = 1 if base.driver else rng.choice([1, 1, 3])
    sources, group = members(rng.randint(1, 4)), members(rng.randint(1, 3))
    kinds = [(kind, "random") for kind in SUFFIXES] + [(kind, "edges") for kind in rng.choices(list(SUFFIXES), k=3)]
    kinds += [(formats.NVFP4, "ties"), (formats.INT4, "ties")]
    tensors = [Tensor(rng, i, *kind) for i, kind in enumerate(kinds)]
    for t in tensors:
        base.hold_floats(rng, sources, t, t.x, TORCH[t.dtype], True)
        hold(rng, group, t)
    runs = [(base.PARAMETER, 4 << 20, -1), (base.DIRECT, 0, 0), (base.BUCKET, 2 << 20, 0)]
    if hosts == 1:
        runs += [(base.BUCKET, 128 << 10, 0)]
    what = "round %d, %d -> %d ranks on %d hosts, %s" % (
        number, len(sources), len(group), hosts,
        ["%s %s %s" % (formats.NAMES[t.kind], t.shape, t.block) for t in tensors])
    base.run_update(address, b"formats-%d" % number, sources, group, hosts, runs, what)


def engine_rank(cf, kind, tp, ep, rank):
    quant = dray.EngineQuant(c.sizeof(dray.EngineQuant), kind, 0, (c.c_int64 * 2)(0, 0))
    spec = dray.EngineSpec(size=c.sizeof(dray.EngineSpec), tp=tp, tp_rank=rank, ep=ep,
                           kind=base.KIND, quant=c.pointer(quant))
    return dray.model_layout(lib.dray_layout_engine, cf, c.byref(spec))


def engine_tensors(rng, kind, whole, engine, dtype):
    """Random ones, and what the engine holds of those that it has quantised."""
    floats, held = {}, {}
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    for t in whole.tensors():
        x = torch.randn(list(t.shape)[:t.ndim], generator=generator)
        floats[t.name.decode()] = (x * 0.02).to(dtype)
        held[t.name.decode()] = floats[t.name.decode()].to(torch.bfloat16)
    quants = {}
    for i, t in enumerate(engine.tensors()):
        quant = lib.dray_layout_quant(engine.handle, i)
        if t.alias_of < 0 and quant:
            quants[i] = (t.name.decode(), quant.contents)
    fused = {}
    for i, (name, q) in quants.items():
        fused.setdefault(q.shared, []).append(floats[name])
    for i, (name, q) in quants.items():
        parts = formats.quantise(kind, floats[name], torch.bfloat16, list(q.block), fused[q.shared])
        held.update({name + suffix: part for suffix, part in parts.items()})
    return floats, held, len(quants), len(fused)


def engines(rng, address, kind):
    """FSDP ranks to engines of tensor and expert parallel ranks, fused parameters and their shared
    scales included."""
    cf = base.moe_config()
    dtype = rng.choice([torch.bfloat16, torch.float32])
    whole = dray.model_layout(lib.dray_layout_fsdp, cf, TORCH[dtype], 0, 1, base.KIND)
    alone = engine_rank(cf, kind, 1, 1, 0)
    floats, held, count, shared = engine_tensors(rng, kind, whole, alone, dtype)
    assert count == 2 * (4 + 3 * 4), count
    # q, k and v are one, o is another, gate and up of each expert are one, down is another
    assert shared == (2 * (2 + 2 * 4) if kind == formats.NVFP4 else count), (kind, shared)
    runs = [(base.DIRECT, 0, 0), (base.BUCKET, 2 << 20, 0)]
    for hosts in ([1] if base.driver else [1, 5]):
        sources = [base.Rank(dray.model_layout(lib.dray_layout_fsdp, cf, TORCH[dtype], i, 3,
                                               base.KIND), floats) for i in range(3)]
        group = [base.Rank(engine_rank(cf, kind, 2, 2, i), held) for i in range(2)]
        name = "%s-%d" % (formats.NAMES[kind], hosts)
        base.run_update(address, name.encode(), sources, group, hosts, runs,
                        "qwen3-moe to %s over %d hosts" % (formats.NAMES[kind], hosts))


def exponents(rng):
    """DeepGEMM's exponents lie as get_mn_major_tma_aligned_packed_ue8m0_tensor puts them."""
    cf = base.moe_config()
    layout = engine_rank(cf, formats.DEEPGEMM, 2, 2, 0)
    offset, ndim, shape = c.c_uint64(), c.c_uint32(), (c.c_int64 * 4)()
    quant = dray.EngineQuant(c.sizeof(dray.EngineQuant), formats.DEEPGEMM, 0, (c.c_int64 * 2)(0, 0))
    spec = dray.EngineSpec(size=c.sizeof(dray.EngineSpec), tp=2, tp_rank=0, ep=2, kind=base.KIND,
                           quant=c.pointer(quant))
    dray.call(lib.dray_engine_parameter, c.byref(cf), c.byref(spec),
              b"model.layers.0.self_attn.o_proj.weight_scale_inv", c.byref(offset), c.byref(ndim),
              shape)
    rows, columns = cf.hidden_size, cf.heads * cf.head_dim // 2
    assert list(shape)[:ndim.value] == [1, rows, 4], list(shape)
    blocks = [b for b in layout.blocks()
              if layout.tensor(b[0]).name == b"model.layers.0.self_attn.o_proj.weight_scale_inv"]
    assert [(b[3][:2], b[5][:2]) for b in blocks] == [([rows, columns // 128], [4, 1])], blocks


def main():
    rng = random.Random(base.SEED)
    exponents(rng)
    with tempfile.TemporaryDirectory() as folder:
        server, address = base.start_session(folder)
        try:
            for kind in SUFFIXES:
                engines(rng, address, kind)
            for number in range(ROUNDS):
                round_of(rng, address, number)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
