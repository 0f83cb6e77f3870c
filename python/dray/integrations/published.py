"""A rank of a trainer that hands its weights to engines of a framework as they lie: nothing is gathered."""
from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Optional

from .. import weights
from ..parameters import Copies, clean
from ..sessions import place


@dataclass
class Options:
    """world: how many ranks the trainer has; None: torch.distributed's. model: the name to publish under. config: a
    config.json, or a folder with one, for modules of transformers whose parameters are not the checkpoint's tensors
    (packed experts). tensors: {name: (shape, dtype)} or {name: tensor} of the checkpoint, where they are not the
    module's parameters. group: the engine's name, where only one is updated. in_place: False leaves all to the
    engine's load_weights. timeout: seconds of a wait."""
    world: Optional[int] = None
    model: str = weights.MODEL
    config: Optional[str] = None
    tensors: Optional[Mapping[str, Any]] = None
    group: Optional[str] = None
    in_place: bool = True
    timeout: float = 300.0


class Published:
    """source: a module (FSDP2's, with its shards), or anything else that dray.Publisher takes; or Copies, of which each
    version is given to send."""

    def __init__(self, source, rank: int, options: Options, framework: str):
        if source is None:
            raise ValueError("dray: source expected: the module, or what dray.Publisher takes")
        self._address = os.environ.get("DRAY_ADDRESS")
        if not self._address:
            raise ValueError("dray: no coordinator is named: start `dray serve`, or call dray.serve() first, and set "
                             "DRAY_ADDRESS on all ranks")
        self.rank, self._source, self._options, self._framework = rank, source, options, framework
        self.world = place(None, None)[1] if options.world is None else options.world
        self.context = weights.Context(self._address, role="trainer", rank=rank, timeout=options.timeout)
        try:
            self.publisher = weights.Publisher(source, options.model, rank, self.world, context=self.context,
                                               config=options.config, timeout=options.timeout)
        except BaseException:
            self.context.close()
            raise

    def handshake(self) -> dict:
        """rank.Handshake, as a dict that JSON can hold."""
        options = self._options
        return {"tensors": self._listed(), "model": options.model, "address": self._address, "group": options.group,
                "in_place": options.in_place, "timeout": options.timeout}

    def _listed(self) -> list:
        options, tensors = self._options, self._options.tensors
        if isinstance(self._source, Copies):
            return self._source.listed()
        if tensors is None and options.config is not None:
            tensors = weights.tensors(options.config)
        if tensors is None:
            given = self._source
            tensors = given.named_parameters() if hasattr(given, "named_parameters") else given
        pairs = tensors.items() if hasattr(tensors, "items") else tensors
        listed = []
        for name, of in clean(pairs):
            shape, dtype = of if isinstance(of, tuple) else (of.shape, of.dtype)
            listed.append([name, str(dtype).rpartition(".")[2], list(shape)])
        return listed

    def send(self, version: int, take: Callable[[], Any], tensors: Any = None) -> None:
        """On every rank: publishes (tensors: of Copies); on rank 0: take() has the engines take it; returns when nobody
        reads any more. What take() raises, rank 0 raises; the other ranks return."""
        self.publisher.publish(version, tensors=tensors)
        try:
            if self.rank == 0:
                take()
        finally:
            try:
                if self.world > 1:
                    self.context.barrier(f"{self._framework}-{self._options.model}-{version}", self.world,
                                         self._options.timeout)
            finally:  # also where another rank did not come
                self.publisher.wait(version)

    def close(self) -> None:
        self.context.close()
