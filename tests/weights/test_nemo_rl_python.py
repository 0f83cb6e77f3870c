"""The NeMo-RL plug-in against the contract that NeMo-RL 7ea279a has with a checkpoint engine, without NeMo-RL; with the
repository in $DRAY_UPSTREAM/nemo-rl, against its own classes (tests/frameworks/nemo_contract)."""
import abc
import asyncio
import concurrent.futures
import os
import pathlib
import pickle
import random
import sys
import time
import types

try:
    import torch
except ImportError as missing:
    print(missing)
    sys.exit(77)

UPSTREAM = pathlib.Path(os.environ.get("DRAY_UPSTREAM", "/nowhere"), "nemo-rl")
if UPSTREAM.is_dir():
    sys.path.insert(0, str(UPSTREAM))
else:
    sys.path.insert(0, os.path.join(os.environ["DRAY_SOURCE_DIR"], "python"))
import dray  # noqa: E402
from served import refused  # noqa: E402


def contract():
    """The names that the plug-in imports of NeMo-RL, as they are declared there."""
    class CheckpointEngine(abc.ABC):
        shard_expert_weights = False

        def get_target_weight_layout(self):
            return None

        @abc.abstractmethod
        def prepare(self): ...
        @abc.abstractmethod
        def init_policy_process_group(self, *, worker_rank, train_world_size, rollout_world_size, metadata): ...
        @abc.abstractmethod
        def init_rollout_process_group(self, *, rollout_rank, train_world_size, rollout_world_size, metadata): ...

        def finalize(self):
            pass

        @abc.abstractmethod
        async def send_weights(self, weights): ...
        @abc.abstractmethod
        def receive_weight_batches(self): ...

    def create_checkpoint_engine(backend, *, bucket_size_bytes, engine_kwargs):
        module, name = backend.split(":", 1)
        return getattr(sys.modules[module], name)(bucket_size=bucket_size_bytes, **engine_kwargs)

    for name in ("nemo_rl", "nemo_rl.utils", "nemo_rl.utils.checkpoint_engines", "nemo_rl.utils.checkpoint_engines.base"):
        sys.modules[name] = made = types.ModuleType(name)
        made.__path__ = []
    vars(made).update(CheckpointEngine=CheckpointEngine, create_checkpoint_engine=create_checkpoint_engine)
    return create_checkpoint_engine


if UPSTREAM.is_dir():
    from nemo_rl.utils.checkpoint_engines.base import create_checkpoint_engine as create  # noqa: E402
else:
    create = contract()
from dray.integrations import nemo_rl as plugin, synchronised  # noqa: E402

synchronised._SLICE = 0.05
NAMES = {"embed": (1000, 100), "norm": (8,), "up": (1000, 300), "head": (1000, 100), "scalar": ()}  # several buckets
TRAIN, ROLLOUT, TIMEOUT = 3, 2, 120.0
seed = int(os.environ.get("DRAY_TEST_SEED") or random.SystemRandom().randrange(1 << 30))
rng = random.Random(seed)


def numbers(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in NAMES.items()}


def worker(**options):
    return create("dray.integrations.nemo_rl:DrayCheckpointEngine", bucket_size_bytes=1 << 19,
                  engine_kwargs={"timeout": TIMEOUT, **options})


def meet(train, rollout):
    """NeMo-RL's synchroniser: all prepare, and all are told what all have prepared, each with its rank."""
    metadata = [{**engine.prepare(), "rank": rank} for side in (train, rollout) for rank, engine in enumerate(side)]
    metadata = pickle.loads(pickle.dumps(metadata))
    sizes = dict(train_world_size=len(train), rollout_world_size=len(rollout), metadata=metadata)
    for rank, engine in enumerate(train):
        engine.init_policy_process_group(worker_rank=rank, **sizes)
    for rank, engine in enumerate(rollout):
        engine.init_rollout_process_group(rollout_rank=rank, **sizes)


async def take(engine, stop_at=None):
    """NeMo-RL's worker in vLLM."""
    came = {}
    async for batch in engine.receive_weight_batches():
        assert isinstance(batch, list)
        came.update((name, tensor.clone()) for name, tensor in batch)
        if stop_at is not None and len(came) >= stop_at:
            raise RuntimeError("load_weights failed")
        await asyncio.sleep(0)
    return came


def send(train, step):
    return [asyncio.ensure_future(engine.send_weights(iter(numbers(step).items()))) for engine in train]


async def synchronise(train, rollout, step):
    sends, takes = send(train, step), [asyncio.ensure_future(take(engine)) for engine in rollout]
    await asyncio.gather(*sends)
    for came in await asyncio.gather(*takes):
        wanted = numbers(step)
        assert came.keys() == wanted.keys() and all(torch.equal(came[name], wanted[name]) for name in wanted), step


async def story():
    asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor(32))  # all are one process here
    for options in ({"release_after_refit": True}, {}):
        train, rollout = [worker(**options) for _ in range(TRAIN)], [worker(**options) for _ in range(ROLLOUT)]
        for step in range(1, 7):
            if step == 1 or options:  # released workers meet again for each
                meet(train, rollout)
            await synchronise(train, rollout, step)
            if options:
                for engine in train + rollout:
                    engine.finalize()
                    assert engine._context is None and engine.get_target_weight_layout() is None
        assert {engine.version for engine in train + rollout} == {6}
        for engine in rollout:
            assert engine.report["verified_tensors"] == len(NAMES)

    # A rollout fails within a loop of its own, as NeMo-RL's worker has one, and holds what it iterates over: it ends at
    # once, and not with the deadline, as the others do who meet again.
    async def failing(batches):
        async for _ in batches:
            raise RuntimeError("load_weights failed")

    sends, takes = send(train, 7), [asyncio.ensure_future(take(engine)) for engine in rollout[1:]]
    begun = time.monotonic()
    failed = await asyncio.gather(asyncio.to_thread(lambda: asyncio.run(failing(rollout[0].receive_weight_batches()))),
                                  return_exceptions=True)
    assert str(failed[0]) == "load_weights failed" and time.monotonic() - begun < TIMEOUT / 2, failed
    meet(train, rollout)
    await asyncio.gather(*sends, *takes, return_exceptions=True)
    await synchronise(train, rollout, 8)

    # A rollout fails in the middle, and dies: the policy's ranks are told, and those who meet again go on.
    victim = rng.randrange(ROLLOUT)
    sends = send(train, 9)
    takes = [asyncio.ensure_future(take(engine, rng.randrange(1, 4) if i == victim else None))
             for i, engine in enumerate(rollout)]
    await asyncio.sleep(0.1)
    failed = await asyncio.gather(takes[victim], return_exceptions=True)
    assert str(failed[0]) == "load_weights failed", failed
    for attempt in range(200):
        try:
            rollout[victim]._context.close()
            break
        except dray.DrayError as error:  # its thread may still be in the call that failed
            assert error.name == "EBUSY" and attempt < 199, error
            await asyncio.sleep(0.05)
    for failure in await asyncio.gather(*sends, return_exceptions=True):
        assert isinstance(failure, dray.DrayError) and failure.name == "EDEAD" and "NeMo-RL worker" in str(failure), failure
    await asyncio.gather(*takes, return_exceptions=True)
    rollout[victim] = worker()
    meet(train, rollout)
    for step in (10, 11):
        await synchronise(train, rollout, step)

    # What is wrong is said.
    refused(ValueError, ["3 + 1 workers of dray", "found 2 entries"], lambda: train[0].init_policy_process_group(
        worker_rank=0, train_world_size=3, rollout_world_size=1, metadata=[{"member": 1, "name": "a", "version": 0}, {}]))
    address = os.environ.pop("DRAY_ADDRESS")
    refused(ValueError, ["DRAY_ADDRESS"], worker)
    os.environ["DRAY_ADDRESS"] = address
    base = sys.modules["nemo_rl.utils.checkpoint_engines.base"]
    kept, base.CheckpointEngine.__abstractmethods__ = base.CheckpointEngine.__abstractmethods__, frozenset({"begin"})
    refused(RuntimeError, ["7ea279a", "asks for begin"], plugin.UPSTREAM.check)
    base.CheckpointEngine.__abstractmethods__ = kept


with dray.serve():
    try:
        asyncio.run(story())
    except BaseException:
        print(f"DRAY_TEST_SEED={seed}", file=sys.stderr)
        raise
