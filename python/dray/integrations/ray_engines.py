"""Engines of SGLang that a trainer reaches as actors of Ray, whose methods are those of SGLang's server: slime's, and
miles' of older versions. Needs neither of them."""
from __future__ import annotations

from typing import Callable, Sequence

from .sglang import LOADER, message, packed


def _wait(references):
    import ray
    return ray.get(references)


class RayEngines:
    """group: a name that no other trainer's engines have; each of them is a group of its own behind it."""

    def __init__(self, group: str):
        self._group, self._told, self.engines, self._counts = group, [], [], []

    def connect(self, engines: Sequence, counts: Sequence[int], handshake: Callable[[], dict]) -> None:
        """Tells those that were not told yet. counts: of each one's ranks, at least."""
        self.engines, self._counts = list(engines), list(counts)
        if len(self._counts) != len(self.engines):
            raise ValueError(f"engine_gpu_counts: {len(self.engines)} numbers expected, found {len(self._counts)}")
        new = [engine for engine in self.engines if engine not in self._told]
        self._told = [engine for engine in self._told if engine in self.engines]
        if new:
            base, first = handshake(), self._number
            self._number += len(new)  # also where one fails: others may be there under its number by then
            self._update({engine: message(handshake={**base, "group": f"{self._group}-{number}"})
                          for number, engine in enumerate(new, first)})
            self._told += new

    _number = 0  # of the next engine

    def _update(self, told, **options):
        """All at once; those that failed are named."""
        sent = [(engine, engine.update_weights_from_tensor.remote(
            serialized_named_tensors=[packed(what)] * self._counts[self.engines.index(engine)], load_format=LOADER, **options))
            for engine, what in told.items()]
        failed = []
        for engine, reference in sent:
            try:
                answer = _wait(reference)
                if isinstance(answer, dict) and answer.get("success") is False:
                    failed.append(f"engine {self.engines.index(engine)}: {answer.get('message')}")
            except Exception as failure:  # of one engine: the others are waited for first
                failed.append(f"engine {self.engines.index(engine)}: {type(failure).__name__} {failure}")
                self._told = [each for each in self._told if each is not engine]
        if failed:
            raise RuntimeError("; ".join(failed))

    def update(self, version: int) -> None:
        """Pause, flush, load, continue."""
        try:
            _wait([engine.pause_generation.remote() for engine in self.engines])
            _wait([engine.flush_cache.remote() for engine in self.engines])
            self._update({engine: message(version=version) for engine in self.engines}, weight_version=str(version))
        finally:
            _wait([engine.continue_generation.remote() for engine in self.engines])
