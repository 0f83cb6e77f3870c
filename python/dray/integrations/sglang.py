"""SGLang's weight updates by dray: a custom weight loader, which SGLang's processes find by the entry point
`sglang.srt.plugins`, and a receiver for the versions that have those. docs/sglang.md shows how it is used."""
from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging

from .upstream import Upstream

LOADER = f"{__name__}.load"      # the load_format of an update that is dray's
RECEIVER = f"{__name__}.receiver"  # what --weight-update-receivers names
_MARK = "dray "                  # of the tensors' names that are messages of the trainer's
_log = logging.getLogger("sglang.dray")
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater"
UPSTREAM = Upstream(
    "SGLang", "sglang", "0.5.23",
    methods={
        (_UPDATER, "WeightUpdater.update_weights_from_tensor"): ["self", "named_tensors", "load_format"],
        (_UPDATER, "WeightUpdater.begin_weight_update"): ["self"],
        (_UPDATER, "WeightUpdater.end_weight_update"): ["self", "run_post_load"],
        (_MANAGER, "SchedulerWeightUpdaterManager.begin_weight_update"): ["self", "recv_req"],
        (_MANAGER, "SchedulerWeightUpdaterManager.end_weight_update"): ["self", "recv_req"],
        ("sglang.srt.runtime_context", "get_parallel"): [],
    })
OLDER = Upstream("SGLang", "sglang", "0.5.15.post1", methods={  # as --custom-weight-loader alone
    ("sglang.srt.distributed", "get_tensor_model_parallel_world_size"): [],
    ("sglang.srt.distributed", "get_tensor_model_parallel_rank"): [],
    ("sglang.srt.distributed", "get_pp_group"): []})
_ranks = {}  # {id of a model: (the model, its Rank or None)}, in the order in which they came


def message(**what):
    """The named_tensors of an update: what is told lies in a name, as a tensor without elements needs no memory that
    both sides see."""
    import torch
    return [(_MARK + json.dumps(what), torch.empty(0))]


def packed(named_tensors) -> str:
    """As SGLang's server takes them, for one rank."""
    import base64
    import io
    from multiprocessing.reduction import ForkingPickler
    room = io.BytesIO()
    ForkingPickler(room).dump(named_tensors)
    return base64.b64encode(room.getvalue()).decode()


# ---- in SGLang's processes -----------------------------------------------------------------------

def register() -> None:
    """The entry point: has WeightUpdater know load_format=LOADER. Where SGLang has none, it says so and changes nothing:
    SGLang starts as it does without dray."""
    if not _has_updater():
        _log.info("dray: this SGLang is to be started with --custom-weight-loader %s", LOADER)
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        HookRegistry.register(f"{_UPDATER}.WeightUpdater.update_weights_from_tensor", _around, HookType.AROUND)
    except (ImportError, AttributeError, TypeError) as error:
        _log.warning("dray: no weight updates here, this SGLang is not as %s, which was tried: %s", UPSTREAM.tried,
                     error)


def _around(original, updater, named_tensors, load_format=None, **more):
    """WeightUpdater.update_weights_from_tensor: with our load_format --custom-weight-loader need not name it, and what
    it raises is an answer, where SGLang's scheduler would end."""
    if load_format == LOADER:
        known = updater.custom_weight_loaders or ()
        if LOADER not in known:
            updater = dataclasses.replace(updater, custom_weight_loaders=[*known, LOADER])
        try:
            done = original(updater, named_tensors, load_format=load_format, **more)
            return (True, _said(updater, named_tensors)) if done[0] else done
        except Exception as failure:
            _log.exception("dray: an update failed")
            return False, f"{type(failure).__name__}: {failure}"
    return original(updater, named_tensors, load_format=load_format, **more)


def _said(updater, named_tensors) -> str:
    """What an update's answer says: the report, as JSON, of one that took a version."""
    rank = _ranks.get(id(updater.get_model()), (None, None))[1]
    took = any("version" in json.loads(name[len(_MARK):]) for name, _ in named_tensors)
    return json.dumps(rank.report) if took and rank else "Success"


def load(model, named_tensors) -> None:
    """The custom weight loader: named_tensors are a message()'s, of a handshake, of a version, or of both."""
    for name, _ in named_tensors:
        if not name.startswith(_MARK):
            raise ValueError(f"load_format {LOADER}: what dray's trainer sends expected, found the tensor {name} (tensors "
                             "go by another load_format)")
        told = json.loads(name[len(_MARK):])
        if "handshake" in told:
            _handshake(model, told["handshake"])
        if "version" in told:
            rank = _ranks.get(id(model), (None, None))[1]
            if rank is None:
                raise RuntimeError("dray: this engine has had no handshake: the trainer's init_engine() is to be called "
                                   "first, and again for an engine that has started anew")
            rank.update(told["version"], told.get("newer", False))


def _handshake(model, told) -> None:
    """Each model of this process is a group of its own: the target is the first, drafts come after it."""
    _, rank = _ranks.setdefault(id(model), (model, None))
    if rank is not None:
        _ranks[id(model)] = model, None
        rank.close()
    number = list(_ranks).index(id(model))
    _ranks[id(model)] = model, _rank(model, told, f"-{number}" if number else "")


def _has_updater() -> bool:
    """Whether this SGLang's updates are sessions, which begin and end."""
    try:
        return importlib.util.find_spec(_UPDATER) is not None
    except ModuleNotFoundError:
        return False


def _place():
    """(rank, how many) of this process in its engine."""
    if not _has_updater():
        OLDER.check()
        from sglang.srt import distributed
        tp, pp = distributed.get_tensor_model_parallel_world_size(), distributed.get_pp_group()
        return pp.rank_in_group * tp + distributed.get_tensor_model_parallel_rank(), pp.world_size * tp
    UPSTREAM.check()
    from sglang.srt.runtime_context import get_parallel
    parallel = get_parallel()
    return parallel.pp_rank * parallel.tp_size + parallel.tp_rank, parallel.pp_size * parallel.tp_size


def _rank(model, told, suffix=""):
    from .rank import Handshake, Rank
    told, (rank, world) = Handshake(**told), _place()
    if not told.group:
        raise ValueError("dray's handshake: group expected, the engine's name, found none")
    return Rank(told, model, model.load_weights, framework="SGLang", log=_log, group=told.group + suffix, rank=rank,
                world=world)


class receiver:
    """What --weight-update-receivers names in the versions that have it: a factory that is given a
    WeightUpdateReceiverContext, whose init_payload is the trainer's handshake; payloads have a version."""

    def __init__(self, context):
        told = dict(context.init_payload or {})
        told["group"] = told.get("group") or f"sglang-{context.group_name}"
        self._rank = _rank(context.model, told)

    def receive(self, payload) -> None:
        if not isinstance((payload or {}).get("version"), int):
            raise ValueError(f'{RECEIVER}: a payload {{"version": number}} expected, found {payload}')
        self._rank.update(payload["version"])

    def destroy(self) -> None:
        self._rank.close()


def __getattr__(name):
    """What trainers import."""
    if name in ("DrayTrainer", "Server"):
        from . import sglang_trainer
        return getattr(sglang_trainer, name)
    raise AttributeError(f"module {__name__} has no {name}")
