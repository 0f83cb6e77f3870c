"""Megatron-Core's models as they lie in a rank's memory: nothing is gathered, nothing is converted.

    publisher = dray.Publisher(dray.weights.megatron(model, "path/of/the/hugging-face/model"))
"""
from __future__ import annotations

import ctypes as c
import sys
from typing import Any, Optional, Sequence, Union

from . import _library as _l
from . import gpu as _g
from ._library import DrayError, call, library
from .engine import load_config
from .parameters import Given, Part, clean

EXPERTS = {word: number for number, word in enumerate(_l.words("MEGATRON_"))}
_SIZES = ("tp", "cp", "ep", "etp", "dp", "pp", "vpp")
_RANKS = ("tp_rank", "ep_rank", "etp_rank", "pp_rank")
_STATE = {  # of megatron.core.parallel_state; `more` is what the call takes
    "tp": ("get_tensor_model_parallel_world_size", {}), "tp_rank": ("get_tensor_model_parallel_rank", {}),
    "cp": ("get_context_parallel_world_size", {}),
    "ep": ("get_expert_model_parallel_world_size", {}), "ep_rank": ("get_expert_model_parallel_rank", {}),
    "etp": ("get_expert_tensor_parallel_world_size", {}), "etp_rank": ("get_expert_tensor_parallel_rank", {}),
    "dp": ("get_data_parallel_world_size", {"with_context_parallel": False}),
    "pp": ("get_pipeline_model_parallel_world_size", {}), "pp_rank": ("get_pipeline_model_parallel_rank", {}),
    "vpp": ("get_virtual_pipeline_model_parallel_world_size", {})}
_OF_CONFIG = {  # TransformerConfig's word: the spec's
    "num_layers_in_first_pipeline_stage": "first_stage_layers",
    "num_layers_in_last_pipeline_stage": "last_stage_layers",
    "account_for_embedding_in_pipeline_split": "embedding_in_split",
    "account_for_loss_in_pipeline_split": "loss_in_split"}


class MegatronPart(Part):
    """A parameter of a chunk of the model: what this rank has of one or several tensors of the checkpoint."""

    def __init__(self, model: MegatronModel, stage: int, name: str, parameter: Any):
        self.model, self.stage, self.name, self.parameter = model, stage, name, parameter
        self.shape = tuple(parameter.shape)

    @property
    def tensor(self):
        return self.parameter.detach()

    def within(self, memory: Any) -> "MegatronPart":
        return MegatronPart(self.model, self.stage, self.name, memory)

    def add_to(self, layout: Any, name: str) -> None:
        local = self.tensor
        if not local.is_contiguous():
            raise DrayError(_l.EINVALID, f"{name}: a parameter that is dense in memory expected, found "
                            f"strides {tuple(local.stride())}")
        region, offset = layout.region_of(local, name)
        shape = (c.c_int64 * max(1, local.dim()))(*local.shape)
        call("dray_layout_add_megatron", layout.pointer, c.byref(self.model.config), c.byref(self.model.spec), self.stage,
             self.name.encode(), _g.dtype_code(local.dtype), local.dim(), shape, region, offset)


class MegatronModel(Given):
    """The chunks of a rank, for Publisher; parameters are looked up anew before each publish."""

    def __init__(self, chunks: Sequence[Any], config: str, spec: _l.MegatronSpec):
        self.chunks, self.config, self.spec = list(chunks), load_config(config), spec

    def pairs(self) -> list:
        found = []
        for stage, chunk in enumerate(self.chunks):
            biases = ((name, b) for name, b in chunk.named_buffers() if name.endswith(".expert_bias"))
            for name, parameter in clean([*chunk.named_parameters(), *biases]):
                part = MegatronPart(self, stage, name, parameter)
                found.append((f"chunk {stage} {name}" if len(self.chunks) > 1 else name, part))
        return found


def _experts(chunks):
    """How the experts of the model lie, by the names of its parameters."""
    names = [name for chunk in chunks for name, _ in chunk.named_parameters() if ".experts." in name]
    if any(".local_experts." in name for name in names):
        return "sequential"
    return "packed" if any(name.endswith(".experts.weight1") for name in names) else "grouped"


def _state():
    """Sizes and ranks of megatron.core.parallel_state, where the program has initialised it."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return {}
    found = {word: getattr(state, name)(**more) for word, (name, more) in _STATE.items() if hasattr(state, name)}
    return {word: number for word, number in found.items() if number is not None}


def megatron(model: Union[Any, Sequence[Any]], config: str, *, rank: Optional[int] = None,
             experts: Optional[str] = None, vocab_multiple: int = 128, **sizes: int) -> MegatronModel:
    """What a rank of Megatron-Core holds, for Publisher: a GPTModel, or the list of its chunks (virtual pipeline
    stages), also within DDP and Float16Module. Engines find the checkpoint's tensors of it, as config says them (a
    config.json, a folder with one, or a name that `dray plan --model` knows).

    sizes: tp, cp, ep, etp, dp, pp, vpp, and tp_rank, ep_rank, etp_rank, pp_rank, or rank, the global one, in Megatron's
    default order. Without any, what megatron.core.parallel_state says, else one rank. How layers are spread over
    stages (first_stage_layers, last_stage_layers, embedding_in_split, loss_in_split) is the model's own config's.
    experts: "grouped", "packed" or "sequential"; None: by the names of the parameters. vocab_multiple:
    make_vocab_size_divisible_by. DrayError: a parameter that the model of `config` has not, or of another shape."""
    chunks = model if isinstance(model, (list, tuple)) else [model]
    experts = experts or _experts(chunks)
    _l.check_word("experts", experts, EXPERTS)
    known = (*_SIZES, *_RANKS, *_OF_CONFIG.values())
    for word in sizes:
        if word not in known:
            raise TypeError(f"megatron: one of {', '.join(known)} expected, found {word!r}")
    own = getattr(chunks[0], "config", None)
    spread = {word: int(getattr(own, name, None) or 0) for name, word in _OF_CONFIG.items()}
    spec = _l.MegatronSpec(experts=EXPERTS[experts], vocab_multiple=vocab_multiple,
                           **{**spread, **(sizes or (_state() if rank is None else {}))})
    if rank is not None:
        call("dray_megatron_place", c.byref(spec), rank, None)
    return MegatronModel(chunks, config, spec)


def megatron_parameters(config: str, *, rank: int = 0, experts: str = "grouped", vocab_multiple: int = 128,
                        **sizes: int) -> dict:
    """{name: (shape, dtype, chunk)} of all parameters of a rank, without a model; sizes: as megatron's."""
    _l.check_word("experts", experts, EXPERTS)
    spec, out, count = _l.MegatronSpec(experts=EXPERTS[experts], vocab_multiple=vocab_multiple, **sizes), \
        c.c_void_p(), c.c_uint32()
    call("dray_megatron_place", c.byref(spec), rank, None)
    call("dray_megatron_parameters", c.byref(load_config(config)), c.byref(spec), c.byref(out), c.byref(count))
    try:
        found = (_l.MegatronParameter * count.value).from_address(out.value)
        return {p.name.decode(): (tuple(p.shape[:p.ndim]), _g.torch_dtype(p.dtype), p.vp_stage) for p in found}
    finally:
        library().dray_free(out)
