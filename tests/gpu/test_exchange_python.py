"""Commits that exchange memory under a captured CUDA graph that reads the weights, with PyTorch on a real GPU:
after each of DRAY_TEST_STEPS commits (1,000) the graph gives what the trainer's weights give, and neither GPU
memory nor descriptors grow.

    DRAY_TEST_MIB   of weights (2048)"""
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.environ["DRAY_SOURCE_DIR"], "python"))
try:
    import torch
except ImportError as missing:
    print(missing)
    sys.exit(77)
if not torch.cuda.is_available():
    print("skipped: no GPU")
    sys.exit(77)
import dray  # noqa: E402
from dray.weights import Context, Publisher, Subscriber  # noqa: E402

STEPS = int(os.environ.get("DRAY_TEST_STEPS", "1000"))
ROWS = (int(os.environ.get("DRAY_TEST_MIB", "2048")) << 20) // (4 * 2 * 1024)  # of 4 tensors of 1,024 columns
SHAPES = {f"model.layers.{i}.weight": (ROWS, 1024) for i in range(4)} | {"model.norm.weight": (333,)}


def figures(tensors):
    return torch.stack([t.float().sum() for t in tensors.values()])


def weights():
    return {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, shape in SHAPES.items()}


def captured(tensors):
    """A graph, and what it computes of the weights."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        figures(tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = figures(tensors)
    return graph, result


def state():
    return torch.cuda.mem_get_info()[0], len(os.listdir("/proc/self/fd"))


with tempfile.TemporaryDirectory() as folder:
    address = f"unix:{folder}/s"
    os.environ["XDG_RUNTIME_DIR"] = folder
    server = subprocess.Popen([os.environ["DRAY_PROGRAM"], "serve", "--listen", address], stdout=subprocess.PIPE, text=True)
    assert server.stdout.readline().startswith("listening")
    with dray.gpu.use_arena("weights", chunk_bytes=1 << 30):
        engine = weights()
    trained = weights()
    graph, result = captured(engine)
    with Context(address, role="trainer", rank=0) as ours, Context(address, role="engine", rank=0) as theirs:
        publisher = Publisher(trained, "model", 0, 1, context=ours)
        subscriber = Subscriber(engine, "model", "engine", 0, 1, context=theirs)
        pauses, exchanged, start = [], 0, None
        for step in range(1, STEPS + 1):
            for tensor in trained.values():
                tensor.random_(0, 50) if step % 10 == 1 else tensor.add_(1)
            publisher.publish(step)
            subscriber.prefetch(min_version=step)
            torch.cuda.synchronize()
            report = subscriber.commit()
            graph.replay()
            wanted = figures(trained)
            torch.cuda.synchronize()
            assert torch.equal(result, wanted), (step, result, wanted)
            publisher.wait(step)
            pauses.append(report["pause_seconds"])
            exchanged += report["exchanged_bytes"]
            start = state() if step == min(20, STEPS) else start
        free, descriptors = state()
        assert free + (64 << 20) >= start[0] and descriptors <= start[1] + 8, (start, free, descriptors)
        assert exchanged, "nothing was exchanged"
        pauses.sort()
        print(f"{STEPS} commits of {report['bytes'] / 1e9:.2f} GB, {report['exchanged_bytes'] / 1e9:.2f} exchanged, under one "
              f"graph: right sums; pause {1e3 * pauses[len(pauses) // 2]:.2f} ms, most {1e3 * pauses[-1]:.2f} ms; "
              f"spare {report['spare_bytes'] / 1e9:.2f} GB, {report['spare_waste_bytes'] / 1e6:.0f} MB of it unused")
    server.terminate()
    server.wait(timeout=60)
