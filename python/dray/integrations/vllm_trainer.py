"""A rank of a trainer that hands its weights to vLLM as they lie: nothing is gathered."""
from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar, Mapping, Optional

from .vllm import check

check()

from vllm.distributed.weight_transfer.base import ModuleSource, TrainerInitInfo, TrainerWeightTransferEngine

from .. import weights


@dataclass
class DrayTrainerInitInfo(TrainerInitInfo):
    """rank: of the trainer (rank 0 speaks to vLLM). world: how many ranks it has; None: torch.distributed's. model: the
    name to publish under. config: a config.json, or a folder with one, for modules of transformers whose parameters
    are not the checkpoint's tensors (packed experts). tensors: {name: (shape, dtype)} or {name: tensor} of the
    checkpoint, where they are not the module's parameters. group: the engine's name, where only one is updated.
    in_place: False leaves all to vLLM's load_weights. timeout: seconds of a wait."""
    backend: ClassVar[str] = "dray"
    world: Optional[int] = None
    model: str = weights.MODEL
    config: Optional[str] = None
    tensors: Optional[Mapping[str, Any]] = None
    group: Optional[str] = None
    in_place: bool = True
    timeout: float = 300.0


class DrayTrainer(TrainerWeightTransferEngine[DrayTrainerInitInfo]):
    """Backend "dray". version: the last that was sent."""
    init_info_cls = DrayTrainerInitInfo

    def __init__(self, *, client, source, is_sender, info, context, publisher, world) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self.version, self._info, self._world = 0, info, world
        self._context, self.publisher = context, publisher

    @classmethod
    def trainer_init(cls, init_info: DrayTrainerInitInfo, *, client, source=None) -> "DrayTrainer":
        """source: a module (FSDP2's, with its shards), its ModuleSource, or anything else that dray.Publisher takes."""
        if source is None:
            raise ValueError('weight transfer backend "dray": source expected: the module, or what dray.Publisher takes')
        address = os.environ.get("DRAY_ADDRESS")
        if not address:
            raise ValueError('weight transfer backend "dray": no coordinator is named: start `dray serve`, or call '
                             "dray.serve() first, and set DRAY_ADDRESS on all ranks")
        given = source._module if isinstance(source, ModuleSource) else source
        rank, world = init_info.rank, init_info.world
        if world is None:
            world = weights._place(None, None)[1]
        context = weights.Context(address, role="trainer", rank=rank, timeout=init_info.timeout)
        try:
            publisher = weights.Publisher(given, init_info.model, rank, world, context=context,
                                          config=init_info.config, timeout=init_info.timeout)
            made = cls(client=client, source=source, is_sender=init_info.is_sender, info=init_info, context=context,
                       publisher=publisher, world=world)
            made._payload = made._tell(given, address) if made.is_sender else None
            made.init_engine()
        except BaseException:
            context.close()
            raise
        return made

    def _tell(self, given, address):
        """DrayInitInfo, as a dict that JSON can hold."""
        info = self._info
        tensors = info.tensors
        if tensors is None and info.config is not None:
            tensors = weights.tensors(info.config)
        if tensors is None:
            tensors = given.named_parameters() if hasattr(given, "named_parameters") else given
        pairs = tensors.items() if hasattr(tensors, "items") else tensors
        listed = []
        for name, of in pairs:
            shape, dtype = of if isinstance(of, tuple) else (of.shape, of.dtype)
            listed.append([name, str(dtype).rpartition(".")[2], list(shape)])
        return {"tensors": listed, "model": info.model, "address": address, "group": info.group,
                "in_place": info.in_place, "timeout": info.timeout}

    def init_engine(self, client=None) -> None:
        """Tells an engine what is published: each that joins later, or again, once. client: of that one."""
        if self.is_sender:
            (client or self.client).init_weight_transfer_engine(self._payload)

    def send_weights(self, version: Optional[int] = None) -> None:
        """On every rank: publishes (version: the last one's successor), has the engines take it, and returns when
        nobody reads any more: the weights may be changed."""
        version = self.version + 1 if version is None else version
        self.publisher.publish(version)
        if self.is_sender:
            self.client.start_weight_update()
            self.client.update_weights({"version": version})
            self.client.finish_weight_update(str(version))
        if self._world > 1:
            self._context.barrier(f"vllm-{self._info.model}-{version}", self._world, self._info.timeout)
        self.publisher.wait(version)
        self.version = version

    def shutdown(self) -> None:
        self._context.close()
