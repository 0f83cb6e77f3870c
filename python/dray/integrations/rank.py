"""A rank of a framework's engine as a rank of one of dray's: what the framework's load_weights puts where is recorded,
the first update goes by load_weights and is compared by bytes with what an update in place would have written, and
what was equal goes in place from then on."""
from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import Optional

import torch

from .. import weights
from ..record import record
from ..record.tensors import NotRecorded


@dataclass
class Handshake:
    """What a trainer tells each rank of an engine once (JSON can hold all of it). tensors: of the checkpoint, [name,
    dtype, shape] each. model: the name that the trainer publishes under. address: of the coordinator, where the rank
    has no $DRAY_ADDRESS. group: the engine's name, where it is not one that the framework makes. in_place: False leaves everything to
    load_weights. timeout: seconds of a wait."""
    tensors: list = field(default_factory=list)
    model: str = weights.MODEL
    address: Optional[str] = None
    group: Optional[str] = None
    in_place: bool = True
    timeout: float = 300.0


class Load:
    """One load by load_weights, bucket by bucket. begin: what the framework does before the first one, so that a wait
    that fails leaves the model as it was; end: what it does behind the last one. certificate: a Certificate that
    looks on."""

    def __init__(self, load_weights, begin, end, certificate=None):
        self._load_weights, self._begin, self._end = load_weights, begin, end
        self._certificate, self._begun = certificate, False

    def __enter__(self):
        self._begun = False
        if self._certificate:
            self._certificate.__enter__()
        return self

    def __call__(self, named):
        if not self._begun:
            self._begin()
            self._begun = True
        if self._certificate:
            self._certificate(named)
        else:  # a loader may keep what it is given, and write to it
            self._load_weights((name, t.clone()) for name, t in named)

    def __exit__(self, kind, *error):
        if self._begun:
            self._begun = False
            self._end()
        if self._certificate:
            self._certificate.__exit__(kind, *error)


class Rank:
    """report: of the last update. left: why tensors go by load_weights, by their names ("": all).

    framework: its name. log: where what goes by load_weights is told. group: the engine's name. why_not: why nothing
    goes in place. begin, end: around each load (Load). within: what recording runs in. settle: called with what was
    recorded, before and after it was compared, to leave more to load_weights."""

    def __init__(self, told: Handshake, model, load_weights, *, framework, log, group, rank, world, why_not="",
                 begin=lambda: None, end=lambda: None, within=contextlib.nullcontext, settle=lambda recorded: None):
        address = os.environ.get("DRAY_ADDRESS") or told.address
        if not address:
            raise ValueError("dray: no coordinator is named: start `dray serve` (or dray.serve() in the trainer), and "
                             f"set DRAY_ADDRESS where {framework} and the trainer start")
        if not told.tensors:
            raise ValueError("dray's handshake: tensors expected, [name, dtype, shape] each, found none")
        tensors = {name: (tuple(shape), getattr(torch, dtype)) for name, dtype, shape in told.tensors}
        self.report, self.left = None, {}
        self._model, self._load_weights, self._framework, self._log = model, load_weights, framework, log
        self._begin, self._end, self._within, self._settle = begin, end, within, settle
        self._timeout, self._load = told.timeout, None
        self._recorded, why = (None, why_not or "in_place is False") if why_not or not told.in_place else \
            self._record(tensors)
        self._context = weights.Context(address, role="engine", rank=rank, timeout=told.timeout)
        options = dict(model=told.model, group=group, rank=rank, world=world, context=self._context,
                       timeout=told.timeout)
        try:
            if self._recorded is None:
                self.left, self._load = {"": why}, self._loading()
                self._subscriber = weights.Subscriber(load=self._load, tensors=tensors, **options)
                log.info("dray: all weights go by load_weights: %s", why)
            else:
                self._subscriber = weights.Subscriber(self._recorded, **options)
        except BaseException:
            self._context.close()
            raise

    def _loading(self, certificate=None):
        return Load(self._checked_load, self._begin, self._end, certificate)

    def _record(self, tensors):
        """(what load_weights puts where, "") or (None, why it goes by load_weights)."""
        begun = time.monotonic()
        try:
            with self._within():
                found = record(self._checked_load, tensors, self._model)
                rounded = {source: (tensors[source][0], found._found[name].dtype)
                           for name, why in found.by_loader.items() if why.startswith("is computed: rounded to ")
                           for source in found._found[name].sources}
                if rounded:  # what is only rounded is asked for in the engine's dtype
                    found = record(self._checked_load, {**tensors, **rounded}, self._model)
        except NotRecorded as failure:
            return None, str(failure)
        if not found.in_place:
            return None, next(iter(found.by_loader.values()), "load_weights fills no tensor of the model")
        found._load = self._load_left
        found.certificate = lambda: None if found.certified else self._loading(found.certify(self._checked_load))
        self._settle(found)
        self._log.info("dray: %d tensors recorded in %.1f s, %d of them left to load_weights", len(found._found),
                       time.monotonic() - begun, len(found.by_loader))
        return found, ""

    def _checked_load(self, named):
        """load_weights; what it raises says how far it came."""
        last = "nothing"

        def watched():
            nonlocal last
            for name, tensor in named:
                last = f"{name}, {tensor.dtype} {tuple(tensor.shape)}"
                yield name, tensor

        try:
            self._load_weights(watched())
        except NotRecorded:
            raise
        except Exception as failure:
            raise RuntimeError(f"{self._framework}'s load_weights does not take what the trainer has, after {last}: "
                               f"{type(failure).__name__} {failure}") from failure

    def _load_left(self, named):
        """Those that are left to load_weights, once what is in place lies there."""
        with self._loading() as load:
            load(list(named))

    def update(self, version: int, newer: bool = False) -> dict:
        """Brings this version (newer: or one behind it), together with the other ranks; the report."""
        options = dict(min_version=version, timeout=self._timeout)
        first = self._recorded is not None and not self._recorded.certified
        with self._load or contextlib.nullcontext():
            report = self._subscriber.update(**options)
        if first:
            self._settle(self._recorded)
            self.left = self._recorded.by_loader
            for name, why in self.left.items():
                self._log.info("dray: %s goes by load_weights: %s", name, why)
        if report["version"] != version and not newer:
            raise RuntimeError(f"version {version} expected, the trainer is at {report['version']} already")
        self.report = report
        self._log.info("dray: version %d, %.1f MB in %.3f s (%s)", report["version"], report["bytes"] / 1e6,
                       report["total_seconds"], report["mode"])
        return report

    def close(self) -> None:
        self._context.close()
