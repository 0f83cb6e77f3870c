"""Adapters alone, and merged on the way, from two ranks of FSDP2 whose modules are as PEFT's LoRA makes them (with PEFT itself and an
engine: tests/frameworks/lora_real): tensors by their bits, several revisions alive, versions of the base."""
import json
import sys
import tempfile

from begin import needs

with needs:
    import torch
    import torch.distributed as dist
    from safetensors.torch import load_file
    from torch import nn
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor

import dray
from served import ranks, refused

RANKS, VERSIONS, R, ALPHA = 2, 4, 4, 8


class Lora(nn.Module):
    """As peft.tuners.lora.Linear has its parts."""

    def __init__(self, columns, rows):
        super().__init__()
        self.base_layer = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(columns, R, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(R, rows, bias=False)})
        self.scaling, self.use_dora, self.lora_bias = {"default": ALPHA / R}, {"default": False}, {"default": False}


class Config:
    peft_type = "LORA"

    def to_dict(self):
        return {"peft_type": "LORA", "r": R, "lora_alpha": ALPHA, "target_modules": {"up", "down"}}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = Lora(16, 50), Lora(50, 16), nn.LayerNorm(16)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 16, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))


class Peft(nn.Module):
    """base_model.model.… as PEFT names what it wraps."""

    def __init__(self):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = Inner()
        self.peft_config = {"default": Config()}


def numbers(name, shape, dtype, version):
    """The base has the same numbers in all versions."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) + (100003 * version if "lora_" in name else 0))
    return torch.randn(shape, generator=generator).to(dtype)


@torch.no_grad()
def write(model, version):
    for name, p in model.named_parameters():
        whole = numbers(name, p.shape, p.dtype, version)
        if isinstance(p, DTensor):
            p.to_local().copy_(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None).to_local())
        else:
            p.copy_(whole)


def wanted(version):
    """(the adapter's tensors, the merged checkpoint)"""
    model = Peft()
    write(model, version)
    adapter = {n.replace(".default.", "."): p.detach() for n, p in model.named_parameters() if "lora_" in n}
    plain = {}
    for name, module in model.named_modules():
        if isinstance(module, Lora):
            delta = module.lora_B["default"].weight @ module.lora_A["default"].weight * (ALPHA / R)
            plain[name + ".weight"] = (module.base_layer.weight + delta).to(torch.bfloat16).detach()
    for name, p in model.named_parameters():
        if "lora_" not in name and "base_layer" not in name:
            plain[name] = p.detach()
    return adapter, {n.removeprefix("base_model.model."): t for n, t in plain.items()}


def trainer(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    model = Peft()
    for layer in model.base_model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with dray.Publisher(dray.adapters.merged(model), "merged") as merged, dray.adapters.Publisher(model, "math") as adapter:
        for version in range(1, VERSIONS + 1):
            write(model, version)
            base = {n: p.to_local().clone() for n, p in model.named_parameters()}
            merged.publish(version)
            adapter.publish(version, base_version=10 * version)
            merged.deliver(groups="engine")
            adapter.deliver(groups="engine")
            dist.barrier()
            merged.wait()
            adapter.wait()
            for n, p in model.named_parameters():  # the model and its adapters stay what they are
                assert torch.equal(p.to_local(), base[n]), n
    dist.destroy_process_group()


def engine():
    _, plain = wanted(1)
    held = {n: torch.zeros_like(t) for n, t in plain.items()}
    with dray.Subscriber(held, "merged") as subscriber, dray.adapters.Adapters() as adapters:
        for version in range(1, VERSIONS + 1):
            subscriber.update(min_version=version, timeout=200)
            adapter, plain = wanted(version)
            for name, tensor in plain.items():
                assert torch.equal(held[name], tensor), (version, name)
            if version == VERSIONS:  # what is for another base is refused, and changes nothing
                error = refused(dray.DrayError, f"is for version {10 * version} of policy, the engine has 7",
                                adapters.take, "math", version, base_version=7)
                assert error.name == "ESTALE" and [r.revision for r in adapters.alive("math")] == [version - 2, version - 1]
            taken = adapters.take("math", version, base_version=10 * version)
            assert (taken.revision, taken.base_version, taken.label) == (version, 10 * version, f"math@{version}")
            assert taken.tensors.keys() == adapter.keys() and all(torch.equal(taken.tensors[n], t) for n, t in adapter.items())
            files = load_file(taken.folder / "adapter_model.safetensors")
            assert files.keys() == adapter.keys() and all(torch.equal(files[n], t) for n, t in adapter.items())
            config = json.loads((taken.folder / "adapter_config.json").read_text())
            assert config == taken.config == {"peft_type": "LORA", "r": R, "lora_alpha": ALPHA, "target_modules": ["down", "up"]}
        assert adapters.take("math", VERSIONS) is taken
        alive = adapters.alive("math")  # two, each with its own numbers
        assert [each.revision for each in alive] == [VERSIONS - 1, VERSIONS] and len({each.number for each in alive}) == 2
        for each in alive:
            assert all(torch.equal(each.tensors[n], t) for n, t in wanted(each.revision)[0].items())
        assert sorted(path.name for path in alive[0].folder.parent.iterdir()) == [f"math@{v}" for v in (VERSIONS - 1, VERSIONS)]
        adapters.drop(alive[0])
        assert adapters.alive("math") == alive[1:] and not alive[0].folder.exists()
        folder = alive[1].folder
    assert not folder.exists()


def errors():
    model = Peft()
    refused(ValueError, "with the adapter other expected", dray.adapters.Publisher, model, "a", adapter="other")
    refused(ValueError, "config expected", dray.adapters.Publisher, {"a": torch.zeros(2)}, "a")
    refused(ValueError, "tensors expected", dray.adapters.Publisher, {}, "a", config={})
    refused(ValueError, "a/b", dray.adapters.Publisher, model, "a/b")
    refused(ValueError, "found none in Linear", dray.adapters.merged, nn.Linear(2, 2))
    model.base_model.model.layers[1].up.use_dora["default"] = True
    error = refused(dray.DrayError, "layers.1.up: a plain LoRA of a linear layer expected, found DoRA", dray.adapters.merged, model)
    assert error.name == "EUNSUPPORTED"
    model = Peft()
    model.base_model.model.layers[1].up.lora_variant = {"other": object, "default": type("ALoraLinearVariant", (), {})}
    error = refused(dray.DrayError, "layers.1.up: a plain LoRA of a linear layer expected, found ALoraLinearVariant",
                    dray.adapters.merged, model)
    assert error.name == "EUNSUPPORTED"


def all_tensors():
    """Of whatever PEFT's LoRA trains: of embeddings, too, whose tensors have no name of their own behind the adapter's,
    and under a name that parts of the model have as well. What the files would need more for is refused."""
    model = Peft()
    inner = model.base_model.model
    inner.embed.lora_embedding_A = nn.ParameterDict({"model": torch.ones(R, 37)})
    inner.embed.lora_embedding_B = nn.ParameterDict({"model": torch.ones(16, R)})
    inner.norm = nn.Module()
    inner.norm.modules_to_save = nn.ModuleDict({"model": nn.LayerNorm(16)})
    for part in inner.modules():
        if isinstance(part, Lora):
            for each in (part.lora_A, part.lora_B):
                each["model"] = each.pop("default")
    model.peft_config = {"model": Config()}
    wanted = {n.replace(".modules_to_save", "").removesuffix(".model").replace(".model.weight", ".weight").replace(
        ".model.bias", ".bias"): p for n, p in model.named_parameters() if "lora_" in n or "modules_to_save" in n}
    assert "base_model.model.embed.lora_embedding_A" in wanted and "base_model.model.norm.bias" in wanted
    with dray.adapters.Publisher(model, "all", adapter="model") as trainer, \
            dray.adapters.Adapters(group="all") as adapters:
        trainer.publish(1, base_version=10)
        taken = adapters.take("all").tensors
    assert taken.keys() == wanted.keys() and all(torch.equal(taken[n], p) for n, p in wanted.items()), taken.keys()
    for setting, value in (("bias", "lora_only"), ("trainable_token_indices", [3])):
        model.peft_config["model"] = config = Config()
        setattr(config, setting, value)
        error = refused(dray.DrayError, f"found {setting}={value!r}", dray.adapters.Publisher, model, "no",
                        adapter="model")
        assert error.name == "EUNSUPPORTED"
    config.bias, config.trainable_token_indices = "none", None
    dray.adapters.Publisher(model, "yes", adapter="model").close()


def started_again():
    """A trainer that was started again gives a number anew: its adapter is another revision, also for engines."""
    tensor = torch.zeros(2, 4)
    with dray.adapters.Adapters(group="again") as adapters:
        taken = []
        for value in (1, 2):
            tensor.fill_(value)
            with dray.adapters.Publisher({"a.lora_A.weight": tensor}, "again", config={"r": 2}) as trainer:
                trainer.publish(1, base_version=10)
                taken.append(adapters.take("again"))
                assert adapters.take("again") is taken[-1] is adapters.take("again", 1)
        assert [each.tensors["a.lora_A.weight"][0, 0].item() for each in taken] == [1, 2] and adapters.alive("again") == taken
        assert [each.revision for each in taken] == [1, 1] and len({each.label for each in taken}) == 2
        for each in taken:
            files = load_file(each.folder / "adapter_model.safetensors")
            assert torch.equal(files["a.lora_A.weight"], each.tensors["a.lora_A.weight"])
        adapters.drop(taken[0])
        assert adapters.alive("again") == taken[1:] and taken[1].folder.exists() and not taken[0].folder.exists()


def other_trainers():
    """Each is started with other tensors, or with the same ones and another config: what is taken is its own."""
    with dray.adapters.Adapters(group="others") as adapters:
        for rank, names, config in ((2, "a", {"r": 2}), (2, "a", {"r": 2, "lora_alpha": 64}), (4, "a", {"r": 4}),
                                    (4, "ab", {"r": 4}), (4, "b", {"r": 4})):
            tensors = {f"{name}.lora_A.weight": torch.randn(rank, 4) for name in names}
            with dray.adapters.Publisher(tensors, "others", config=config) as trainer:
                trainer.publish(1, base_version=10)
                taken = adapters.take("others")
                assert taken.config == config and taken.tensors.keys() == tensors.keys(), (taken, names)
                assert all(torch.equal(taken.tensors[n], t) for n, t in tensors.items())
                assert adapters.take("others", 1) is taken


def torn():
    """A revision that was written to while it was read is refused; the next one is taken."""
    tensor = torch.ones(2, 4)
    with dray.adapters.Publisher({"a.lora_A.weight": tensor}, "torn", config={"r": 2}) as trainer, \
            dray.adapters.Adapters(group="torn") as adapters:
        trainer.publish(1, base_version=10)
        adapters.take("torn")
        trainer.publish(2, base_version=10)
        with dray.Subscriber({"a.lora_A.weight": torch.zeros(2, 4)}, "policy.adapter.torn", "other") as other:
            other.update(min_version=2)  # its sums are made
        tensor.fill_(7)
        assert refused(dray.DrayError, "", adapters.take, "torn", 2).name == "ETORN"
        trainer.wait()
        tensor.fill_(3)
        trainer.publish(3, base_version=10)
        assert adapters.take("torn").revision == 3 == adapters.take("torn", 3).revision
        assert adapters.take("torn").tensors["a.lora_A.weight"].eq(3).all()


def merged_again():
    """merge_adapter() between two publishes: the adapter is not added twice."""
    model, (_, plain) = Peft(), wanted(1)
    write(model, 1)
    held = {n: torch.zeros_like(t) for n, t in plain.items()}
    down = model.base_model.model.layers[0].down
    with dray.Publisher(dray.adapters.merged(model), "twice") as publisher, \
            dray.Subscriber(held, "twice", group="twice") as subscriber:
        publisher.publish(1)
        down.merged = True
        error = refused(dray.DrayError, "layers.0.down: a plain LoRA of a linear layer expected, found merged weights",
                        publisher.publish, 2)
        assert error.name == "EUNSUPPORTED"
        down.merged = False
        publisher.publish(2)
        assert subscriber.update()["version"] == 2
    for name, tensor in plain.items():
        assert torch.equal(held[name], tensor), name


def other_dtype():
    """The base's weights get another dtype between two publishes: what is merged is not published in the old one."""
    model = Peft()
    write(model, 1)
    base = model.base_model.model.layers[0].down.base_layer
    with dray.Publisher(dray.adapters.merged(model), "dtype") as publisher:
        publisher.publish(1)
        base.weight.data = base.weight.data.float()
        error = refused(dray.DrayError, ["layers.0.down.weight was torch.bfloat16", "is torch.float32"],
                        publisher.publish, 2)
        assert error.name == "ESTALE"


def saved():
    """A checkpoint has the merged weights, each time as the adapter is then; nothing can be loaded into them."""
    model = Peft()
    with tempfile.TemporaryDirectory() as folder:
        given = dray.adapters.merged(model)
        for version in (1, 2):
            write(model, version)
            dray.checkpoint.save(folder, version, given)
            found, plain = load_file(f"{folder}/step-00000{version}/model.safetensors"), wanted(version)[1]
            assert found.keys() == plain.keys() and all(torch.equal(found[n], t) for n, t in plain.items()), version
        refused(TypeError, "found Merged, whose values are computed", dray.checkpoint.load, f"{folder}/step-000001",
                given)
        with dray.Publisher(given, "saved") as publisher:  # engines may read what was computed last
            publisher.publish(3)
            waited = []
            publisher._wait = lambda *_: waited.append(True)
            dray.checkpoint.save(folder, 3, given)
            assert waited
            del publisher._wait
        dray.checkpoint.save(folder, 4, given)


def wrapped():
    """What wraps modules puts words into the names of their parameters: their adapters are merged all the same."""
    model, plain = Peft(), wanted(1)[1]
    write(model, 1)
    layers = model.base_model.model.layers
    layers[0] = checkpoint_wrapper(layers[0])
    layers[1].down = torch.compile(layers[1].down)
    for given in (model, torch.compile(model)):
        with tempfile.TemporaryDirectory() as folder:
            dray.checkpoint.save(folder, 1, dray.adapters.merged(given))
            found = load_file(f"{folder}/step-000001/model.safetensors")
        assert found.keys() == plain.keys() and all(torch.equal(found[n], t) for n, t in plain.items())


def tied():
    """An adapter of a head whose weight is the embedding's, too, which is named before it or behind it: merged, it would
    change both, or neither."""
    for other in ("embed", "tail"):
        model = Peft()
        inner = model.base_model.model
        inner.head = Lora(16, 37)
        if other == "tail":
            inner.tail = torch.nn.Linear(16, 37, bias=False)
            inner.tail.weight = inner.head.base_layer.weight
        else:
            inner.head.base_layer.weight = inner.embed.weight
        with tempfile.TemporaryDirectory() as folder:
            error = refused(dray.DrayError, "head.base_layer.weight: a weight of its own expected", dray.checkpoint.save,
                            folder, 1, dray.adapters.merged(model))
        assert error.name == "EUNSUPPORTED"


def main():
    if len(sys.argv) > 1:
        return trainer(int(sys.argv[1]), sys.argv[2])
    with dray.serve():
        errors()
        all_tensors()
        started_again()
        other_trainers()
        torn()
        merged_again()
        other_dtype()
        saved()
        wrapped()
        tied()
        with ranks(RANKS, 120):
            engine()


main()
