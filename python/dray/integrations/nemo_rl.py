"""NeMo-RL's weights by dray: `policy.generation.refit_transport: "dray.integrations.nemo_rl:DrayCheckpointEngine"`.
docs/nemo-rl.md shows how it is used."""
from __future__ import annotations

from typing import Any, AsyncGenerator, Optional

from .. import weights as _w
from .synchronised import Synchronisation, Synchronised
from .upstream import Upstream

_BASE = "nemo_rl.utils.checkpoint_engines.base"
_PLACE = ["train_world_size", "rollout_world_size", "metadata"]
UPSTREAM = Upstream(
    "NeMo-RL", "nemo_rl", "7ea279a",
    methods={
        (_BASE, "create_checkpoint_engine"): ["backend", "bucket_size_bytes", "engine_kwargs"],
        (_BASE, "CheckpointEngine.init_policy_process_group"): ["self", "worker_rank", *_PLACE],
        (_BASE, "CheckpointEngine.init_rollout_process_group"): ["self", "rollout_rank", *_PLACE],
        (_BASE, "CheckpointEngine.get_target_weight_layout"): ["self"],
        (_BASE, "CheckpointEngine.finalize"): ["self"],
        (_BASE, "CheckpointEngine.send_weights"): ["self", "weights"],
        (_BASE, "CheckpointEngine.receive_weight_batches"): ["self"],
    },
    abstract={(_BASE, "CheckpointEngine"): {"prepare", "init_policy_process_group", "init_rollout_process_group",
                                            "send_weights", "receive_weight_batches"}})
UPSTREAM.check()

from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine


class DrayCheckpointEngine(Synchronised, CheckpointEngine):
    """One of a worker. refit_cfg has under this class's path: model, the name to publish under; address of the coordinator,
    where the workers have no $DRAY_ADDRESS; timeout, seconds that a synchronisation may take. report: of the last one.

    The workers of all rollouts are one group: they get a version together, or none of them does."""

    def __init__(self, bucket_size: int, model: str = _w.MODEL, address: Optional[str] = None, timeout: float = 300.0,
                 release_after_refit: bool = False):
        Synchronised.__init__(self, "refit_cfg's address", bucket_size, model, address, timeout)
        self._release, self._fresh = release_after_refit, False

    def prepare(self) -> dict:
        """What the other workers are to know of this one."""
        if self._now is not None:
            self._now.given_up = True
        return self._join(None, "NeMo-RL worker", 0)

    def _meet(self, rank, world, others, train, rollout, metadata):
        if len(metadata) != train + rollout or not all(isinstance(m, dict) and "member" in m for m in metadata):
            raise ValueError(f"checkpoint engine dray: what {train} + {rollout} workers of dray prepared expected, found "
                             f"{len(metadata)} entries, {str(metadata)[:200]}")
        self._now = Synchronisation(rank, world, 1 + max(m["version"] for m in metadata), [f"{self.model}.rollout"],
                                    {m["member"]: m["name"] for m in others})
        self._fresh = True

    def init_policy_process_group(self, *, worker_rank: int, train_world_size: int, rollout_world_size: int,
                                  metadata: list) -> None:
        self._meet(worker_rank, train_world_size, metadata[train_world_size:], train_world_size, rollout_world_size,
                    metadata)

    def init_rollout_process_group(self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int,
                                   metadata: list) -> None:
        self._meet(rollout_rank, rollout_world_size, metadata, train_world_size, rollout_world_size, metadata)

    def _next(self):
        """One process group may serve many synchronisations, each of the next version."""
        now = self._now
        if now is not None and not self._fresh:
            self._now = Synchronisation(now.rank, now.world, max(now.version, self.version) + 1, now.groups, now.others)
        self._fresh = False

    def finalize(self) -> None:
        """With release_after_refit what was copied and mapped is given back, and the session ends."""
        self._now = None
        if self._release:
            self._close()
            self._leave()
            self._kept = {}
            if self._context is not None:
                self._context.close()
            self._context = None

    async def send_weights(self, weights: Any) -> None:
        """Returns when all rollouts have committed the weights and nobody reads them any more."""
        self._next()
        await self.send(weights)

    async def receive_weight_batches(self) -> AsyncGenerator:
        """Lists of (name, tensor), whole tensors."""
        self._next()
        buckets = self.buckets()
        try:
            async for bucket in buckets:
                yield bucket
        finally:
            await buckets.aclose()
