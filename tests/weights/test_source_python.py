"""A trainer's side recorded: conversions of Megatron-Core's parameters, of the kind that slime and mbridge have, against the
same functions run on whole tensors: fused and interleaved attention, gate and up, experts, vocabularies that are padded,
casts, numbers added; ranks that hold a part each publish, an engine's rank receives all."""
import time

from begin import coordinator, needs, rng, seed

with needs:
    import torch

import dray
from dray.parameters import FlatPart
from dray.record.provenance import Book, Store
from dray.record.rectangles import Place
from dray.record.tensors import NotRecorded
from dray.weights import Block, Context, Publisher, Subscriber, megatron_shards, record_source
from served import refused

torch.manual_seed(seed)
H, HEAD, GROUPS, PER, FFN, VOCAB, PADDED, EXPERTS, LAYERS = 24, 4, 4, 3, 16, 21, 32, 3, 2
BF16, F32 = torch.bfloat16, torch.float32
ROWS = GROUPS * (PER + 2) * HEAD

# name in a layer: shape, dtype, dimension that tensor parallelism cuts
LAYER = {"self_attention.linear_qkv.weight": ((ROWS, H), BF16, 0), "self_attention.linear_qkv.bias": ((ROWS,), BF16, 0),
         "self_attention.linear_proj.weight": ((H, GROUPS * PER * HEAD), BF16, 1),
         "self_attention.linear_qkv.layer_norm_weight": ((H,), BF16, None),
         "mlp.router.weight": ((EXPERTS, H), BF16, None), "mlp.router.expert_bias": ((EXPERTS,), F32, None),
         **{f"mlp.experts.linear_fc1.weight{e}": ((2 * FFN, H), BF16, 0) for e in range(EXPERTS)},
         **{f"mlp.experts.linear_fc2.weight{e}": ((H, FFN), BF16, 1) for e in range(EXPERTS)}}
MODEL = {"embedding.word_embeddings.weight": ((PADDED, H), BF16, 0), "output_layer.weight": ((PADDED, H), BF16, 0),
         "decoder.final_layernorm.weight": ((H,), F32, None),
         **{f"decoder.layers.{n}.{name}": of for n in range(LAYERS) for name, of in LAYER.items()}}


def convert(named):
    """As frameworks write it, parameter by parameter."""
    for name, t in named:
        layer = name.split(".")[2] if ".layers." in name else ""
        to, rest = f"model.layers.{layer}.", name.split(".", 3)[-1]
        if name == "embedding.word_embeddings.weight":
            yield "model.embed_tokens.weight", t[:VOCAB]
        elif name == "output_layer.weight":
            yield "lm_head.weight", t[:VOCAB, :]
        elif name == "decoder.final_layernorm.weight":
            yield "model.norm.weight", (t + 1).to(BF16)
        elif rest == "self_attention.linear_qkv.weight":
            q, k, v = torch.split(t.view(GROUPS, -1, HEAD, H), [PER, 1, 1], 1)
            for part, of in zip("qkv", (q, k, v)):
                yield f"{to}self_attn.{part}_proj.weight", of.reshape(-1, H)
        elif rest == "self_attention.linear_qkv.bias":
            q, k, v = torch.split(t.view(GROUPS, -1), [PER * HEAD, HEAD, HEAD], 1)
            for part, of in zip("qkv", (q, k, v)):
                yield f"{to}self_attn.{part}_proj.bias", of.contiguous().flatten()
        elif "linear_fc1" in rest:
            e = rest[len("mlp.experts.linear_fc1.weight"):]
            for part, of in zip(("gate", "up"), t.chunk(2, 0)):
                yield f"{to}mlp.experts.{e}.{part}_proj.weight", of
        elif "linear_fc2" in rest:
            yield f"{to}mlp.experts.{rest[len('mlp.experts.linear_fc2.weight'):]}.down_proj.weight", t
        else:
            yield {"self_attention.linear_proj.weight": f"{to}self_attn.o_proj.weight",
                   "self_attention.linear_qkv.layer_norm_weight": f"{to}input_layernorm.weight",
                   "mlp.router.weight": f"{to}mlp.gate.weight",
                   "mlp.router.expert_bias": f"{to}mlp.gate.e_score_correction_bias"}[rest], t


def random_model():
    return {name: torch.randn(shape).to(dtype) for name, (shape, dtype, _) in MODEL.items()}


def cut(name, whole, tp, rank):
    """Megatron's part of a rank, as a Parameter that says how it is cut."""
    dim = MODEL[name][2]
    if dim is None or tp == 1:
        part = whole.clone()
    elif "linear_fc1" in name:
        part = torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
    else:
        part = whole.chunk(tp, dim)[rank].clone()
    made = torch.nn.Parameter(part.contiguous(), requires_grad=False)
    if dim is not None:
        made.tensor_model_parallel, made.partition_dim = True, dim
    return made


def ranks_publish():
    """tp ranks, each with its part; three versions; memory that is replaced meanwhile."""
    for tp in (1, 4):
        whole = random_model()
        held = [{n: cut(n, t, tp, r) for n, t in whole.items()} for r in range(tp)]
        sources = [record_source(convert, megatron_shards(h.items(), tp, r)) for r, h in enumerate(held)]
        assert all(s.computed == {"model.norm.weight": "add(1), bfloat16"} for s in sources), sources[0].computed
        publishers = [Publisher(s, f"tp{tp}", r, tp, context=trainer) for r, s in enumerate(sources)]
        taken = {n: torch.zeros_like(t) for n, t in convert(whole.items())}
        assert sources[0].names == sorted(taken)
        with Subscriber(taken, f"tp{tp}", "whole", 0, 1, context=engine) as taker:
            for version in (1, 2, 3):
                for p in publishers:
                    p.wait()
                whole = random_model()
                for r, h in enumerate(held):
                    for n, p in h.items():
                        if version == 3:
                            p.data = cut(n, whole[n], tp, r).data
                        else:
                            p.copy_(cut(n, whole[n], tp, r))
                for p in publishers:
                    p.publish(version)
                assert taker.update(min_version=version)["version"] == version
                for name, tensor in convert((n, t.clone()) for n, t in whole.items()):
                    assert torch.equal(taken[name], tensor), (tp, version, name)
        for p in publishers:
            p.close()


def random_cuts():
    """Functions that split, turn, join and pad, of parameters that are cut into random rectangles."""
    for case in range(21):
        a, b, c = (rng.randrange(2, 6) for _ in range(3))
        whole = {"x": torch.randn(a * b, c), "y": torch.randn(c, a * b)}
        ways = [lambda x, y: (("r", x), ("s", y.t())), lambda x, y: (("r", torch.cat([x, y.t()], 1)),),
                lambda x, y: (("r", x.view(a, b, c).transpose(0, 1).reshape(a * b, c)), ("s", y[:, ::2])),
                lambda x, y: (("r", torch.stack([x, y.t()])), ("s", torch.nn.functional.pad(x, (0, 2), value=1.5))),
                lambda x, y: (("r", x.view(a, b, c).permute(2, 0, 1).contiguous()), ("s", y.reshape(c, a, b)[:, 1:])),
                lambda x, y: (("r", x.bfloat16()), ("s", -y.exp())), lambda x, y: (("r", x.view(torch.int32)), ("s", y.flip(0)))]
        way = ways[case % len(ways)]
        change = lambda named: way(**dict(named))  # noqa: E731
        wanted = dict(change((n, t.clone()) for n, t in whole.items()))
        parts = [[], []]
        for name, t in whole.items():
            d = rng.randrange(2)
            at = rng.randrange(t.shape[d] + 1)
            for r, (start, n) in enumerate(((0, at), (at, t.shape[d] - at))):
                memory = t.narrow(d, start, n)  # of the whole: strides of its own
                if rng.random() < 0.5:
                    memory = memory.t().contiguous().t()
                parts[r].append(Block(name, tuple(t.shape), memory, (0, start) if d else (start, 0)))
        publishers = [Publisher(record_source(change, p), f"c{case}", r, 2, context=trainer) for r, p in enumerate(parts)]
        taken = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in wanted.items()}
        with Subscriber(taken, f"c{case}", "whole", 0, 1, context=engine) as taker:
            for p in publishers:
                p.publish(1)
            taker.update()
        for name, tensor in wanted.items():
            assert torch.equal(taken[name], tensor), (case, name, taken[name], tensor)
        for p in publishers:
            p.close()


def what_convert_computes():
    """Is made by it, where the rank has all of it; refused by name, else."""
    scaled = lambda named: (("out", t / t.norm()) for n, t in named)  # noqa: E731
    x = torch.randn(4, 4)
    source = record_source(scaled, {"x": x})
    taken = {"out": torch.zeros(4, 4)}
    with Publisher(source, "scaled", context=trainer) as publisher, \
            Subscriber(taken, "scaled", "whole", context=engine) as taker:
        for version in (1, 2):
            publisher.wait()
            x.normal_()
            publisher.publish(version)
            taker.update(min_version=version)
            assert torch.equal(taken["out"], x / x.norm())
    error = refused(NotRecorded, "out is computed: div", record_source, scaled, [Block("x", (8, 4), x)])
    assert "x, of which this rank has a part" in str(error)
    refused(NotRecorded, "nothing of them", record_source, lambda named: [("out", torch.zeros(3))], {"x": x})
    part = FlatPart(x.view(16), (8, 4), 4, 4, 8)
    refused(NotImplementedError, "FSDP1's flat parameter, of (8, 4)", record_source, lambda named: named, {"x": part})
    refused(ValueError, "expected of all its parts", record_source, lambda named: named,
            [Block("x", (8, 4), x), Block("x", (9, 4), x, (4, 0))])


def rows_that_are_apart():
    """What runs over the rows of a parameter is published from where they lie, one behind the other; refused by name, where
    they do not."""
    flat = lambda named: [(n, t.flatten(1)) for n, t in named]  # noqa: E731
    whole = torch.randn(3, 5, 4)
    taken = {"x": torch.zeros(3, 12)}
    with Publisher(record_source(flat, {"x": whole[:, 1:4]}), "rows", context=trainer) as publisher, \
            Subscriber(taken, "rows", "whole", context=engine) as taker:
        publisher.publish(1)
        taker.update()
        assert torch.equal(taken["x"], whole[:, 1:4].flatten(1))
    apart = [whole[:, :, :3], whole.transpose(0, 1), torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last)]
    for x in apart:
        source = record_source(flat, {"x": x})
        refused(dray.DrayError, "x, which is expected to be contiguous here", Publisher, source, "apart", context=trainer)
    # The same parameters are rectangles for a function that leaves their rows apart.
    for x in apart:
        taken = {"x": torch.zeros(x.transpose(0, 1).shape)}
        turned = record_source(lambda named: [(n, t.transpose(0, 1)) for n, t in named], {"x": x})
        with Publisher(turned, "turned", context=trainer) as publisher, \
                Subscriber(taken, "turned", "whole", context=engine) as taker:
            publisher.publish(1)
            taker.update()
            assert torch.equal(taken["x"], x.transpose(0, 1))


def another_dtype():
    """A parameter whose bits have another dtype since it was recorded is refused, of as many bytes, too."""
    x = torch.nn.Parameter(torch.randn(4).to(BF16), requires_grad=False)
    taken = {"x": torch.zeros(4, dtype=BF16)}
    with Publisher(record_source(lambda named: named, {"x": x}), "dtype", context=trainer) as publisher, \
            Subscriber(taken, "dtype", "whole", context=engine) as taker:
        publisher.publish(1)
        taker.update()
        publisher.wait()
        for other in (torch.float16, F32):
            x.data = torch.randn(4).to(other)
            error = refused(dray.DrayError, "x had torch.bfloat16 (4,) here", publisher.publish, 2)
            assert error.name == "ESTALE", error
        x.data = torch.randn(4).to(BF16)
        publisher.publish(2)
        taker.update(min_version=2)
        assert torch.equal(taken["x"], x)


def memory_of_a_gpu(real=torch.unique):
    """Constants of memory on a GPU: what is found there is brought here before it says which of them lie where."""
    class There:  # as CUDA's tensors, it is no index of a tensor in host memory
        def __init__(self, of):
            self.of = of

        def cpu(self):
            return self.of

    def unique(x, return_inverse):
        values, which = real(x, return_inverse=return_inverse)
        return values, There(which)

    book, own = Book(), torch.tensor([2., 0, 2, 3])
    torch.unique = unique
    try:
        codes = Store(book, 4, F32, own).codes(Place(0, (4,), (1,)))
    finally:
        torch.unique = real
    assert [book.value_of(code).value for code in codes.tolist()] == own.tolist()


with coordinator() as folder:
    with Context(role="trainer", timeout=20) as trainer, Context(role="engine", timeout=20) as engine:
        for case in (ranks_publish, random_cuts, rows_that_are_apart, another_dtype, what_convert_computes,
                     memory_of_a_gpu):
            begun = time.monotonic()
            case()
            print(f"{case.__name__}: {time.monotonic() - begun:.1f} s")
