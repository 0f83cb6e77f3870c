"""A model that FSDP2 trains on two ranks, taken after each step by an engine of two tensor-parallel ranks: no
state dict is gathered, each engine's rank reads its rows and columns out of the trainers' shards.

    pip install . torch numpy
    python3 examples/fsdp2_to_tp.py [--gpus]

One file and one terminal. With --gpus the trainer has the first half of the GPUs and the engine the second, a rank
each; the processes are the same."""
import sys
import tempfile

import dray
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from dray import Publisher, Subscriber
from dray.weights import Block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

GPUS = torch.cuda.device_count() if "--gpus" in sys.argv else 0
RANKS = max(1, GPUS // 2) if GPUS else 2  # of the trainer, and of the engine
HIDDEN, INNER, LAYERS, STEPS = 64, 256, 3, 5


class Layer(nn.Module):
    def __init__(self, inner=INNER):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, inner, bias=False), nn.Linear(inner, HIDDEN, bias=False)

    def forward(self, x, sum_up=lambda part: part):
        return x + sum_up(self.down(torch.relu(self.up(x))))


def join(group, rank, folder):
    """This rank's device, and its process group: trainer and engine have one each, and none together."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank + (RANKS if group == "engine" else 0)) if GPUS else torch.device("cpu")
    if GPUS:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if GPUS else "gloo", init_method=f"file://{folder}/{group}", rank=rank,
                            world_size=RANKS)
    return device


def trainer(rank, folder, outputs):
    device = join("trainer", rank, folder)
    torch.manual_seed(0)  # the same model on all ranks
    model = nn.Sequential(*(Layer() for _ in range(LAYERS))).to(device)
    mesh = init_device_mesh(device.type, (RANKS,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)  # other samples on each
    with Publisher(model) as publisher:  # rank and world are torch.distributed's
        publisher.attach(optimizer, groups="engine")  # a step waits until the engine has what it would write over
        for step in range(1, STEPS + 1):
            x = torch.randn(32, HIDDEN, device=device)
            (model(x) - x.roll(1, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            publisher.publish(step)
            with torch.no_grad():
                expected = model(torch.ones(1, HIDDEN, device=device)).cpu()
            if rank == 0:
                outputs.put((step, expected.tolist()))
        publisher.deliver(groups="engine")
    dist.destroy_process_group()


def engine(rank, folder, outputs):
    device = join("engine", rank, folder)
    part = INNER // RANKS
    model = nn.Sequential(*(Layer(part) for _ in range(LAYERS))).to(device).requires_grad_(False)
    blocks = []  # where this rank's parameters lie in the checkpoint's
    for i, layer in enumerate(model):
        blocks += [Block(f"{i}.up.weight", (INNER, HIDDEN), layer.up.weight, (rank * part, 0)),
                   Block(f"{i}.down.weight", (HIDDEN, INNER), layer.down.weight, (0, rank * part))]

    def sum_up(piece):
        dist.all_reduce(piece)
        return piece

    with Subscriber(blocks) as subscriber:
        version = 0
        while version < STEPS:
            report = subscriber.update(min_version=version + 1)
            version = report["version"]
            x = torch.ones(1, HIDDEN, device=device)
            for layer in model:
                x = layer(x, sum_up)
            if rank == 0:
                outputs.put((version, x.cpu().tolist()))
                print(f"version {version}: {report['bytes'] / 1e3:.0f} kB in {report['copies']} copies, "
                      f"{report['total_seconds'] * 1e3:.1f} ms", flush=True)
    dist.destroy_process_group()


def main():
    processes = mp.get_context("spawn")
    with dray.serve(), tempfile.TemporaryDirectory() as folder:
        results = {role: processes.SimpleQueue() for role in (trainer, engine)}
        ranks = [processes.Process(target=role, args=(rank, folder, results[role]))
                 for role in results for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            return 1
        said = [{}, {}]
        for queue, by_version in zip(results.values(), said):
            while not queue.empty():
                version, output = queue.get()
                by_version[version] = torch.tensor(output)
    for version, output in said[1].items():
        torch.testing.assert_close(output, said[0][version], rtol=1e-4, atol=1e-5)
    print(f"the engine computes what the trainer computes, in {len(said[1])} versions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
