"""A rank of a trainer that hands its weights to vLLM as they lie: nothing is gathered."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Optional

from .vllm import UPSTREAM

UPSTREAM.check()

from vllm.distributed.weight_transfer.base import ModuleSource, TrainerInitInfo, TrainerWeightTransferEngine, WeightSource
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient, RayVLLMWeightSyncClient

from ..parameters import Copies
from .published import Options, Published


@dataclass
class DrayTrainerInitInfo(Options, TrainerInitInfo):
    """rank: of the trainer (rank 0 speaks to vLLM); draft: it trains vLLM's draft model; and published.Options, of which
    model is another name for a draft."""
    backend: ClassVar[str] = "dray"
    draft: bool = False

    def __post_init__(self):
        if self.draft and self.model == Options.model:
            self.model += "-draft"


def start_draft(client: Any) -> None:
    """vLLM's start_draft_weight_update; its own clients have no method for it."""
    if hasattr(client, "start_draft_weight_update"):
        client.start_draft_weight_update()
    elif isinstance(client, HTTPVLLMWeightSyncClient):
        client._post("start_draft_weight_update")
    elif isinstance(client, RayVLLMWeightSyncClient):
        import ray
        ray.get([handle.start_draft_weight_update.remote() for handle in client.handles])
    else:
        raise TypeError(f"draft=True: a client with start_draft_weight_update expected, found {type(client).__name__}")


def _gather(source) -> None:
    """This rank's part in what another one is given."""
    for _ in source:
        pass


class DrayTrainer(TrainerWeightTransferEngine[DrayTrainerInitInfo]):
    """Backend "dray". version: the last that was sent."""
    init_info_cls = DrayTrainerInitInfo

    def __init__(self, *, client, source, is_sender, published, draft=False, copies=False) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.version, self._published, self._draft, self._copies = 0, published, draft, copies

    @classmethod
    def trainer_init(cls, init_info: DrayTrainerInitInfo, *, client, source=None) -> "DrayTrainer":
        """source: a module (FSDP2's, with its shards), its ModuleSource, or anything else that dray.Publisher takes. Or
        another WeightSource, as SkyRL's: all ranks gather with it, tensor by tensor, and rank 0 keeps what it gives."""
        given = source._module if isinstance(source, ModuleSource) else source
        options = init_info
        if isinstance(given, WeightSource):
            if not init_info.is_sender:
                _gather(source)
                return cls(client=client, source=source, is_sender=False, published=None, draft=init_info.draft)
            given, options = Copies(source, 0, 1), replace(init_info, world=1)
        published = Published(given, init_info.rank, options, "vllm")
        try:
            made = cls(client=client, source=source, is_sender=init_info.is_sender, published=published,
                       draft=init_info.draft, copies=isinstance(given, Copies))
            made.init_engine()
        except BaseException:
            published.close()
            raise
        return made

    def init_engine(self, client=None) -> None:
        """Tells an engine what is published: each that joins later, or again, once. client: of that one."""
        if self.is_sender:
            told = self._published.handshake()
            (client or self.client).init_weight_transfer_engine({**told, "draft": True} if self._draft else told)

    def send_weights(self, version: Optional[int] = None) -> None:
        """On every rank: publishes (version: the last one's successor), has the engines take it, and returns when
        nobody reads any more: the weights may be changed."""
        self.version = version = self.version + 1 if version is None else version

        def take():
            start_draft(self.client) if self._draft else self.client.start_weight_update()
            self.client.update_weights({"version": version})
            self.client.finish_weight_update(*() if self._draft else (str(version),))  # vLLM's version is the model's

        if self._published is None:
            _gather(self.source)
        else:
            self._published.send(version, take, self.source if self._copies else None)

    def shutdown(self) -> None:
        if self._published is not None:
            self._published.close()
