"""verl's checkpoint engine "dray", and training engines that hand over their shards as they lie. Importing this
registers both: `rollout.checkpoint_engine.custom_backend_module`, $VERL_USE_EXTERNAL_MODULES or the entry point
`verl.plugins` does. docs/verl.md shows how it is used.

A synchronisation of weights is one version of dray's, whose number verl's driver makes greater than all that any
worker has seen (build_topology)."""
from __future__ import annotations

import importlib.abc
import os
import sys
import weakref
from typing import Any, AsyncGenerator, Optional

from .. import weights as _w
from .synchronised import Shards, Synchronisation, Synchronised
from .upstream import Upstream, spec_of_others

_BASE = "verl.checkpoint_engine.base"
UPSTREAM = Upstream(
    "verl", "verl", "0.9.1",
    methods={
        (_BASE, "CheckpointEngineRegistry.register"): ["backend"],
        (_BASE, "CheckpointEngine.build_topology"): ["actor_wg_world_size", "rollout_world_size", "metadata"],
        (_BASE, "CheckpointEngine.send_weights"): ["self", "weights", "global_steps"],
        (_BASE, "CheckpointEngine.receive_weights"): ["self", "global_steps"],
    },
    abstract={(_BASE, "CheckpointEngine"): {"prepare", "build_topology", "init_process_group", "finalize",
                                            "send_weights", "receive_weights"}})
UPSTREAM.check()

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

__all__ = ["DrayCheckpointEngine", "Shards", "sending"]


@CheckpointEngineRegistry.register("dray")
class DrayCheckpointEngine(Synchronised, CheckpointEngine):
    """One of a worker. engine_kwargs.dray has: model, the name to publish under; address of the coordinator, where the
    workers have no $DRAY_ADDRESS; timeout, seconds that a synchronisation may take. report: of the last one."""
    wire_format = "named_tensors"
    _sending = None  # the engine of this process whose trainer is to hand over weights, weakly

    def __init__(self, bucket_size: int, is_master: Optional[bool] = None, model: str = _w.MODEL,
                 address: Optional[str] = None, timeout: float = 300.0):
        Synchronised.__init__(self, "checkpoint_engine.engine_kwargs.dray.address", bucket_size, model, address,
                              timeout)
        self.sends = is_master is not None

    def prepare(self) -> dict:
        """What build_topology is to know of this worker. A synchronisation that is under way here is given up."""
        if self._now is not None:
            self._now.given_up = True
        place = [os.environ.get(name) for name in ("WG_PREFIX", "RANK", "WORLD_SIZE")]  # of verl's worker group
        side, rank = "trainer" if self.sends else "engine", int(place[1] or 0)
        return {**self._join(side, f"{place[0] or side} rank {rank}", rank),
                "place": (place[0], rank, int(place[2])) if all(place) else None}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list) -> tuple:
        """The next version, and who takes it: the workers of a replica are a group, which takes it as one."""
        trainers, engines = metadata[:actor_wg_world_size], metadata[actor_wg_world_size:]
        if len(engines) != rollout_world_size:
            raise ValueError(f"checkpoint engine dray: {actor_wg_world_size} + {rollout_world_size} workers expected, "
                             f"found {len(metadata)}")
        version = 1 + max(m["version"] for m in metadata)
        there = [m["place"] for m in engines]
        whole = {p[0] for p in there if p and all(there.count((p[0], r, p[2])) == 1 for r in range(p[2]))}
        places = [p if p and p[0] in whole else (f"member-{m['member']}", 0, 1) for p, m in zip(there, engines)]
        groups = sorted({p[0] for p in places})

        def arguments(rows):
            columns = ("rank", "world", "groups", "others")
            told = {column: list(values) for column, values in zip(columns, zip(*rows))}
            return {**told, "version": [version] * len(rows)}

        def names(members):
            return {m["member"]: m["name"] for m in members}

        count = actor_wg_world_size
        replicas = {g: [m for m, p in zip(engines, places) if p[0] == g] for g in groups}
        return (arguments([(rank, count, groups, names(engines)) for rank in range(count)]),
                arguments([(rank, world, [group], names(trainers + replicas[group])) for group, rank, world in places]))

    def init_process_group(self, rank: int, world: int, groups: list, version: int, others: dict) -> None:
        self._now = Synchronisation(rank, world, version, groups, others)
        if self.sends:
            DrayCheckpointEngine._sending = weakref.ref(self)

    def finalize(self) -> None:
        self._now = None

    def last_report(self) -> Optional[dict]:
        return self.report

    async def send_weights(self, weights: Any, global_steps: Optional[int] = None) -> dict:
        """Returns when every engine has committed the weights and nobody reads them any more."""
        seconds = await self.send(weights)
        return {"dray/send_seconds": seconds} if self._now and self._now.rank == 0 else {}

    async def receive_weights(self, global_steps: Optional[int] = None) -> AsyncGenerator:
        """(name, tensor), whole tensors: the newest version that is complete, of at least the one that was agreed on. The
        ranks of a replica commit it together."""
        buckets = self.buckets()
        try:
            async for bucket in buckets:
                for pair in bucket:
                    yield pair
        finally:
            await buckets.aclose()


# ---- training engines ----------------------------------------------------------------------------

def sending() -> bool:
    """Whether the training engine of this process is asked for weights by backend "dray"."""
    found = DrayCheckpointEngine._sending and DrayCheckpointEngine._sending()
    return found is not None and found._now is not None and not found._now.given_up


class _After(importlib.abc.MetaPathFinder):
    """Calls a function once a module is imported: now, if it is. verl finds its platform when it imports its engines,
    which a plug-in must not do before other plug-ins have added theirs."""

    def __init__(self, name, call):
        self._name, self._call = name, call
        if name in sys.modules:
            call()
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        spec = spec_of_others(self, name, path, target)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module):  # who only asks whether the module is there imports nothing
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._call()
            spec.loader.exec_module = exec_module
        return spec


def _register_engines():
    from . import verl_engines
    verl_engines.register()


_After("verl.workers.engine", _register_engines)
