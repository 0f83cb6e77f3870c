"""The verl plug-in against the contract that verl 0.9.1 has with a checkpoint engine, by hand and without verl: the
driver's steps, trainers and engines of one event loop. With verl itself: tests/frameworks/verl_real."""
import abc
import asyncio
import concurrent.futures
import importlib.util
import os
import pickle
import sys
import tempfile
import types

from begin import needs, rng

with needs:
    import torch

import dray


def contract():
    """The names that the plug-in imports of verl, without what verl does by them."""
    class Registry:
        known = {}

        def register(backend):
            def wrapper(cls):
                Registry.known[backend] = cls
                return cls
            return wrapper

    class CheckpointEngine(abc.ABC):
        @abc.abstractmethod
        def prepare(self): ...
        @classmethod
        @abc.abstractmethod
        def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata): ...
        @abc.abstractmethod
        def init_process_group(self, **kwargs): ...
        @abc.abstractmethod
        def finalize(self): ...
        @abc.abstractmethod
        async def send_weights(self, weights, global_steps=None): ...
        @abc.abstractmethod
        async def receive_weights(self, global_steps=None): ...

    async def ensure_async_iterator(iterable):
        for item in iterable:
            yield item

    def module(name, **names):
        sys.modules[name] = made = types.ModuleType(name)
        made.__path__, made.__version__ = [], "0.9.1"
        vars(made).update(names)

    for name in ("verl", "verl.checkpoint_engine", "verl.workers", "verl.workers.rollout"):
        module(name)
    module("verl.checkpoint_engine.base", CheckpointEngineRegistry=Registry, CheckpointEngine=CheckpointEngine)
    module("verl.workers.rollout.utils", ensure_async_iterator=ensure_async_iterator)
    return Registry


registry = contract()
from dray.integrations import synchronised, verl as plugin  # noqa: E402

TIMEOUT = 120.0
synchronised._SLICE = 0.05
NAMES = {"embed": (1000, 100), "norm": (8,), "up": (1000, 300), "head": (1000, 100), "scalar": ()}  # several buckets


def numbers(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in NAMES.items()}


class Worker:
    """One of verl's workers: its place in the environment, as verl's worker groups give it."""

    def __init__(self, prefix, rank, world, **options):
        self.place = {"WG_PREFIX": prefix, "RANK": str(rank), "WORLD_SIZE": str(world)}
        self.engine = registry.known["dray"](bucket_size=1 << 19, timeout=TIMEOUT, **options)

    def prepare(self):
        os.environ.update(self.place)
        return self.engine.prepare()

    def die(self):
        self.engine._context.close()


def trainer(rank, world):
    return Worker("trainer", rank, world, is_master=rank == 0)


async def take(worker, stop_at=None):
    """verl's worker and its adapter."""
    came = {}
    async for name, tensor in worker.engine.receive_weights(global_steps=0):
        came[name] = tensor.clone()
        if len(came) == stop_at:
            raise RuntimeError("the adapter failed")
        await asyncio.sleep(0)
    return came


def begin(trainers, engines):
    """What verl's manager does before the weights go."""
    told = [w.prepare() for w in trainers + engines]
    assert pickle.loads(pickle.dumps(told)) == told
    of_trainers, of_engines = plugin.DrayCheckpointEngine.build_topology(len(trainers), len(engines), told)
    for workers, kwargs in ((trainers, of_trainers), (engines, of_engines)):
        assert all(len(values) == len(workers) for values in kwargs.values())
        for i, worker in enumerate(workers):
            worker.engine.init_process_group(**{name: values[i] for name, values in kwargs.items()})


def send(trainers, step):
    """Whole tensors, as verl's own engines give them to every rank."""
    return [asyncio.ensure_future(t.engine.send_weights(iter(numbers(step).items()), global_steps=step)) for t in trainers]


def receive(engines, **options):
    return [asyncio.ensure_future(take(e, **options)) for e in engines]


async def update(trainers, engines, step):
    begin(trainers, engines)
    sends, takes = send(trainers, step), receive(engines)
    await asyncio.gather(*sends)
    for came in await asyncio.gather(*takes):
        same(came, step)
    for worker in trainers + engines:
        worker.engine.finalize()


def same(came, step):
    wanted = numbers(step)
    assert came.keys() == wanted.keys()
    assert all(torch.equal(came[name], wanted[name]) for name in wanted), step


async def raised(tasks, *names):
    """Each of them failed, as one of these."""
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(failure, dray.DrayError) and failure.name in names for failure in found), found
    return found


async def story():
    asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor(32))  # all are one process here
    trainers = [trainer(0, 2), trainer(1, 2)]
    places = [("a", 0, 2), ("a", 1, 2), ("b", 0, 1)]
    engines = [Worker(*place) for place in places]
    for step in range(1, 6):
        await update(trainers, engines, step)
    assert {w.engine.version for w in trainers + engines} == {5}
    for e in engines:
        assert e.engine.last_report()["verified_tensors"] == len(NAMES)

    # An engine never asks, and dies: the trainer's ranks say which one, long before the deadline.
    victim = rng.randrange(3)
    begin(trainers, engines)
    sends, takes = send(trainers, 6), receive(engines[:victim] + engines[victim + 1:])
    await asyncio.sleep(0)
    engines[victim].die()
    for failure in await raised(sends, "EDEAD"):
        assert "{} rank {}".format(*places[victim]) in str(failure), failure
        again = pickle.loads(pickle.dumps(failure))
        assert (type(again), again.code, str(again)) == (type(failure), failure.code, str(failure))
    engines[victim] = Worker(*places[victim])
    await update(trainers, engines, 7)
    await asyncio.gather(*takes, return_exceptions=True)

    # A rank of the trainer dies before it sent: engines say which one.
    begin(trainers, engines)
    takes = receive(engines)
    await asyncio.sleep(0)
    trainers[1].die()
    for failure in await raised(takes, "EDEAD"):
        assert "trainer rank 1" in str(failure), failure
    trainers[0].die()
    trainers = [trainer(0, 2), trainer(1, 2)]
    await update(trainers, engines, 8)

    # An adapter fails in the middle. Nobody ends what is under way elsewhere, and the next update goes through.
    victim = rng.randrange(3)
    begin(trainers, engines)
    sends, takes = send(trainers, 9), receive(engines[:victim] + engines[victim + 1:])
    failed, = await asyncio.gather(*receive([engines[victim]], stop_at=rng.randrange(1, len(NAMES))), return_exceptions=True)
    assert str(failed) == "the adapter failed", failed
    await update(trainers, engines, 10)
    await raised(sends, "ECANCELED")
    await asyncio.gather(*takes, return_exceptions=True)

    # Engines are late: the version is kept for them.
    late = rng.choice([(2,), (0, 1), (0, 1, 2)])
    begin(trainers, engines)
    sends = send(trainers, 11)
    for came in await asyncio.gather(*receive([e for i, e in enumerate(engines) if i not in late])):
        same(came, 11)
    await asyncio.sleep(4 * synchronised._SLICE)
    assert not any(task.done() for task in sends)
    for came in await asyncio.gather(*receive([engines[i] for i in late])):
        same(came, 11)
    await asyncio.gather(*sends)
    for step in range(12, 15):
        await update(trainers, engines, step)

    # A rank of the trainer has started anew, alone: the others open their parts anew.
    for step, victim in ((15, 1), (16, 0)):
        trainers[victim].die()
        trainers[victim] = trainer(victim, 2)
        await update(trainers, engines, step)

    # A tensor that one of the ranks keeps has another shape: all of them announce that in the same synchronisation.
    for step, name in ((17, "up"), (18, "head")):
        NAMES[name] = (1000, 150)
        await update(trainers, engines, step)


def behind_an_import():
    """What is done behind the import of a module is done once, also when somebody has only looked for it before."""
    called = []
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "engines_of_verl.py"), "w", encoding="utf-8") as file:
            file.write("here = True\n")
        sys.path.insert(0, folder)
        plugin._After("engines_of_verl", lambda: called.append(sys.modules["engines_of_verl"].here))
        for _ in range(2):
            assert importlib.util.find_spec("engines_of_verl") is not None and not called
        importlib.reload(importlib.import_module("engines_of_verl"))
        assert called == [True], called
        sys.path.remove(folder)


behind_an_import()
with dray.serve():
    asyncio.run(story())
