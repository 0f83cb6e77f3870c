"""A worker of vLLM as a rank of one of dray's engines."""
from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Optional

import torch

from .vllm import check

check()

from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo)
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_processing, get_layerwise_info)

from .. import weights
from ..record import record
from ..record.tensors import NotRecorded

_log = logging.getLogger("vllm.dray")


@dataclass
class DrayInitInfo(WeightTransferInitInfo):
    """What the trainer tells the workers once (JSON can hold all of it). tensors: of the checkpoint, [name, dtype,
    shape] each. model: the name that the trainer publishes under. address: of the coordinator, where the worker has
    no $DRAY_ADDRESS. group: the engine's name, else one of its own. in_place: False leaves everything to vLLM's
    load_weights. timeout: seconds of a wait."""
    tensors: list = field(default_factory=list)
    model: str = weights.MODEL
    address: Optional[str] = None
    group: Optional[str] = None
    in_place: bool = True
    timeout: float = 300.0


@dataclass
class DrayUpdateInfo(WeightTransferUpdateInfo):
    """version: that the worker is to hold afterwards, exactly."""
    version: int


class _Reload:
    """One load within vLLM's layerwise reload, bucket by bucket, which begins with the first bucket: a wait that
    fails before it leaves the model as it was. certificate: a Certificate that looks on."""

    def __init__(self, engine, certificate=None):
        self._engine, self._certificate, self._begun = engine, certificate, False

    def __enter__(self):
        self._begun = False
        if self._certificate:
            self._certificate.__enter__()
        return self

    def __call__(self, named):
        if not self._begun:
            initialize_layerwise_reload(self._engine.model)
            self._begun = True
        if self._certificate:
            self._certificate(named)
        else:
            self._engine.load_weights((name, t.clone()) for name, t in named)  # kept until a layer has all of its own

    def __exit__(self, kind, *error):
        if self._begun:
            self._begun = False
            finalize_layerwise_processing(self._engine.model, self._engine.model_config)
            pack_experts(self._engine.model, self._engine.device)
        if self._certificate:
            self._certificate.__exit__(kind, *error)


def kept_elsewhere(model) -> str:
    """Which module's weights vLLM keeps in a form of its own, so that nothing written into its parameters would be
    seen: they have other shapes than load_weights fills, or a function of the module holds a copy. "": none does."""
    for path, module in model.named_modules():
        parameters, _ = get_layerwise_info(module).restore_metadata
        for name, wanted in parameters.items():
            now = module._parameters.get(name)
            if now is None or now.shape != wanted.shape or now.dtype != wanted.dtype:
                return f"{path}.{name} is {'gone' if now is None else f'{now.dtype} {tuple(now.shape)}'} after loading"
        for name, value in vars(module).items():
            for cell in getattr(value, "__closure__", None) or ():
                held = cell.cell_contents
                if isinstance(held, torch.Tensor) or type(held).__module__.startswith("vllm._custom_ops"):
                    return f"{path}.{name} holds a copy"
    return ""


def pack_experts(model, device) -> None:
    """What vLLM 0.32.0 does on CPUs when it first loads experts, and leaves out when it reloads them."""
    if device.type == "cpu":
        for module in model.modules():
            if type(module).__name__ == "RoutedExperts":
                module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def whole_modules(recorded) -> None:
    """vLLM reloads whole layers: what has one tensor that is its loader's is left to it, and so on with all that the
    loader is then given."""
    left = None
    while left != (left := set(recorded.by_loader)):
        modules = {name.rpartition(".")[0] for name in left}
        given = set(recorded.load_tensors)
        for name, sources in recorded.in_place.items():
            if name.rpartition(".")[0] in modules:
                recorded.leave(name, "another tensor of its module is left to the loader")
            elif given.intersection(sources):
                recorded.leave(name, f"the loader is given {min(given.intersection(sources))} for another module")


class DrayEngine(WeightTransferEngine[DrayInitInfo, DrayUpdateInfo]):
    """Backend "dray". report: of the last update; left: why tensors go by load_weights, by their names ("": all)."""
    init_info_cls = DrayInitInfo
    update_info_cls = DrayUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config, vllm_config, device, model) -> None:
        super().__init__(config, vllm_config, device, model)
        self.report, self.left = None, {}
        self._context = self._subscriber = self._recorded = self._reload = None

    # ---- the handshake -----------------------------------------------------------------------

    def init_transfer_engine(self, init_info: DrayInitInfo) -> None:
        self.shutdown()
        address = os.environ.get("DRAY_ADDRESS") or init_info.address
        if not address:
            raise ValueError('weight transfer backend "dray": no coordinator is named: start `dray serve` (or '
                             "dray.serve() in the trainer), and set DRAY_ADDRESS where vLLM and the trainer start")
        if not init_info.tensors:
            raise ValueError('init_info of backend "dray": tensors expected, [name, dtype, shape] each, found none')
        tensors = {name: (tuple(shape), getattr(torch, dtype)) for name, dtype, shape in init_info.tensors}
        parallel = self.parallel_config
        group = init_info.group or f"vllm-{self.vllm_config.instance_id}"
        if parallel.data_parallel_size > 1:
            group = f"{group}-dp{parallel.data_parallel_index}"
        self._timeout = init_info.timeout
        self._context = weights.Context(address, role="engine", rank=parallel.rank, timeout=init_info.timeout)
        options = dict(model=init_info.model, group=group, rank=parallel.rank, world=parallel.world_size,
                       context=self._context, timeout=init_info.timeout)
        self._recorded, why = self._record(tensors) if init_info.in_place else (None, "in_place is False")
        if self._recorded is None:
            self.left, self._reload = {"": why}, _Reload(self)
            self._subscriber = weights.Subscriber(load=self._reload, tensors=tensors, **options)
            _log.info("dray: all weights go by load_weights: %s", why)
        else:
            self._subscriber = weights.Subscriber(self._recorded, **options)

    def _record(self, tensors):
        """(what load_weights puts where, "") or (None, why it goes by load_weights)."""
        if why := kept_elsewhere(self.model):
            return None, why
        begun = time.monotonic()
        try:
            with set_current_vllm_config(self.vllm_config):
                found = record(self.load_weights, tensors, self.model)
                rounded = {source: (tensors[source][0], found._found[name].dtype)
                           for name, why in found.by_loader.items() if why.startswith("is computed: rounded to ")
                           for source in found._found[name].sources}
                if rounded:  # what is only rounded is asked for in the engine's dtype
                    found = record(self.load_weights, {**tensors, **rounded}, self.model)
        except NotRecorded as failure:
            return None, str(failure)
        if not found.in_place:
            return None, next(iter(found.by_loader.values()), "load_weights fills no tensor of the model")
        found._load = self._load_layers
        found.certificate = lambda: None if found.certified else _Reload(self, found.certify(self.load_weights))
        whole_modules(found)
        _log.info("dray: %d tensors recorded in %.1f s, %d of them left to load_weights", len(found._found),
                  time.monotonic() - begun, len(found.by_loader))
        return found, ""

    def load_weights(self, named):
        """The model's own, of a part of the checkpoint."""
        last = "nothing"

        def watched():
            nonlocal last
            for name, tensor in named:
                last = f"{name}, {tensor.dtype} {tuple(tensor.shape)}"
                yield name, tensor

        try:
            with disable_mtp_completeness_check():
                self.model.load_weights(watched())
        except NotRecorded:
            raise
        except Exception as failure:
            raise RuntimeError(f"vLLM's load_weights does not take what the trainer has, after {last}: "
                               f"{type(failure).__name__} {failure}") from failure

    def _load_layers(self, named):
        """Those that are left to load_weights, whole, once what is in place lies there."""
        with _Reload(self) as load:
            load(list(named))

    # ---- an update ---------------------------------------------------------------------------

    def start_weight_update(self) -> None:
        """Nothing: vLLM's reload begins with the first bytes, so that a trainer that is late or gone costs nothing."""

    def receive_weights(self, update_info: DrayUpdateInfo) -> None:
        if self._subscriber is None:
            raise RuntimeError('weight transfer backend "dray": init_weight_transfer_engine is to be called first')
        options = dict(min_version=update_info.version, timeout=self._timeout)
        first = self._recorded is not None and not self._recorded.certified
        if self._reload is not None:
            with self._reload:
                report = self._subscriber.update(**options)
        else:
            report = self._subscriber.update(**options)
        if first:
            whole_modules(self._recorded)
            self.left = self._recorded.by_loader
            for name, why in self.left.items():
                _log.info("dray: %s goes by load_weights: %s", name, why)
        if report["version"] != update_info.version:
            raise RuntimeError(f"version {update_info.version} expected, the trainer is at {report['version']} already")
        self.report = report
        _log.info("dray: version %d, %.1f MB in %.3f s (%s)", report["version"], report["bytes"] / 1e6,
                  report["total_seconds"], report["mode"])

    def finish_weight_update(self) -> None:
        """Nothing is left to do: an update is whole, or raised."""

    def shutdown(self) -> None:
        context, self._context = self._context, None
        self._subscriber = self._recorded = self._reload = None
        if context is not None:
            context.close()
