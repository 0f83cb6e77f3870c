"""Recorded layouts against the loaders themselves: what the blocks put where is compared, all bytes, with
what the same load_weights makes of real tensors. Loaders fuse, cut, pad, stack experts, copy in threads,
write into what they are given, ask for values, call operators of their own, and derive after loading."""
import concurrent.futures
import copy
import queue
import random
import sys
import threading
from functools import reduce as reduce_

from begin import coordinator, needs, rng, scale, seed

with needs:
    import torch

import dray
from dray.weights import Block, Context, Publisher, Subscriber, record
from served import refused, try_all

torch.manual_seed(seed)
H, HEAD, HEADS, KV, FFN, VOCAB, EXPERTS, TP = 32, 8, 4, 2, 48, 101, 3, 2
BF16, F32 = torch.bfloat16, torch.float32
ROWS = -(-VOCAB // (8 * TP)) * 8  # of the vocabulary on each rank, padding with it
CHECKPOINT = {"embed": ((VOCAB, H), BF16), "norm": ((H,), BF16), "gemma": ((H,), BF16),
              "a_log": ((HEADS,), BF16), "router_bias": ((EXPERTS,), BF16), "scale": ((), F32),
              "q": ((HEADS * HEAD, H), BF16), "k": ((KV * HEAD, H), BF16), "v": ((KV * HEAD, H), BF16),
              "o": ((H, HEADS * HEAD), BF16), "gate": ((FFN, H), BF16), "up": ((FFN, H), BF16),
              "down": ((H, FFN), BF16), "kv_b": ((HEADS * 2 * HEAD, 16), BF16),
              **{f"experts.{e}.{p}": ((H, 16) if p == "down" else (16, H), BF16)
                 for e in range(EXPERTS) for p in ("gate", "up", "down")}}


def random_weights(tensors=None):
    return {n: torch.randn(shape).to(dtype) for n, (shape, dtype) in (tensors or CHECKPOINT).items()}


class Engine(torch.nn.Module):
    """A rank of an engine, whose memory holds something else before it loads."""

    def __init__(self, rank, threads=False):
        super().__init__()
        self.rank, self.threads, self.given = rank, threads, []
        for name, shape, dtype in (
                ("embed", (ROWS, H), BF16), ("norm", (H,), BF16), ("gemma", (H,), BF16),
                ("a", (HEADS // TP,), F32), ("router_bias", (EXPERTS,), F32), ("scales", (3,), F32),
                ("qkv", ((HEADS + 2 * KV) // TP * HEAD, H), BF16), ("o", (HEADS * HEAD // TP, H), BF16),
                ("gate_up", (2 * FFN // TP, H), BF16), ("down", (H, FFN // TP), BF16),
                ("kv_b", (HEADS // TP * 2 * HEAD, 16), BF16),
                ("w13", (EXPERTS, 2 * 16 // TP, H), BF16), ("w2", (EXPERTS, H, 16 // TP), BF16)):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape).to(dtype),
                                                             requires_grad=False))
        self.register_buffer("cache", torch.randn(4))
        self.w_uk = None

    def rows(self, parameter, values, at=0, of=TP):
        part = values.narrow(0, values.shape[0] // of * (self.rank * of // TP), values.shape[0] // of)
        parameter.data.narrow(0, at, part.shape[0]).copy_(part)
        return at + part.shape[0]

    def load_weights(self, named):
        if not self.threads:
            for name, values in named:
                self.load(name, values)
            return
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(self.load, name, values) for name, values in named]:
                done.result()

    def load(self, name, values):
        self.given.append(name)
        if name == "embed":
            part = values[self.rank * ROWS:(self.rank + 1) * ROWS]
            self.embed.data[:part.shape[0]].copy_(part)
            self.embed.data[part.shape[0]:].fill_(0)
        elif name in ("q", "k", "v"):
            self.rows(self.qkv, values, {"q": 0, "k": 2, "v": 3}[name] * HEAD)
        elif name == "o":  # stored [in, out]
            self.o.data.copy_(values.chunk(TP, 1)[self.rank].t())
        elif name in ("gate", "up"):
            self.rows(self.gate_up, values, 0 if name == "gate" else FFN // TP)
        elif name == "gemma":
            values += 1
            self.gemma.data.copy_(values)
        elif name == "a_log":
            self.a.data.copy_(-torch.exp(values.chunk(TP)[self.rank].float()))
        elif name == "scale":
            self.scales.data[1:].fill_(values.item())
            self.scales.data[0] = 1
        elif name.startswith("experts."):
            _, e, part = name.split(".")
            if part == "down":
                self.w2.data[int(e)].copy_(values.chunk(TP, 1)[self.rank])
            else:
                self.rows(self.w13.data[int(e)], values, 0 if part == "gate" else 16 // TP)
        elif name in ("kv_b", "router_bias", "norm", "down"):
            {"kv_b": lambda: self.rows(self.kv_b, values),
             "router_bias": lambda: self.router_bias.data.copy_(values.to(F32)),
             "norm": lambda: self.norm.data.copy_(values),
             "down": lambda: self.down.data.copy_(values.chunk(TP, 1)[self.rank])}[name]()

    def finish(self):
        """After loading, as latent attention has it: a tensor made of a parameter."""
        parts = self.kv_b.data.view(-1, 2 * HEAD, 16)
        self.w_uk = parts[:, :HEAD].transpose(1, 2).contiguous()

    def load_and_finish(self, named):
        self.load_weights(named)
        self.finish()


def state(engine):
    return {**engine.state_dict(), **({} if engine.w_uk is None else {"w_uk": engine.w_uk})}


def same(engine, wanted):
    a, b = state(engine), state(wanted)
    for name in b:
        if name != "cache":
            assert torch.equal(a[name], b[name]), f"{name}: {a[name]} is not {b[name]}"


def wanted_of(weights, rank):
    engine = Engine(rank)
    engine.load_and_finish((n, t.clone()) for n, t in weights.items())
    return engine


def fill(recorded, weights):
    """What an update does, without dray: each block from its rectangle."""
    for block in recorded.blocks:
        part = weights[block.name][tuple(slice(s, s + n) for s, n in zip(block.start, block.tensor.shape))]
        assert part.shape == block.tensor.shape and block.shape == tuple(weights[block.name].shape)
        block.tensor.copy_(part)
    recorded.fill()


def nothing_changes():
    """Recording changes no byte, no attribute, and no memory of another."""
    for threads in (False, True):
        engine = Engine(0, threads)
        engine.finish()
        before = {n: t.clone() for n, t in state(engine).items()}
        places, held = {n: t.data_ptr() for n, t in state(engine).items()}, dict(vars(engine))
        recorded = record(engine.load_and_finish, CHECKPOINT)
        assert all(torch.equal(t, before[n]) and t.data_ptr() == places[n] for n, t in state(engine).items())
        assert vars(engine).keys() == held.keys() and engine.w_uk is held["w_uk"]
        assert recorded.by_loader == {} and recorded.computed == {"gemma": "add(1)", "a": "exp, neg"}, recorded.computed
        assert set(recorded.in_place) == {n for n in before} - {"cache"}, recorded.in_place
        assert recorded.load_tensors == ["scale"], recorded.load_tensors
        weights = random_weights()
        fill(recorded, weights)
        wanted = wanted_of(weights, 0)
        for name in recorded.in_place:
            assert torch.equal(state(engine)[name], state(wanted)[name]), name


def updates():
    """A trainer of two ranks, cut by rows, unevenly; an engine of two. The first update is by the loader and
    compared, the next ones are in place, and the loader gets what only it can do."""
    weights = random_weights()
    cut = {n: rng.randrange(t.shape[0] + 1) if t.dim() else 0 for n, t in weights.items()}
    part = lambda r: [Block(n, tuple(t.shape), t if not t.dim() else t[cut[n]:] if r else t[:cut[n]],  # noqa: E731
                            (cut[n] if r else 0, *[0] * (t.dim() - 1)) if t.dim() else ())
                      for n, t in weights.items() if r == 0 or t.dim()]
    publishers = [Publisher(part(r), "policy", r, 2, context=trainer) for r in range(2)]
    models = [Engine(r, threads=r == 1) for r in range(TP)]
    subscribers = [Subscriber(record(m.load_and_finish, CHECKPOINT), "policy", "engine", r, TP, context=engines[r])
                   for r, m in enumerate(models)]
    for version in (1, 2, 3):
        for p in publishers:
            p.wait()
        for n, t in weights.items():
            t.copy_(torch.randn(t.shape))
        for m in models:  # memory that holds something else
            m.given.clear()
            if version == 3:
                m.load_state_dict({n: torch.randn(t.shape).to(t.dtype) for n, t in m.state_dict().items()},
                                  assign=True)
        for p in publishers:
            p.publish(version)
        for s in subscribers:
            s.start(min_version=version)
        left = list(subscribers)
        while left:
            left = [s for s in left if not s.poll()]
        for s in subscribers:
            assert s.finish()["version"] == version
        for m in models:
            same(m, wanted_of(weights, m.rank))
            expected = list(CHECKPOINT) if version == 1 else ["scale"]
            assert sorted(m.given) == sorted(expected), m.given
    for s in subscribers + publishers:
        s.close()


class Tied(torch.nn.Module):
    """Two names of one parameter, twice: as it comes, and computed of what comes."""

    def __init__(self):
        super().__init__()
        for first, second in (("head", "embed"), ("norm", "other_norm")):
            parameter = torch.nn.Parameter(torch.randn(5, 8), requires_grad=False)
            self.register_parameter(first, parameter)
            self.register_parameter(second, parameter)

    def load(self, named):
        for name, values in named:
            if name == "embed":
                self.embed.data.copy_(values)
            else:
                values += 1
                self.norm.data.copy_(values)


def tied():
    """What is one tensor under two names is filled once."""
    checkpoint = {"embed": ((5, 8), F32), "norm": ((5, 8), F32)}
    weights, model = random_weights(checkpoint), Tied()
    publisher = Publisher(weights, "tied", context=trainer)
    subscriber = Subscriber(record(model.load, checkpoint, model), "tied", "tied engine", context=engines[0])
    for version in (1, 2, 3):
        publisher.wait()
        for t in weights.values():
            t.copy_(torch.randn(t.shape))
        publisher.publish(version)
        assert subscriber.update(min_version=version)["version"] == version
        assert torch.equal(model.head, weights["embed"]) and torch.equal(model.embed, weights["embed"])
        assert torch.equal(model.other_norm, weights["norm"] + 1)
    subscriber.close()
    publisher.close()


def faults():
    """One element off, wherever it is planted, is found by bytes."""
    engine = Engine(1)
    true = record(engine.load_and_finish, CHECKPOINT)
    for _ in range(100 * scale):
        recorded = copy.copy(true)
        recorded._found = {n: p._replace(parts=list(p.parts)) for n, p in true._found.items()}
        name = rng.choice([n for n, p in recorded._found.items() if p.parts])
        parts = recorded._found[name].parts
        i = rng.randrange(len(parts))
        part = parts[i]
        moved = [d for d, n in enumerate(part.extent) if part.start[d] or
                 n < recorded.tensors[part.name][0][d]]
        if moved and rng.random() < 0.5:  # in the checkpoint's tensor
            d = rng.choice(moved)
            by = -1 if part.start[d] else 1
            parts[i] = part._replace(start=(*part.start[:d], part.start[d] + by, *part.start[d + 1:]))
        else:                             # in the engine's: the bytes before or behind
            room = engine.get_parameter(name).numel() if name != "w_uk" else engine.w_uk.numel() \
                if engine.w_uk is not None else 0
            last = part.offset + sum((n - 1) * s for n, s in zip(part.extent, part.strides))
            if part.offset:
                parts[i] = part._replace(offset=part.offset - 1)
            elif last + 1 < room:
                parts[i] = part._replace(offset=1)
            elif part.extent and part.extent[0] > 1:  # its rows in another order
                parts[i] = part._replace(extent=(part.extent[0] - 1, *part.extent[1:]),
                                         start=(part.start[0] + 1, *part.start[1:]))
            else:
                continue
        with recorded.certify() as load:
            load(random_weights().items())
        assert name in recorded.by_loader and "differs" in recorded.by_loader[name], (name, part, parts[i])
        assert part.name in recorded.load_tensors
    for name in ("gemma", "a"):  # computed in another way
        recorded = copy.copy(true)
        recorded._found = {n: p._replace(parts=list(p.parts)) for n, p in true._found.items()}
        parts = recorded._found[name].parts
        parts[0] = parts[0]._replace(steps=parts[0].steps[:-1])
        with recorded.certify() as load:
            load(random_weights().items())
        assert list(recorded.by_loader) == [name] and "differs" in recorded.by_loader[name], recorded.by_loader
    recorded = record(engine.load_and_finish, CHECKPOINT)
    with recorded.certify() as load:
        load(random_weights().items())
    assert recorded.by_loader == {}, recorded.by_loader


def derived():
    """What is made after loading, where the recording does not span it: its module is the loader's."""
    engine = Engine(0)
    engine.finish()
    recorded = record(engine.load_weights, CHECKPOINT)
    assert "w_uk" not in recorded.in_place and "kv_b" in recorded.in_place
    with recorded.certify(engine.load_and_finish) as load:
        load(random_weights().items())
    assert "kv_b" not in recorded.in_place and "w_uk" in recorded.by_loader["kv_b"], recorded.by_loader
    weights = random_weights()
    for engine in (Engine(0), Engine(0)):  # it holds already what comes: nothing says what is made of it
        engine.load_and_finish((n, t.clone()) for n, t in weights.items())
        recorded = record(engine.load_weights, CHECKPOINT)
        for _ in range(2):
            with recorded.certify(engine.load_and_finish) as load:
                load(weights.items())
            assert not recorded.certified and "kv_b" in recorded.in_place, recorded.by_loader
        with recorded.certify(engine.load_and_finish) as load:
            load(random_weights().items())
        assert recorded.certified and "w_uk" in recorded.by_loader["kv_b"], recorded.by_loader
    engine = Engine(0)  # a load that fails behind all of it, and is done again
    engine.finish()
    recorded = record(engine.load_weights, CHECKPOINT)
    certificate = recorded.certify(engine.load_and_finish)

    def fails():
        with certificate as load:
            load(weights.items())
            raise RuntimeError("planted")
    refused(RuntimeError, "planted", fails)
    with certificate as load:
        load(weights.items())
    assert recorded.certified and "w_uk" in recorded.by_loader["kv_b"], recorded.by_loader
    engine = Engine(0)
    recorded = record(engine.load_weights, CHECKPOINT)
    engine.norm.data = engine.norm.data[:8]  # another shape after loading
    error = refused(dray.DrayError, "norm", lambda: recorded.blocks)
    assert error.name == "ESTALE", error


def the_same_first():
    """A trainer whose first version is what the engine holds: updates go by the loader until bytes have changed."""
    weights, engine = random_weights(), Engine(0)
    engine.load_and_finish((n, t.clone()) for n, t in weights.items())
    publisher = Publisher(weights, "same", context=trainer)
    subscriber = Subscriber(record(engine.load_and_finish, CHECKPOINT), "same", "same engine", context=engines[0])
    for version in (1, 2, 3, 4):
        publisher.wait()
        for t in weights.values() if version > 2 else ():
            t.copy_(torch.randn(t.shape))
        engine.given.clear()
        publisher.publish(version)
        assert subscriber.update(min_version=version)["version"] == version
        same(engine, wanted_of(weights, 0))
        assert sorted(engine.given) == (sorted(CHECKPOINT) if version < 4 else ["scale"]), (version, engine.given)
    subscriber.close()
    publisher.close()


class Plain(torch.nn.Module):
    def __init__(self, load, **shapes):
        super().__init__()
        self._load = load
        for name, shape in shapes.items():
            self.register_buffer(name, torch.randn(shape))

    def load_weights(self, named):
        self._load(self, dict(named))


def elements():
    """What a loader computes of each element alone is computed again behind an update: bit by bit, in any order of
    rounding, moving and computing, constants with it."""
    def two(x):
        whole = torch.full((6, 6), 0.3, dtype=x.dtype)
        whole[1:5, 1:5] = x.t()
        whole += 1
        return whole[:, 1:].bfloat16()
    ways = [lambda x: -torch.exp(x.float()), lambda x: x + 1, lambda x: 1 - x, lambda x: (x * 0.5).sigmoid(),
            lambda x: x.bfloat16().float(), lambda x: x.double().exp().half(), lambda x: x.to(torch.int32), two,
            lambda x: x.float().add_(1).index_select(0, torch.tensor([3, 1])), lambda x: torch.cat([x, x.neg()], 1).abs() / 3,
            lambda x: torch.nn.functional.softplus(x), lambda x: x.flip(0).pow(2) - 2, lambda x: x.exp_().t() + 1]
    for way in ways:
        for given in (F32, BF16):
            for kept in (F32, BF16):
                values = torch.randn(4, 4).to(given)
                wanted = torch.full(way(values.clone()).shape, 7, dtype=kept)
                wanted.copy_(way(values.clone()))
                engine = Plain(lambda e, w, way=way: e.x.copy_(way(w["a"])), x=tuple(wanted.shape))
                engine.x = engine.x.to(kept)
                recorded = record(engine.load_weights, {"a": values})
                assert list(recorded.in_place) == ["x"] and not recorded.load_tensors, recorded.by_loader
                fill(recorded, {"a": values})
                assert torch.equal(engine.x, wanted), (way, given, kept, engine.x, wanted)
    # Beside one that holds the same elements as they are, in a dtype that has more values.
    engine = Plain(lambda e, w: (e.x.copy_(w["a"]), e.y.copy_(w["a"] + 1)), x=(4, 4), y=(4, 4))
    values = torch.randn(4, 4).bfloat16()
    recorded = record(engine.load_weights, {"a": values})
    assert recorded.by_loader == {} and recorded.computed == {"y": "add(1)"}
    fill(recorded, {"a": values})
    assert torch.equal(engine.x, values.float()) and torch.equal(engine.y, (values + 1).float())


def parts_of_parts():
    """A part of no elements has no place in what it is of: read, joined, written and filled, it changes nothing. And one
    element stands in many places."""
    def two(x):
        return torch.stack([x, x.flip(0)], 1)

    def joined(x, d):
        return torch.cat([x, x.narrow(d, 0, 0)], d)

    def through(x):
        whole = torch.full((6, 2, 3), 2.0, dtype=x.dtype)
        whole.copy_(two(x))
        whole[:, :0].copy_(two(x)[:, :0])
        whole[:, :, 3:].fill_(x[0, 0])
        return whole
    for way in (lambda x: joined(two(x), 2), lambda x: joined(two(x), 1).transpose(0, 1), through,
                lambda x: torch.nn.functional.pad(joined(x, 1), (0, 2), value=0.0)):
        for columns in (1, 3):
            values = torch.randn(6, columns)
            wanted = way(values)
            engine = Plain(lambda e, w, way=way: e.x.copy_(way(w["a"])), x=tuple(wanted.shape))
            recorded = record(engine.load_weights, {"a": values})
            assert list(recorded.in_place) == ["x"], recorded.by_loader
            fill(recorded, {"a": values})
            assert torch.equal(engine.x, wanted), (engine.x, wanted)


def what_is_not_understood():
    """Is left to the loader, or refused; nothing is written."""
    tensors = {"a": ((4, 4), F32), "b": ((4, 4), F32)}

    def refusal(load, part, **shapes):
        engine = Plain(load, **(shapes or {"x": (4, 4)}))
        before = engine.x.clone()
        error = refused(Exception, part, record, engine.load_weights, tensors)
        assert torch.equal(engine.x, before)
        return error

    def by_loader(load, expected, names=("a",)):
        engine = Plain(load, x=(4, 4), y=(4, 4))
        before = engine.x.clone()
        recorded = record(engine.load_weights, tensors)
        assert torch.equal(engine.x, before)
        assert expected in recorded.by_loader.get("x", "not at all"), recorded.by_loader
        assert set(names) <= set(recorded.load_tensors) and "y" in recorded.in_place
        return recorded

    def and_y(load):
        def both(engine, named):
            engine.y.copy_(named["b"])
            load(engine, named)
        return both

    by_loader(and_y(lambda e, w: e.x.copy_(w["a"] * w["b"])), "mul", ("a", "b"))
    by_loader(and_y(lambda e, w: e.x.copy_(w["a"].clamp(max=w["a"][0, 0]))), "clamp")
    by_loader(and_y(lambda e, w: e.x.copy_(w["a"].sort(0)[0])), "sort")
    by_loader(and_y(lambda e, w: e.x.copy_(w["a"].view(torch.int32).float())), "rounded")
    by_loader(and_y(lambda e, w: (e.x[:2].copy_(w["a"][:2]), e.x.mul_(3))), "not written")
    by_loader(and_y(lambda e, w: e.x.copy_(reduce_(lambda t, _: t + 1, range(9), w["a"]))), "add")
    by_loader(and_y(lambda e, w: e.x.copy_(w["a"]).normal_()), "random", ())
    by_loader(and_y(lambda e, w: e.x.fill_(w["a"][0, 0].item() * 2)), "number")
    # Emptied into something that is no tensor.
    def empties(engine, named):
        engine.y.copy_(named["b"])
        engine.x.copy_(named["a"])
        engine.kept = handle(engine.x)
        engine.x = torch.empty(0)
    engine = Plain(empties, x=(4, 4), y=(4, 4))
    recorded = record(engine.load_weights, tensors)
    assert recorded.load_tensors == ["a"] and list(recorded.in_place) == ["y"] and engine.x.numel() == 16
    engine = Plain(lambda e, w: (e.x.copy_(w["a"]), setattr(e, "kept", handle(e.x))), x=(4, 4))
    assert record(engine.load_weights, tensors).load_tensors == ["a"]
    refusal(lambda e, w: e.x.copy_(torch.from_numpy(w["a"].numpy())), "numpy")

    # A tensor that the loader decides by is its loader's; the rest is recorded.
    def decides(engine, named):
        engine.y.copy_(named["b"])
        if "a" in named and (named["a"] > 0).any():
            engine.x.copy_(named["a"])
    engine = Plain(decides, x=(4, 4), y=(4, 4))
    recorded = record(engine.load_weights, tensors)
    assert recorded.load_tensors == ["a"] and list(recorded.in_place) == ["y"], recorded.in_place

    # A thread that was there before copies through memory of its own.
    orders, done = queue.Queue(), queue.Queue()

    def works():
        while (order := orders.get()) is not None:
            try:
                done.put(order())
            except BaseException as failure:
                done.put(failure)

    def elsewhere(function):
        orders.put(function)
        if isinstance(answer := done.get(), BaseException):
            raise answer

    def through(engine, named):
        def copies():
            mine = torch.zeros(4, 4)
            mine.copy_(named["a"])
            engine.x.copy_(mine)
        engine.y.copy_(named["b"])
        if "a" in named:
            elsewhere(copies)
    thread = threading.Thread(target=works, daemon=True)
    thread.start()
    engine = Plain(through, x=(4, 4), y=(4, 4))
    before = engine.x.clone()
    recorded = record(engine.load_weights, tensors)
    assert recorded.load_tensors == ["a"] and list(recorded.in_place) == ["y"], recorded.in_place
    assert torch.equal(engine.x, before)
    # Straight into the engine it is seen there, too; and so are memory of their own in new threads and pools.
    engine = Plain(lambda e, w: elsewhere(lambda: e.x.copy_(w["a"])), x=(4, 4))
    assert "x" in record(engine.load_weights, tensors).in_place
    orders.put(None)
    thread.join()

    def anew(engine, named):
        def copies():
            mine = torch.zeros(4, 4)
            mine.copy_(named["a"])
            engine.x.copy_(mine)
        worker = threading.Thread(target=copies)
        worker.start()
        worker.join()
    engine = Plain(anew, x=(4, 4))
    assert "x" in record(engine.load_weights, tensors).in_place
    refused(TypeError, "into", record, lambda named: None, tensors)


def where_elements_go():
    """A tensor of the checkpoint that says where elements go is left to the loader, together with these; so are sums.
    Numbers that the loader puts among elements are constants, also among whole numbers."""
    tensors = {"i": ((3,), torch.int64), "a": ((6, 4), F32)}

    def through(way):
        def load(engine, named):
            engine.x.copy_(way(named["a"], named["i"]))
        return load

    def put(a, i):
        whole = torch.zeros(6, 4)
        whole[i] = a[:3]
        return whole

    def copied(a, i):
        return torch.zeros(6, 4).index_copy_(0, i, a[:3])

    def is_left(way, wanted, *shape):
        engine = Plain(through(way), x=shape)
        recorded = record(engine.load_weights, tensors)
        assert list(recorded.by_loader) == ["x"], recorded.in_place
        assert recorded.load_tensors == wanted, recorded.load_tensors
    is_left(lambda a, i: a[i], ["a", "i"], 3, 4)
    is_left(lambda a, i: a.index_select(0, i + 0), ["a", "i"], 3, 4)
    is_left(lambda a, i: a.gather(0, i.view(1, 3)), ["a", "i"], 1, 3)
    is_left(lambda a, i: a[torch.zeros(3, dtype=i.dtype).copy_(i)], ["a", "i"], 3, 4)
    is_left(put, ["a", "i"], 6, 4)
    is_left(copied, ["a", "i"], 6, 4)
    at = torch.tensor([0, 2, 2])
    is_left(lambda a, i: torch.zeros(6, 4).index_put_((at,), a[:3], accumulate=True), ["a"], 6, 4)
    is_left(lambda a, i: torch.ones(6, 4).scatter_(0, at.view(3, 1), a[:3, :1], reduce="multiply"), ["a"], 6, 4)
    whole = {"i": torch.arange(7, 10), "a": torch.arange(24).view(6, 4)}

    def numbers(a, i):
        a[at[:2]] = 3
        return a.scatter_(1, at.view(3, 1), 1)
    engine = Plain(through(numbers), x=(6, 4))
    recorded = record(engine.load_weights, whole)
    assert list(recorded.in_place) == ["x"] and recorded.load_tensors == [], recorded.by_loader
    engine.x.fill_(-1)
    fill(recorded, whole)
    assert torch.equal(engine.x, numbers(whole["a"].clone(), None).float()), engine.x


@torch.library.custom_op("dray_test::shuffle", mutates_args=())
def shuffle(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(2, 2, -1).transpose(0, 1).reshape(x.shape).contiguous()


@torch.library.custom_op("dray_test::shuffle_into", mutates_args=("out",))
def shuffle_into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.flip(0))


@torch.library.custom_op("dray_test::nearly", mutates_args=())
def nearly(x: torch.Tensor) -> torch.Tensor:
    """Moves, but for numbers above 100."""
    return torch.where(x > 100, x - 1, x).flip(0)


@torch.library.custom_op("dray_test::handle", mutates_args=())
def handle(x: torch.Tensor) -> int:
    return 7


def custom_operators():
    """Are tried: one that only moves elements is followed, another one is its loader's."""
    tensors = {"a": ((4, 6), F32), "b": ((4, 6), F32), "c": ((4, 6), F32)}

    def load(engine, named):
        engine.x.copy_(shuffle(named["a"]))
        shuffle_into(named["b"], engine.y)
        engine.z.copy_(nearly(named["c"]))
    engine = Plain(load, x=(4, 6), y=(4, 6), z=(4, 6))
    recorded = record(engine.load_weights, tensors)
    assert list(recorded.in_place) == ["x", "y"] and "nearly" in recorded.by_loader["z"], recorded.by_loader
    weights = random_weights(tensors)
    fill(recorded, weights)
    assert torch.equal(engine.x, shuffle(weights["a"])) and torch.equal(engine.y, weights["b"].flip(0))


def steps(random_):
    """A random way from tensors to one tensor: functions of a torch.Generator's making, replayed."""
    def narrow(t):
        d = random_.randrange(t.dim())
        n = random_.randrange(1, t.shape[d] + 1)
        at = random_.randrange(t.shape[d] - n + 1)
        return lambda x: x.narrow(d, at, n)

    def split(t):
        d = random_.randrange(t.dim())
        of = [k for k in range(1, t.shape[d] + 1) if t.shape[d] % k == 0]
        k = random_.choice(of)
        return lambda x: x.unflatten(d, (k, -1))

    def flatten(t):
        if t.dim() < 2:
            return lambda x: x.contiguous()
        d = random_.randrange(t.dim() - 1)
        return lambda x: x.flatten(d, d + 1)

    def order(t):
        d = random_.sample(range(t.dim()), t.dim())
        return lambda x: x.permute(d)

    def select(t):
        d = random_.randrange(t.dim())
        i = random_.randrange(t.shape[d])
        return (lambda x: x.select(d, i)) if t.dim() > 1 else (lambda x: x.clone())

    def pick(t):
        d = random_.randrange(t.dim())
        i = torch.tensor([random_.randrange(t.shape[d]) for _ in range(random_.randrange(1, 5))])
        return lambda x: x.index_select(d, i)

    def every(t):
        return lambda x: x[::2] if x.dim() < 2 else x[:, 1::2] if x.shape[1] > 1 else x

    def joined(t):
        d = random_.randrange(t.dim())
        k = random_.randrange(0, t.shape[d] + 1)
        return lambda x: torch.cat([x.narrow(d, k, x.shape[d] - k), x.narrow(d, 0, k)], d)

    def stacked(t):
        return lambda x: torch.stack([x, x.flip(0)], 1)

    def padded(t):
        value = random_.choice([0.0, -1.5])
        return lambda x: torch.nn.functional.pad(x, (0, 2), value=value)

    def buffered(t):
        d = random_.randrange(t.dim())

        def through(x):
            sizes = list(x.shape)
            sizes[d] += 2
            whole = torch.full(sizes, 2.0, dtype=x.dtype)
            whole.narrow(d, 1, x.shape[d]).copy_(x)
            return whole
        return through

    def spread(t):
        d = random_.randrange(t.dim() + 1)

        def through(x):
            whole = torch.full((*x.shape[:d], 3, *x.shape[d:]), 2.0, dtype=x.dtype)
            whole.copy_(x.unsqueeze(d))
            return whole
        return through

    def overwritten(t):
        d, e = random_.randrange(t.dim()), random_.randrange(t.dim())
        n, m = (random_.randrange(t.shape[k] + 1) for k in (d, e))
        to, at = random_.randrange(t.shape[d] - n + 1), random_.randrange(t.shape[d] - n + 1)

        def through(x):
            whole = x.clone()
            whole.narrow(d, to, n).copy_(x.narrow(d, at, n))
            whole.narrow(e, 0, m).fill_(-3.0)
            whole.narrow(d, at, n)[:1].copy_(x.narrow(d, to, n)[:1])
            return whole
        return through

    def interleaved(t):
        d = random_.randrange(t.dim())

        def through(x):
            whole = torch.zeros([n * (2 if i == d else 1) for i, n in enumerate(x.shape)], dtype=x.dtype)
            even, odd = whole.unflatten(d, (-1, 2)).unbind(d + 1)
            even.copy_(x)
            odd.copy_(x.flip(d))
            return whole
        return through

    ways = [narrow, split, spread, overwritten, interleaved, flatten, order, select, pick, every, joined, stacked, padded, buffered,
            lambda t: lambda x: x.clone(), lambda t: lambda x: x.contiguous(),
            lambda t: lambda x: x.float(), lambda t: lambda x: x + 1, lambda t: lambda x: -x.exp().clamp(max=50), lambda t: lambda x: x.repeat(*[1] * (x.dim() - 1), 2)]
    return random_.choice(ways)


def random_ways():
    """Loaders of random operators, into part of a tensor or all of it."""
    in_place = total = 0
    for case in range(150 * scale):
        case_seed = rng.randrange(2**32)
        random_ = random.Random(case_seed)
        shape = tuple(random_.randrange(1, 7) for _ in range(random_.randrange(1, 4)))
        values, way = torch.randn(shape).bfloat16(), []
        made = values
        for _ in range(random_.randrange(1, 7)):
            step = steps(random_)(made)
            after = step(made)
            if 0 < after.numel() < 4000 and after.dim() <= 5:
                made, way = after, [*way, step]
        larger = [n + random_.randrange(3) for n in made.shape]
        start = [random_.randrange(m - n + 1) for m, n in zip(larger, made.shape)]
        turned = random_.random() < 0.3
        dtype = random_.choice([BF16, F32])

        def load(engine, named):
            t = named["a"]
            for step in way:
                t = step(t)
            into = engine.x.t() if turned and engine.x.dim() == 2 else engine.x
            into[tuple(slice(s, s + n) for s, n in zip(start, t.shape))].copy_(t)
        engine = Plain(load, x=(larger[::-1] if turned and len(larger) == 2 else larger))
        engine.x = engine.x.to(dtype)
        wanted = Plain(load, x=engine.x.shape)
        wanted.x = engine.x.clone()
        wanted.load_weights([("a", values.clone())])
        before = engine.x.clone()
        recorded = record(engine.load_weights, {"a": values})
        assert torch.equal(engine.x, before), f"case {case_seed}"
        total += 1
        if "x" in recorded.in_place:
            in_place += 1
            fill(recorded, {"a": values})
            assert torch.equal(engine.x, wanted.x), f"case {case_seed}: {engine.x} is not {wanted.x}"
        else:
            assert "x" in recorded.by_loader, f"case {case_seed}"
    print(f"{in_place} of {total} random ways in place")
    assert in_place > 0.9 * total


CASES = [nothing_changes, updates, tied, faults, derived, the_same_first, elements, parts_of_parts, what_is_not_understood, where_elements_go, custom_operators, random_ways]
with coordinator() as folder:
    with Context(role="trainer", timeout=20) as trainer, Context(role="engine", timeout=20) as one, \
            Context(role="engine", rank=1, timeout=20) as two:
        engines = [one, two]
        failed = try_all(CASES)
sys.exit(failed)
