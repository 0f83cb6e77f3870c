"""A tensor that four trainer ranks hold by rows, as FSDP does, becomes column-parallel and row-parallel
on an engine of two ranks: six processes, three versions, nothing gathered.

    pip install . numpy                               # or: make build; export PYTHONPATH=$PWD/python
    python3 examples/weights.py

Needs numpy alone; examples/fsdp2_to_tp.py is the same with PyTorch's modules. dray.serve() starts a
coordinator where $DRAY_ADDRESS names none."""
import multiprocessing

import dray
import numpy as np
from dray.weights import Block, Context, Publisher, Subscriber, empty

N, TRAINERS, ENGINES, VERSIONS = 1024, 4, 2, 3
# Forked before anything of dray or CUDA is open. With GPUs: "spawn".
processes = multiprocessing.get_context("fork")


def whole(version):
    """What the tensor is in that version."""
    return np.arange(N * N, dtype=np.float32).reshape(N, N) / 64 + version


def trainer(rank):
    rows = N // TRAINERS
    mine = empty(rows, N, dtype=np.float32)  # in shared memory: read where it lies
    with Context(role="trainer", rank=rank) as context:
        blocks = [Block(name, (N, N), mine, (rank * rows, 0)) for name in ("up.weight", "down.weight")]
        with Publisher(blocks, "policy", rank, TRAINERS, context=context) as publisher:
            for version in range(1, VERSIONS + 1):
                publisher.wait()  # until nobody reads the one before
                mine[:] = whole(version)[rank * rows:(rank + 1) * rows]  # the optimizer's step
                publisher.publish(version)
                publisher.deliver(version, "engine")  # however late it comes


def engine(rank):
    part = N // ENGINES
    up, down = np.empty((part, N), np.float16), np.empty((N, part), np.float32)
    with Context(role="engine", rank=rank) as context:
        blocks = [Block("up.weight", (N, N), up, (rank * part, 0)),  # column-parallel, as fp16
                  Block("down.weight", (N, N), down, (0, rank * part))]  # row-parallel
        with Subscriber(blocks, "policy", "engine", rank, ENGINES, context=context) as subscriber:
            for version in range(1, VERSIONS + 1):
                report = subscriber.update(min_version=version)
                expected = whole(version)
                assert np.array_equal(up, expected[rank * part:(rank + 1) * part].astype(np.float16))
                assert np.array_equal(down, expected[:, rank * part:(rank + 1) * part])
                print(f"engine {rank}: version {report['version']}, {report['bytes'] / 1e6:.1f} MB in "
                      f"{report['copies']} copies, {report['total_seconds'] * 1e3:.1f} ms, "
                      f"{report['verified_tensors']} tensors verified", flush=True)


if __name__ == "__main__":
    ranks = [processes.Process(target=trainer, args=(r,)) for r in range(TRAINERS)] + \
        [processes.Process(target=engine, args=(r,)) for r in range(ENGINES)]
    with dray.serve():
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    raise SystemExit(any(process.exitcode for process in ranks))
