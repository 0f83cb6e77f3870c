"""dray.checkpoint: what is written is what safetensors reads, an optimizer that was read goes on as if nothing had
happened, and folders are whole, kept and named as the run's are."""
import json
import os
import tempfile
import unittest.mock

from begin import needs

with needs:
    import numpy as np
    import torch
    from safetensors.torch import load_file

import dray
from served import refused

torch.manual_seed(1)


def trainer():
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3, bias=False))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps):
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        model(torch.randn(4, 5, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def write(folder, number, model, optimizer, **more):
    tensors, numbers = dray.checkpoint.optimizer_tensors(model, optimizer)
    dray.checkpoint.save(folder, number, model, parts={"optimizer": tensors},
                         files={"optimizer.json": numbers, "empty": b"", "cursor": b"a\0b"}, **more)


with tempfile.TemporaryDirectory() as top:
    folder = f"{top}/checkpoints"
    refused(dray.DrayError, "", dray.checkpoint.latest, folder)
    model, optimizer = trainer()
    write(folder, 0, model, optimizer)  # nothing was trained: the optimizer has no state yet
    train(model, optimizer, 3)
    for path in ("config.json", '"config.json"'):  # of which elsewhere a path is expected
        refused(ValueError, "the text of a config.json", write, folder, 3, model, optimizer, config=path)
    write(folder, 3, model, optimizer, config=json.dumps({"model_type": "none"}))
    version, path = dray.checkpoint.latest(folder)
    assert version == 3 and path.name == "step-000003", path
    found = load_file(path / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    state = load_file(path / "optimizer" / "model.safetensors")
    assert torch.equal(state["0.weight.exp_avg_sq"], optimizer.state[model[0].weight]["exp_avg_sq"])
    assert (path / "cursor").read_bytes() == b"a\0b" and (path / "empty").read_bytes() == b""
    assert json.loads((path / "config.json").read_text()) == {"model_type": "none"}

    other, its = trainer()
    dray.checkpoint.load(path, other)
    dray.checkpoint.load_optimizer(path, other, its)
    train(model, optimizer, 2)
    train(other, its, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    fresh, none = trainer()
    dray.checkpoint.load_optimizer(f"{folder}/step-000000", fresh, none)
    assert not none.state

    for number in (4, 5, 6):
        write(folder, number, model, optimizer, keep=2, stay=[0])
    assert sorted(os.listdir(folder)) == ["latest", "step-000000", "step-000005", "step-000006"], os.listdir(folder)
    refused(dray.DrayError, "expects [7, 6]", dray.checkpoint.load, path.parent / "step-000006",
            {"0.weight": torch.zeros(7, 6)})
    refused(dray.DrayError, "0.nothing", dray.checkpoint.load, path.parent / "step-000006",
            {"0.nothing": torch.zeros(1)})

    # Rectangles and flat parts lie where they belong; those of a GPU (said to be one's), too.
    whole = torch.arange(56.).view(8, 7)
    for on_gpu in (False, True):
        def parts(memory):
            return [dray.weights.Block("cut", (8, 7), memory[:3]),
                    dray.weights.Block("cut", (8, 7), memory[3:, :5], (3, 0)),
                    dray.weights.Block("cut", (8, 7), memory[3:, 5:], (3, 5)), ("flat", dray.weights.FlatPart(
                        memory.view(-1), (8, 7), 0, 0, 56))]
        with unittest.mock.patch.object(dray.checkpoint, "_on_gpu", lambda tensor: on_gpu):
            dray.checkpoint.save(f"{top}/parts", on_gpu, parts(whole))
            path = dray.checkpoint.latest(f"{top}/parts")[1]
            assert all(torch.equal(load_file(path / "model.safetensors")[name], whole) for name in ("cut", "flat"))
            memory, half = torch.zeros(8, 7), torch.zeros(28)
            dray.checkpoint.load(path, parts(memory)[:3])
            dray.checkpoint.load(path, [("flat", dray.weights.FlatPart(half, (8, 7), 0, 28, 28))])
            assert torch.equal(memory, whole) and torch.equal(half, whole.view(-1)[28:]), on_gpu

    # What would be saved as something else is refused: text, which has other bytes in memory; one of two of a name.
    refused(TypeError, "bytes expected for dray.json, found str", dray.checkpoint.save, folder, 8, model,
            files={"dray.json": "{}"})
    refused(ValueError, "w: came twice", dray.checkpoint.save, folder, 8, [("w", whole), ("_orig_mod.w", whole + 1)])
    assert not os.path.exists(f"{folder}/step-000008")
    dray.checkpoint.save(f"{top}/bytes", 1, {"w": whole}, files={"a": bytearray(b"a\0b"), "b": memoryview(b"cd")})
    assert [dray.checkpoint.read_file(f"{top}/bytes/step-000001", name) for name in "ab"] == [b"a\0b", b"cd"]
    fixed = np.frombuffer(bytes(224), np.float32).reshape(8, 7)
    refused(TypeError, "cut: an array that may be written to expected", dray.checkpoint.load, path, {"cut": fixed})
    assert not fixed.any()

    # Whatever an optimizer keeps: of all parameters or of some, with numbers or without.
    for kind, frozen in ((lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ()), (torch.optim.AdamW, (0,)),
                         (lambda p: torch.optim.Adam(p, amsgrad=True), (1, 2))):
        (model_a, _), (model_b, _) = trainer(), trainer()
        for each in frozen:
            model_a[each].requires_grad_(False)
            model_b[each].requires_grad_(False)
        a, b = kind(model_a.parameters()), kind(model_b.parameters())
        train(model_a, a, 3)
        write(f"{top}/kinds", 1, model_a, a)
        path = dray.checkpoint.latest(f"{top}/kinds")[1]
        dray.checkpoint.load(path, model_b)
        dray.checkpoint.load_optimizer(path, model_b, b)
        assert len(b.state) == len(a.state) > 0
        b.state.clear()  # names are those without a wrapper's
        dray.checkpoint.load_optimizer(path, torch.compile(model_b), b)
        assert len(b.state) == len(a.state)
        names = [dray.checkpoint.optimizer_tensors(model, a)[1] for model in (model_a, torch.compile(model_a))]
        assert names[0] == names[1]
        train(model_a, a, 2)
        train(model_b, b, 2)
        assert all(torch.equal(*pair) for pair in zip(model_a.parameters(), model_b.parameters()))
    # What cannot be restored is refused by name, and changes nothing.
    less = torch.nn.Sequential(torch.nn.Linear(5, 7))
    its = torch.optim.Adam(less.parameters())
    error = refused(dray.DrayError, "state of 0.weight, which is no parameter", dray.checkpoint.load_optimizer, path,
                    torch.nn.Linear(5, 7), its)
    assert error.name == "ENOENT" and not its.state
    its.state[less[0].weight] = {"rows": torch.zeros(7)}
    refused(dray.DrayError, ["0.weight.rows", "(7, 5)", "found shape (7,)"], dray.checkpoint.optimizer_tensors, less, its)

    # A role's: written for the step, and read by a run that goes on from it.
    os.environ.update(DRAY_ADDRESS="unix:/nowhere", DRAY_RUN=f"{top}/run", DRAY_CONFIG=f"{top}/config.json")
    os.makedirs(f"{top}/run/checkpoints")
    with open(f"{top}/config.json", "w") as file:
        json.dump({"name": "a", "seed": 4, "checkpoint": {"keep": 2}}, file)
    role = dray.Role()
    assert role.restore(model, optimizer) is False
    role.context = lambda role: None  # one rank meets nobody
    files = {"queue.cursor": b"cursor", "dray.json": b'{"step": 7}'}
    role.saver(model, optimizer)(7, dict(files))
    saved = dray.checkpoint.latest(f"{top}/run/checkpoints")[1]
    assert {name: (saved / name).read_bytes() for name in files} == files
    refused(dray.DrayError, "from step 0", dray.Role().restore, model)
    os.environ["DRAY_STEP"] = "7"
    role, (other, its) = dray.Role(), trainer()
    assert role.restore(other, its)
    train(model, optimizer, 2)
    train(other, its, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))

    # Of a GPU by copies in host memory: here of tensors that are said to be one's, whole and FSDP2's.
    from torch.distributed.fsdp import fully_shard
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with unittest.mock.patch.object(dray.checkpoint, "_on_gpu", lambda tensor: True):
        for shard in (lambda model: None, fully_shard):
            (model, optimizer), (other, its) = trainer(), trainer()
            shard(model)
            shard(other)
            train(model, optimizer, 3)
            write(f"{top}/gpu-{shard.__name__}", 3, model, optimizer)
            path = dray.checkpoint.latest(f"{top}/gpu-{shard.__name__}")[1]
            dray.checkpoint.load(path, other)
            dray.checkpoint.load_optimizer(path, other, its)
            train(model, optimizer, 2)
            train(other, its, 2)
            same = zip(model.state_dict().values(), other.state_dict().values())
            assert all(torch.equal(*(getattr(t, "_local_tensor", t) for t in pair)) for pair in same)
    # Of FSDP1's, what no flat parameter has, too: around a wrapped module, and of ignored ones; and buffers' names.
    from torch.distributed.fsdp import FullyShardedDataParallel
    for case in range(4):
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 4), "norm": torch.nn.BatchNorm1d(4),
                                     "inner": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))})
        wanted = {n: t.clone() for n, t in model.state_dict().items() if n != "norm.num_batches_tracked"}
        options = dict(use_orig_params=case % 2 == 1, device_id=torch.device("cpu"))
        if case < 2:
            model["inner"] = FullyShardedDataParallel(model["inner"], **options)
        else:
            model = FullyShardedDataParallel(model, ignored_modules=[model["embed"]], **options)
        given = dray.parameters.given(model, buffers={"norm.running_mean", "norm.running_var"})
        dray.checkpoint.save(f"{top}/fsdp1-{case}", 1, given)
        found = load_file(f"{top}/fsdp1-{case}/step-000001/model.safetensors")
        assert found.keys() == wanted.keys(), (case, found.keys() ^ wanted.keys())
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()), case
    torch.distributed.destroy_process_group()
print("ok")
