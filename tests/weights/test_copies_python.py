"""Publishers of generators: tensors that are gone when the next one comes are copied, each rank keeps its share of the rows, and
engines get what was generated; what is not as it was first given is refused by name, and what was published stays."""
import itertools
import weakref

from begin import coordinator, needs, rng, seed

with needs:
    import torch

import dray
from dray.weights import Context, Publisher, Subscriber
from served import refused

SHAPES = {"scalar": ((), torch.float32), "norm": ((5,), torch.bfloat16), "one": ((1, 7), torch.float32), "conv": ((6, 3, 2, 2, 2), torch.float32),
          **{f"layer.{i}": ((rng.randrange(1, 40), rng.randrange(1, 9)), rng.choice([torch.float32, torch.bfloat16])) for i in range(8)}}
alive, most = 0, 0


def ended():
    global alive
    alive -= 1


def generated(version, shapes=None):
    """A version's tensors: one at a time, as far as this goes."""
    global alive, most
    for name, (shape, dtype) in (shapes or SHAPES).items():
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed + version * 1009 + sum(map(ord, name)))).to(dtype)
        alive += 1
        most = max(most, alive)
        weakref.finalize(tensor, ended)
        yield name, tensor
        del tensor


def ends_early(version):
    yield from itertools.islice(generated(version), len(SHAPES) // 2)
    raise OSError("a rank was lost")


def ranks(world, again):
    """Versions of a trainer of so many ranks; by a function for each, or by publish's argument."""
    version = [1]
    publishers = [Publisher((lambda: generated(version[0])) if again else generated(1), f"m{world}{again}", rank, world, context=trainer,
                            copy=True) for rank in range(world)]
    taken = {n: torch.zeros(shape, dtype=dtype) for n, (shape, dtype) in SHAPES.items()}
    with Subscriber(taken, f"m{world}{again}", "whole", 0, 1, context=engine) as taker:
        for version[0] in (1, 2, 3):
            for p in publishers:
                p.publish(version[0], tensors=None if again or version[0] == 1 else generated(version[0]))
            assert taker.update(min_version=version[0])["version"] == version[0]
            for name, tensor in generated(version[0]):
                assert torch.equal(taken[name], tensor), (world, version[0], name)
                del tensor
    held = sum(block.tensor.numel() for p in publishers for _, block in p._given.pairs())
    assert held == sum(t.numel() for t in taken.values()), held  # nothing is held twice
    for p in publishers:
        p.close()


def refusals():
    p = Publisher(generated(1), "r", context=trainer, copy=True)
    p.publish(1)
    refused(ValueError, "tensors= expected", p.publish, 2)
    for change, part in ((lambda s: s.update(norm=((6,), torch.bfloat16)), "norm was"),
                         (lambda s: s.update(norm=((5,), torch.float32)), "norm was"),
                         (lambda s: s.update(other=((5,), torch.float32)), "other was not among"),
                         (lambda s: s.pop("one"), "one and 0 others were not")):
        shapes = dict(SHAPES)
        change(shapes)
        assert refused(dray.DrayError, part, p.publish, 2, tensors=generated(2, shapes)).name == "ESTALE"
    p.publish(3, tensors=generated(3))
    taken = {n: torch.zeros(shape, dtype=dtype) for n, (shape, dtype) in SHAPES.items()}
    with Subscriber(taken, "r", "whole", context=engine) as taker:
        assert taker.update()["version"] == 3
    assert all(torch.equal(taken[n], t) for n, t in generated(3))
    p.close()
    for again in (False, True):  # one that ends in the middle leaves nothing that may be published
        with Publisher((lambda: generated(1)) if again else generated(1), f"half{again}", context=trainer, copy=True) as p:
            refused(OSError, "lost", p.publish, 1, tensors=ends_early(2))
            if again:
                p.publish(1)
            else:
                refused(ValueError, "tensors= expected", p.publish, 1)
                p.publish(1, tensors=generated(1))
            with Subscriber(taken, f"half{again}", "whole", context=engine) as taker:
                taker.update()
        assert all(torch.equal(taken[n], t) for n, t in generated(1)), again
    refused(ValueError, "came twice", Publisher, [("a", torch.zeros(2))] * 2, "t", context=trainer, copy=True)
    with Publisher({"a": torch.zeros(2)}, "t", context=trainer) as plain:
        refused(TypeError, "copy=True", plain.publish, 1, tensors=[])


with coordinator() as folder:
    with Context(role="trainer", timeout=20) as trainer, Context(role="engine", timeout=20) as engine:
        for world in (1, 3):
            for again in (False, True):
                ranks(world, again)
        assert most <= 2, f"{most} tensors of a generator were kept at once"
        refusals()
