"""A tensor that four trainer ranks hold by rows, as FSDP does, becomes column-parallel and row-parallel
on an engine of two ranks: six processes, three versions, nothing gathered.

    make build
    PYTHONPATH=python python3 examples/weights.py

A coordinator is started where $DRAY_ADDRESS names none. A model's parameters go as they are:
Publisher(context, "policy", model, rank, world), with FSDP2's DTensors, too."""
import multiprocessing
import os
import pathlib
import subprocess
import tempfile

import torch
from dray.weights import Block, Context, Publisher, Subscriber, empty

N, TRAINERS, ENGINES, VERSIONS = 1024, 4, 2, 3
# Forked before anything of dray or CUDA is open. With GPUs: "spawn".
processes = multiprocessing.get_context("fork")


def whole(version):
    """What the tensor is in that version."""
    return torch.arange(N * N, dtype=torch.float32).reshape(N, N) + version


def trainer(rank):
    rows = N // TRAINERS
    mine = empty(rows, N)  # in shared memory: read where it lies
    with Context(role="trainer", rank=rank) as context:
        blocks = [Block(name, (N, N), mine, (rank * rows, 0)) for name in ("up.weight", "down.weight")]
        with Publisher(context, "policy", blocks, rank, TRAINERS) as publisher:
            for version in range(1, VERSIONS + 1):
                publisher.wait()  # until nobody reads the one before
                mine.copy_(whole(version)[rank * rows:(rank + 1) * rows])  # the optimizer's step
                publisher.publish(version)
                publisher.deliver(version, "engine")  # however late it comes


def engine(rank):
    part = N // ENGINES
    up, down = torch.empty(part, N, dtype=torch.bfloat16), torch.empty(N, part)
    with Context(role="engine", rank=rank) as context:
        blocks = [Block("up.weight", (N, N), up, (rank * part, 0)),  # column-parallel, as bf16
                  Block("down.weight", (N, N), down, (0, rank * part))]  # row-parallel
        with Subscriber(context, "policy", blocks, "engine", rank, ENGINES) as subscriber:
            for version in range(1, VERSIONS + 1):
                report = subscriber.update(min_version=version)
                expected = whole(version)
                assert torch.equal(up, expected[rank * part:(rank + 1) * part].bfloat16())
                assert torch.equal(down, expected[:, rank * part:(rank + 1) * part])
                print(f"engine {rank}: version {report['version']}, {report['bytes'] / 1e6:.1f} MB in "
                      f"{report['copies']} copies, {report['total_seconds'] * 1e3:.1f} ms, "
                      f"{report['verified_tensors']} tensors verified", flush=True)


if __name__ == "__main__":
    ranks = [processes.Process(target=trainer, args=(r,)) for r in range(TRAINERS)] + \
        [processes.Process(target=engine, args=(r,)) for r in range(ENGINES)]
    with tempfile.TemporaryDirectory() as folder:
        server = None
        if not os.environ.get("DRAY_ADDRESS"):
            built = pathlib.Path(__file__).parents[1] / "build/release/dray"
            os.environ["DRAY_ADDRESS"] = f"unix:{folder}/dray.socket"
            server = subprocess.Popen([built if built.exists() else "dray", "serve", "--listen",
                                       os.environ["DRAY_ADDRESS"]], stdout=subprocess.PIPE)
            server.stdout.readline()  # it listens
        try:
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
        finally:
            if server:
                server.terminate()
                server.wait()
    raise SystemExit(any(process.exitcode for process in ranks))
