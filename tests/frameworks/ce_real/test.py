"""checkpoint-engine's own update_weights_from_ipc, which takes what dray's Sender hands it out of a trainer's shards; and
dray's receive, which takes what a parameter server would send. On CPUs: the package's DeviceManager, which wants a GPU, is
replaced by one that does nothing."""
import os
import sys
import threading
import types

import torch
import zmq

import checkpoint_engine.worker as upstream
import dray
from dray.integrations import checkpoint_engine as plugin

NAMES = {"embed": (300, 64), "norm": (64,), "up": (256, 64), "scalar": (), "head": (300, 64)}
context = zmq.Context()


class Device:
    def __getattr__(self, name):
        return lambda *_, **__: None


upstream.DeviceManager = lambda: types.SimpleNamespace(device_module=Device())


def numbers(step, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in NAMES.items()}


class Worker(threading.Thread):
    """An engine's worker, by upstream's function or ours."""

    def __init__(self, handle, take, run=None):
        super().__init__(daemon=True)
        self.came, self.failure, self.hooked, self._take, self._handle = {}, None, False, take, handle
        self._run = run or (lambda named: self.came.update((name, t.clone()) for name, t in named))
        self.start()

    def hook(self):
        self.hooked = True

    def run(self):
        try:
            self._take(self._handle, self._run, self.hook)
        except BaseException as failure:
            self.failure = failure


def of_upstream(handle, run, hook):
    upstream.update_weights_from_ipc(context, handle, None, run=run, post_hook=hook)


def of_dray(handle, run, hook):
    plugin.receive(handle, run, hook, timeout=30)


def same(came, wanted):
    assert came.keys() == wanted.keys()
    assert all(came[name].dtype == wanted[name].dtype and torch.equal(came[name], wanted[name]) for name in wanted)


def refused(kind, words, what):
    try:
        what()
    except kind as failure:
        assert all(word in str(failure) for word in words), failure
        return
    raise AssertionError(f"not refused: {words}")


def hand_over(number, take):
    """A trainer's tensors, by dray's update, to a worker; twice."""
    shared = {name: dray.weights.empty(t.shape, dtype=t.dtype) for name, t in numbers(0).items()}
    with dray.Publisher(shared, f"ce{number}") as publisher:
        subscriber = None
        for version in (1, 2):
            for name, tensor in numbers(version).items():
                shared[name].copy_(tensor)
            publisher.publish(version)
            handle = f"ipc://{os.environ['DRAY_WORK']}/ce-{number}-{version}.sock"
            worker = Worker(handle, take)
            with plugin.Sender(handle, bytes=1 << 17, timeout=30) as sender:
                with dray.Subscriber(load=sender, tensors=shared, model=f"ce{number}", group=f"ce{version}") as subscriber:
                    report = subscriber.update(min_version=version, timeout=30)
            worker.join(30)
            assert worker.failure is None and worker.hooked, worker.failure
            same(worker.came, numbers(version))
            assert report["version"] == version and report["verified_tensors"] == len(NAMES)
            publisher.wait()


def failing(number, take):
    """What a worker's run raises comes to the sender, and ends both."""
    def run(named):
        raise ValueError("the engine does not know " + named[0][0])

    handle = f"ipc://{os.environ['DRAY_WORK']}/ce-fails-{number}.sock"
    worker = Worker(handle, take, run)

    def send():
        with plugin.Sender(handle, bytes=1 << 17, timeout=30) as sender:
            sender(numbers(1).items())
    refused(dray.DrayError, ["the engine does not know embed"], send)
    worker.join(30)
    assert worker.failure is not None and not worker.hooked
    refused(ValueError, ["embed: at most 8192 bytes"],
            lambda: plugin.Sender("ipc://unused", bytes=1 << 14)(numbers(1).items()))


def main():
    with dray.serve():
        for number, take in enumerate((of_upstream, of_dray)):
            hand_over(number, take)
            failing(number, take)
        handle = f"ipc://{os.environ['DRAY_WORK']}/ce-late.sock"
        refused(TimeoutError, ["nothing came for 0.2 s"], lambda: plugin.receive(handle, print, timeout=0.2))
    print(f"{len(NAMES)} tensors, two versions, to checkpoint-engine's own update_weights_from_ipc and to dray's; "
          "what a worker raises ends both")


main()
