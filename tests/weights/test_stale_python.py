"""Modules that replace their parameters: what is published is what the module has now, what is updated
is what the engine has now, and where that cannot be known, or what was given is gone, there is
DRAY_ESTALE and the parameter's name. Never is memory read or written that the module has no more."""
import contextlib
import gc
import os
import subprocess
import sys
import tempfile

from begin import coordinator, needs

with needs:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import dray
from dray.weights import Block, Context, Publisher, Subscriber, fsdp1_parameters
from served import refused, try_all

SHAPES = {"embed.weight": (6, 4), "linear.weight": (4, 4), "linear.bias": (4,)}


class Model(torch.nn.Module):
    """Its head is tied; `norm` has buffers."""

    def __init__(self, value, tied=True):
        super().__init__()
        self.embed, self.linear = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4, affine=False)
        self.head = torch.nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        with torch.no_grad():
            for p in self.parameters():
                p.fill_(value)


def values(value):
    """What load_state_dict takes for a model of that value."""
    return {n: t.clone() for n, t in Model(value).state_dict().items()}


def assign(model, value):
    """As checkpoints are loaded on meta devices: all Parameters are other objects then."""
    model.load_state_dict(values(value), assign=True)
    model.head.weight = model.embed.weight


def data_of(model):
    """All parameters are the same objects with other memory, as .to() leaves them."""
    return model.double().float()


class Pair:
    """A publisher and a subscriber of a model's name; `taken` is where updates go."""

    def __init__(self, name, parameters, taken=None, blocks=None, **options):
        self.taken = taken or {n: torch.zeros(s) for n, s in SHAPES.items()}
        self.publisher = Publisher(parameters, name, **options, context=trainer)
        self.subscriber = Subscriber(self.taken if blocks is None else blocks, name, name, context=engine)
        self.version = 0

    def publish(self):
        self.publisher.wait()
        self.version += 1
        self.publisher.publish(self.version)

    def moves(self, value):
        """The next version arrives, and is `value` everywhere."""
        self.publish()
        report = self.subscriber.update(min_version=self.version)
        assert report["verified_tensors"], report
        for name, tensor in self.taken.items():
            assert (tensor == value).all(), f"{name} should be {value}, is {tensor.flatten()[:4].tolist()}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.subscriber.close()
        self.publisher.close()


# ---- trainer -------------------------------------------------------------------------------------

def trainer_module():
    """A module, and the generator that it hands out: both are the module."""
    for number, given in enumerate((lambda m: m, lambda m: m.named_parameters())):
        model = Model(1)
        with Pair(f"module-{number}", given(model)) as pair:
            pair.moves(1)
            assign(model, 2)
            pair.moves(2)
            data_of(model)
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(3)
            pair.moves(3)


class Prefixed(Model):
    def named_parameters(self, *arguments, **options):
        for name, parameter in super().named_parameters(*arguments, **options):
            yield "inner." + name, parameter


def trainer_names():
    """A generator is asked again as it was asked, whoever's it is."""
    gives = (lambda m: m, lambda m: m.named_parameters(),
             lambda m: torch.nn.Module.named_parameters(m, "inner"))
    for number, give in enumerate(gives):
        model = Prefixed(1)
        with Pair(f"names-{number}", give(model),
                  {"inner." + n: torch.zeros(s) for n, s in SHAPES.items()}) as pair:
            pair.moves(1)
            assign(model, 2)
            pair.moves(2)
            model.head.weight = torch.nn.Parameter(model.embed.weight.data)
            pair.moves(2)


def trainer_ties():
    """A tie that was broken is another model; one under another object is the same."""
    model = Model(1)
    with Pair("ties", model) as pair:
        pair.moves(1)
        model.load_state_dict(values(2), assign=True)  # two Parameters over two memories
        error = refused(dray.DrayError, "head.weight", pair.publisher.publish, 2)
        assert error.name == "ESTALE", error.name
        model.head.weight = torch.nn.Parameter(model.embed.weight.data)  # the same memory again
        pair.moves(2)
        del model.linear.bias
        assert refused(dray.DrayError, "linear.bias", pair.publisher.publish, 9).name == "ESTALE"
        model.linear.bias = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        assert refused(dray.DrayError, "linear.bias", pair.publisher.publish, 9).name == "ESTALE"
        model.linear.bias = torch.nn.Parameter(torch.full((4,), 2.0))
        pair.moves(2)


def trainer_pairs():
    """Pairs of Parameters that the module has no more; a state dict; a mapping that is kept up to
    date."""
    model = Model(1)
    with Pair("pairs", dict(model.named_parameters())) as pair:
        pair.moves(1)
        data_of(model)
        pair.moves(1)  # the same objects
        assign(model, 2)
        assert refused(dray.DrayError, "embed.weight", pair.publisher.publish, 9).name == "ESTALE"
    model = Model(1, tied=False)
    given = model.state_dict()
    with Pair("state", {n: t for n, t in given.items() if "norm" not in n}) as pair:
        pair.moves(1)
    with Pair("dict", given) as pair:
        pair.moves(1)
        assign(model, 2)
        error = refused(dray.DrayError, "embed.weight", pair.publisher.publish, 9)
        assert error.name == "ESTALE" and "the module itself" in str(error), error
    given = {n: torch.ones(s) for n, s in SHAPES.items()}
    with Pair("mapping", given) as pair:
        pair.moves(1)
        given.update({n: torch.full(s, 2.0) for n, s in SHAPES.items()})
        pair.moves(2)
        del given["linear.bias"]
        assert refused(dray.DrayError, "linear.bias", pair.publisher.publish, 9).name == "ESTALE"


def trainer_buffers():
    model = Model(1)
    taken = {n: torch.zeros(4) for n in ("norm.running_mean", "norm.running_var")}
    with Pair("buffers", model, taken, buffers=True) as pair:
        for value in (1, 2):
            model.norm.running_mean = torch.full((4,), float(value))
            model.norm.running_var.fill_(value)
            pair.moves(value)
            data_of(model)


def trainer_fsdp2():
    """DTensors: fully_shard's parameters, replaced by others."""
    model = Model(1)
    mesh = init_device_mesh("cpu", (1,))
    for layer in (model.linear, model):
        fully_shard(layer, mesh=mesh)
    with Pair("fsdp2", model) as pair:
        pair.moves(1)
        state = {n: t.clone() * 2 if "norm" not in n else t for n, t in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        model.head.weight = model.embed.weight
        pair.moves(2)
        data_of(model)
        pair.moves(2)


def trainer_fsdp1():
    model = Model(1, tied=False)
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    for number, given in enumerate((fsdp1_parameters(wrapped), wrapped)):
        with Pair(f"fsdp1-{number}", given) as pair:
            for value in (1, 2):
                with FullyShardedDataParallel.summon_full_params(wrapped):
                    for p in wrapped.parameters():
                        p.data.fill_(value)
                pair.moves(value)


# ---- engine --------------------------------------------------------------------------------------

TAKES = """
import sys, torch, dray
taken = torch.zeros(1000)
with dray.Subscriber({"w": taken}, "release", group="release") as subscriber:
    for line in sys.stdin:
        subscriber.update(min_version=int(line), timeout=20)
        print(taken.min().item(), taken.max().item(), flush=True)
"""


def trainer_release():
    """An engine of another process has the memory mapped when it is to be released: the next publish offers it again."""
    memory = dray.weights.empty(1000)
    with subprocess.Popen([sys.executable, "-c", TAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONPATH": os.path.join(os.environ["DRAY_SOURCE_DIR"], "python")}) as other, \
            Publisher({"w": memory}, "release", context=trainer) as publisher:
        for version in (1, 2, 3):
            memory.fill_(version)
            publisher.publish(version)
            print(version, file=other.stdin, flush=True)
            assert [float(word) for word in other.stdout.readline().split()] == [version] * 2
            assert publisher.wait() == 0
            refused(dray.DrayTimeout, "1 members have it mapped still", publisher.release, timeout=0.1)
        other.stdin.close()
        assert other.wait(30) == 0
        publisher.release()
        publisher.publish(4)


def trainer_moves_in_vain():
    """The coordinator ends before a publish tells of a move, whose memory is freed with the error: it is not touched
    when another coordinator takes the publisher back, and the next publish tells of the move wherever the parameters are."""
    def serve():
        server = subprocess.Popen([os.environ["DRAY_PROGRAM"], "serve", "--listen", address], stdout=subprocess.PIPE,
                                  text=True)
        end.callback(server.communicate)
        end.callback(server.kill)
        assert server.stdout.readline().startswith("listening")
        return server

    for back in (False, True):
        with contextlib.ExitStack() as end:
            address = f"unix:{end.enter_context(tempfile.TemporaryDirectory())}/s"
            first = torch.ones(1000)
            given, server = {"w": first}, serve()
            context = end.enter_context(Context(address, role="trainer", timeout=2))
            publisher = end.enter_context(Publisher(given, "vain", context=context, timeout=2))
            if not back:
                publisher.publish(1)
                publisher.release()
            server.kill()
            server.wait()
            given["w"] = torch.full((1000,), 2.0)
            refused(dray.DrayError, "the coordinator went away", publisher.publish, 2)
            gc.collect()
            noise = [bytearray(b"\xff" * size) for size in range(16, 600) for _ in range(20)]  # where it was
            serve()
            if back:
                given["w"] = first
            else:
                publisher.release()
            publisher.publish(3)
            with Context(address, role="engine", timeout=20) as context:
                taken = torch.zeros(1000)
                with Subscriber({"w": taken}, "vain", context=context) as subscriber:
                    assert subscriber.update()["version"] == 3 and taken.eq(given["w"]).all()
            assert len(noise) == 584 * 20


def negated():
    """Views with PyTorch's negative bit, whose memory has the other signs, are refused: at first, and later."""
    def view():
        return torch._neg_view(torch.zeros(3))
    assert view().is_neg() and torch.zeros(3, dtype=torch.complex64).conj().imag.is_neg()
    for opens in (lambda given: Publisher(given, "negated", context=trainer),
                  lambda given: Subscriber(given, "negated", "negated", context=engine)):
        for given in ({"w": view()}, [Block("w", (3,), view)]):
            assert refused(dray.DrayError, ["w: ", "is_neg()"], opens, given).name == "EUNSUPPORTED"
    source, taken = {"w": torch.zeros(3)}, {"w": torch.zeros(3)}
    with Publisher(source, "negated", context=trainer) as publisher, \
            Subscriber(taken, "negated", "negated", context=engine) as subscriber:
        publisher.publish(1)
        subscriber.update()
        publisher.wait()
        source["w"] = torch._neg_view(source["w"])
        assert refused(dray.DrayError, "is_neg()", publisher.publish, 2).name == "EUNSUPPORTED"
        source["w"] = source["w"].resolve_neg()
        publisher.publish(2)
        taken["w"] = torch._neg_view(taken["w"])
        assert refused(dray.DrayError, "is_neg()", subscriber.update, min_version=2).name == "EUNSUPPORTED"


def numbers():
    """Numbers of versions that have no 64 bits are refused, and not cut to those."""
    taken = {"w": torch.zeros(3)}
    with Publisher({"w": torch.ones(3)}, "numbers", context=trainer) as publisher, \
            Subscriber(taken, "numbers", "numbers", context=engine) as subscriber:
        publisher.publish(3)
        for number in (-1, 2**64, 2**64 + 3):
            calls = (publisher.publish, publisher.deliver, publisher.wait, publisher.wait_stream,
                     lambda number: subscriber.update(min_version=number),
                     lambda number: subscriber.prefetch(min_version=number),
                     lambda number: subscriber.start(min_version=number), subscriber.start_commit, subscriber.commit,
                     lambda number: subscriber.update_weights_from_disk("nowhere", number),
                     lambda number: dray.checkpoint.save("nowhere", number, taken),
                     lambda number: dray.checkpoint.save("nowhere", 1, taken, stay=[number]))
            for call in calls:
                refused(ValueError, ["from 0 to 2**64 - 1 expected", f"found {number}"], call, number)
        refused(TypeError, ["version", "whole number", "4.5"], publisher.publish, 4.5)
        assert subscriber.update(min_version=3)["version"] == 3
        publisher.wait()
        publisher.publish(2**64 - 1)
        assert subscriber.update(min_version=2**64 - 1)["version"] == 2**64 - 1


def engine_module():
    """Laid out anew where the module is known."""
    for number, given in enumerate((lambda m: m, lambda m: m.named_parameters())):
        source, model = Model(1), Model(0)
        with Pair(f"engine-{number}", source, blocks=given(model)) as pair:
            for value, change in ((1, None), (2, data_of), (3, lambda m: assign(m, 7)), (4, None),
                                  (5, lambda m: m.to(torch.bfloat16).float())):
                if change:
                    change(model)
                pair.taken = dict(model.named_parameters())
                with torch.no_grad():
                    for p in source.parameters():
                        p.fill_(value)
                pair.moves(value)
                assert pair.subscriber.version == pair.version


def engine_pairs():
    """Without the module: Parameters are followed while they live."""
    source, model = Model(1), Model(0)
    with Pair("engine-pairs", source, blocks=dict(model.named_parameters())) as pair:
        pair.taken = dict(model.named_parameters())
        pair.moves(1)
        data_of(model)
        pair.moves(1)
        assign(model, 7)
        pair.taken = {}
        pair.publish()
        error = refused(dray.DrayError, "embed.weight", pair.subscriber.update, min_version=pair.version)
        assert error.name == "ESTALE", error.name
        assert all((p == 7).all() for p in model.parameters())


def views(model, of):
    """The halves of linear.weight, as hand-made Blocks have them."""
    return [Block("linear.weight", (4, 4), of(model, at), (at, 0)) for at in (0, 2)]


def engine_views():
    """Views of a parameter whose memory is another one now; views that are looked up anew."""
    cuts = {"view": lambda m, at: m.linear.weight[at:at + 2],
            "data": lambda m, at: m.linear.weight.data[at:at + 2],
            "detached": lambda m, at: m.linear.weight.detach()[at:at + 2],
            "found": lambda m, at: lambda: m.linear.weight[at:at + 2]}
    cuts["of"] = cuts["gone"] = cuts["data"]
    for name, of in cuts.items():
        source, model = Model(1), Model(0)
        blocks = views(model, of)
        if name in ("of", "gone"):
            blocks = [Block(b.name, b.shape, b.tensor, b.start, of=model.linear.weight) for b in blocks]
        with Pair(f"views-{name}", source, {}, blocks) as pair:
            blocks = blocks if name in ("view", "of", "gone") else None  # seen even so
            pair.taken = {"linear.weight": model.linear.weight}
            pair.moves(1)
            if name == "gone":  # the parameter itself, not its memory alone
                pair.taken = {}
                assign(model, 7)
            else:
                data_of(model)
            if name == "found":
                pair.moves(1)
                assign(model, 7)
                pair.taken = {"linear.weight": model.linear.weight}
                pair.moves(1)
                continue
            with torch.no_grad():
                model.linear.weight.zero_()
            pair.publish()
            for call in (pair.subscriber.update, pair.subscriber.prefetch, pair.subscriber.start):
                error = refused(dray.DrayError, "linear.weight", call, min_version=pair.version)
                assert error.name == "ESTALE", error.name
            assert not model.linear.weight.any()


def nothing_is_kept():
    """Memory that parameters have left goes with the next publish or update, as offloading wants it."""
    gives = {"module": lambda m: m, "parameters": lambda m: dict(m.named_parameters()),
             "found": lambda m: views(m, lambda m, at: lambda: m.linear.weight[at:at + 2]),
             "blocks": lambda m: [Block(n, tuple(p.shape), p) for n, p in m.named_parameters()]}
    for name, give in gives.items():
        source, model = (dray.weights.share(Model(1, tied=False)) for _ in range(2))
        bases = [m.embed.weight.data_ptr() for m in (source, model)]
        with Pair(f"kept-{name}", give(source), {"linear.weight": model.linear.weight},
                  give(model)) as pair:
            pair.moves(1)
            for tensor in (t for m in (source, model) for t in (*m.parameters(), *m.buffers())):
                tensor.data = tensor.data.clone()
            assert all(map(dray.host.find, bases))
            pair.moves(1)
            assert not any(map(dray.host.find, bases)), f"{name}: memory that was left is still there"


def engine_steps():
    """What was prefetched for memory that is another now is not swapped in; a move while an update is
    under way is told."""
    source, model = Model(1), Model(0)
    with Pair("steps", source, blocks=model) as pair:
        pair.taken = dict(model.named_parameters())
        pair.publish()
        pair.subscriber.prefetch(min_version=1)
        data_of(model)
        assert refused(dray.DrayError, "prefetched", pair.subscriber.commit).name == "ENOENT"
        pair.subscriber.prefetch(min_version=1)
        pair.subscriber.commit()
        assert (model.linear.weight == 1).all()
        pair.subscriber.verify()
        data_of(model)
        assert refused(dray.DrayError, "embed.weight", pair.subscriber.verify).name == "ESTALE"
        pair.publish()
        pair.subscriber.start(min_version=2)
        data_of(model)
        while not pair.subscriber.poll():
            pass
        assert refused(dray.DrayError, "embed.weight", pair.subscriber.finish).name == "ESTALE"
        pair.moves(1)


def engine_ranks():
    """One of two ranks moves while the other has begun already: both get the update."""
    source, models = Model(1), [Model(0), Model(0)]
    half = [[Block("linear.weight", (4, 4), (lambda m: lambda: m.linear.weight[:2])(m), (2 * r, 0))]
            for r, m in enumerate(models)]
    with Publisher(source, "ranks", context=trainer) as publisher, \
            Subscriber(half[0], "ranks", "ranks", 0, 2, context=engine) as first, \
            Subscriber(half[1], "ranks", "ranks", 1, 2, context=engine) as second:
        for version in (1, 2, 3):
            publisher.wait()
            publisher.publish(version)
            first.start(min_version=version)
            first.poll()
            if version > 1:
                data_of(models[1])
            second.start(min_version=version)
            left = [first, second]
            while left:
                left = [s for s in left if not s.poll()]
            for s, m in zip((first, second), models):
                assert s.finish()["version"] == version == s.version
                assert (m.linear.weight[:2] == 1).all()


CASES = [trainer_module, trainer_names, trainer_ties, trainer_pairs, trainer_buffers, trainer_fsdp2, trainer_fsdp1,
         trainer_release, trainer_moves_in_vain, negated, numbers, engine_module, engine_pairs, engine_views,
         nothing_is_kept, engine_steps, engine_ranks]
with coordinator() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=0, world_size=1)
    with Context(role="trainer", timeout=20) as trainer, Context(role="engine", timeout=20) as engine:
        failed = try_all(CASES)
    dist.destroy_process_group()
sys.exit(failed)
