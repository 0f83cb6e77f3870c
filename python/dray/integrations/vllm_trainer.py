"""A rank of a trainer that hands its weights to vLLM as they lie: nothing is gathered."""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Optional

from .vllm import UPSTREAM

UPSTREAM.check()

from vllm.distributed.weight_transfer.base import ModuleSource, TrainerInitInfo, TrainerWeightTransferEngine

from .published import Options, Published


@dataclass
class DrayTrainerInitInfo(Options, TrainerInitInfo):
    """rank: of the trainer (rank 0 speaks to vLLM); and published.Options."""
    backend: ClassVar[str] = "dray"


class DrayTrainer(TrainerWeightTransferEngine[DrayTrainerInitInfo]):
    """Backend "dray". version: the last that was sent."""
    init_info_cls = DrayTrainerInitInfo

    def __init__(self, *, client, source, is_sender, published) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.version, self._published = 0, published

    @classmethod
    def trainer_init(cls, init_info: DrayTrainerInitInfo, *, client, source=None) -> "DrayTrainer":
        """source: a module (FSDP2's, with its shards), its ModuleSource, or anything else that dray.Publisher takes."""
        given = source._module if isinstance(source, ModuleSource) else source
        published = Published(given, init_info.rank, init_info, "vllm")
        try:
            made = cls(client=client, source=source, is_sender=init_info.is_sender, published=published)
            made.init_engine()
        except BaseException:
            published.close()
            raise
        return made

    def init_engine(self, client=None) -> None:
        """Tells an engine what is published: each that joins later, or again, once. client: of that one."""
        if self.is_sender:
            (client or self.client).init_weight_transfer_engine(self._published.handshake())

    def send_weights(self, version: Optional[int] = None) -> None:
        """On every rank: publishes (version: the last one's successor), has the engines take it, and returns when
        nobody reads any more: the weights may be changed."""
        self.version = version = self.version + 1 if version is None else version

        def take():
            self.client.start_weight_update()
            self.client.update_weights({"version": version})
            self.client.finish_weight_update(str(version))

        self._published.send(version, take)

    def shutdown(self) -> None:
        self._published.close()
