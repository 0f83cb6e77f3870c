"""Tied parameters of a module: engines find the tensor by each of its names, also when it has moved; an engine that
ties what its trainer does not commits no version in which the two have different values."""
from begin import needs

with needs:
    import torch
    from torch import nn

import dray
from served import refused


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight


with dray.serve():
    model, names = Model(True), ["embed.weight", "inner.weight", "inner.bias", "head.weight"]
    held = {name: torch.zeros_like(model.get_parameter(name)) for name in names}
    with dray.Publisher(model) as publisher, dray.Subscriber(held) as subscriber:
        for version in range(1, 4):
            if version == 3:  # all parameters lie elsewhere
                model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
                model.head.weight = model.embed.weight
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.randn(p.shape))
            publisher.publish(version)
            subscriber.update()
            for name in names:
                assert torch.equal(held[name], model.get_parameter(name)), (version, name)
            assert torch.equal(held["head.weight"], held["embed.weight"])
            publisher.wait()
    # What is not tied has no other name.
    with dray.Publisher(Model(True), "tied"), dray.Publisher(Model(False), "own") as own:
        own.publish(1)
        with dray.Subscriber({"head.weight": torch.zeros(50, 8)}, "own") as subscriber:
            assert subscriber.update()["bytes"] == 50 * 8 * 4
        refused(dray.DrayError, "tail", dray.Subscriber({"tail.weight": torch.zeros(50, 8)}, "own", group="b").update)
    # An engine's module that ties them takes them under either name, or both, wherever they are: only values count.
    whole = Model(True).state_dict()
    for left, given in (("one", Model(True)), ("both", whole), ("copies", {n: t.clone() for n, t in whole.items()}),
                        ("no_head", {n: t for n, t in whole.items() if n != "head.weight"}),
                        ("no_embed", {n: t for n, t in whole.items() if n != "embed.weight"})):
        engine = Model(True)
        tensors = given if isinstance(given, dict) else given.state_dict()
        with dray.Publisher(given, left) as publisher, dray.Subscriber(engine, left, left) as subscriber:
            for version in (1, 2):
                for tensor in tensors.values():
                    tensor.fill_(version + tensor.dim())
                publisher.publish(version)
                assert subscriber.update()["version"] == version
                publisher.wait()
        assert all(torch.equal(engine.state_dict()[name], tensor) for name, tensor in tensors.items()), left
    generated = [(n, torch.randn(t.shape)) for n, t in whole.items()]
    generated[3] = generated[3][0], generated[0][1].clone()
    assert {generated[0][0], generated[3][0]} == {"embed.weight", "head.weight"}
    with dray.Publisher((each for each in generated), "generated", copy=True) as publisher, \
            dray.Subscriber(Model(True), "generated", "generated") as subscriber:
        publisher.publish(1)
        assert subscriber.update()["version"] == 1
        publisher.wait()
    # Two tensors with different values have no place in one.
    own = Model(False)
    with dray.Publisher(own, "two") as publisher, dray.Subscriber(Model(True), "two") as subscriber:
        publisher.publish(1)
        words = "embed.weight and head.weight are one in the group's memory, and have different values in the published"
        assert refused(dray.DrayError, words, subscriber.update).name == "ETORN"
        publisher.wait()
        with dray.Subscriber(Model(False), "two", group="untied") as other:
            publisher.publish(2)
            assert other.update()["version"] == 2
            publisher.wait()
        with torch.no_grad():
            own.head.weight.copy_(own.embed.weight)
        publisher.publish(3)
        assert subscriber.update()["version"] == 3
