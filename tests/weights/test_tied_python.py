"""Tied parameters of a module: engines find the tensor by each of its names, also when it has moved."""
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
