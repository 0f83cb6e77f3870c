"""Which rectangle of which tensor lies where in the parameters of an engine's rank: SGLang's and
vLLM's fused parameters, from the model's configuration."""
from __future__ import annotations

import bisect
import ctypes as c
from typing import Any, Iterable, Mapping, Union

from . import _library as _l
from ._library import DrayError, call, library

ENGINES = ("sglang", "vllm")


class _Config(c.Structure):
    _fields_ = [("family", c.c_char * 32)] + [
        (n, c.c_int64) for n in ("vocab_size", "hidden_size", "intermediate_size", "layers",
                                 "heads", "kv_heads", "head_dim", "max_positions")] + [
        ("rms_norm_eps", c.c_double), ("rope_theta", c.c_double)] + [
        (n, c.c_int32) for n in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tied", "dtype")] + [
        (n, c.c_int64) for n in ("experts", "moe_intermediate_size", "shared_experts",
                                 "first_k_dense", "sparse_step")] + [
        ("dense_layers", c.c_uint64 * 8)] + [
        (n, c.c_int64) for n in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
                                 "qk_rope_head_dim", "v_head_dim", "mtp_layers")]


class _Spec(_l.Sized):
    _fields_ = [("size", c.c_size_t), ("tp", c.c_uint32), ("tp_rank", c.c_uint32),
                ("dtype", c.c_int32), ("vocab_multiple", c.c_int64), ("kind", c.c_int32),
                ("pp_layers", c.c_void_p), ("experts", c.c_void_p), ("quant", c.c_void_p),
                ("pp", c.c_uint32), ("pp_rank", c.c_uint32), ("ep", c.c_uint32), ("dp", c.c_uint32),
                ("engine", c.c_int32), ("draft", c.c_int32), ("dense_tp", c.c_uint32),
                ("shared_tp", c.c_uint32), ("embed_tp", c.c_uint32), ("head_tp", c.c_uint32),
                ("fuse_shared", c.c_int32), ("redundant", c.c_uint32), ("transposed", c.c_uint32)]


class _Tensor(c.Structure):
    _fields_ = [("name", c.c_char_p), ("dtype", c.c_int32), ("ndim", c.c_uint32),
                ("shape", c.c_int64 * _l.MAX_DIMS), ("alias_of", c.c_int32)]


def load_config(config: str) -> _Config:
    """Of a config.json, a folder with one, or a name that `dray plan --model` knows."""
    loaded = _Config()
    call("dray_model_config_load", str(config).encode(), c.byref(loaded))
    return loaded


def _tensor(layout, index):
    return c.cast(library().dray_layout_tensor(layout, index), c.POINTER(_Tensor)).contents


def tensors(config: str) -> dict:
    """{name: (shape, dtype)} of the model's checkpoint. config: a config.json, a folder with one, or
    a name that `dray plan --model` knows."""
    from . import gpu
    layout, loaded = c.c_void_p(), load_config(config)
    call("dray_layout_full", c.byref(loaded), 0, 0, c.byref(layout))
    try:
        found = (_tensor(layout, i) for i in range(library().dray_layout_tensor_count(layout)))
        return {t.name.decode(): (tuple(t.shape[:t.ndim]), gpu.torch_dtype(t.dtype))
                for t in found if t.alias_of < 0}
    finally:
        library().dray_layout_free(layout)


def engine_blocks(config: str, parameters: Union[Mapping[str, Any], Iterable], *, tp: int = 1,
                  tp_rank: int = 0, engine: str = "sglang", **spec: int) -> list:
    """The blocks of an engine's rank, for Subscriber: no gathering, no load_weights.

    config: a config.json, a folder with one, or a name that `dray plan --model` knows. parameters:
    the engine's own (name, tensor) pairs, as model.named_parameters() of SGLang or vLLM gives them
    (qkv_proj, gate_up_proj, w13_weight, ...); what the model has no tensor for is left out. spec:
    ep, dp, pp, pp_rank, dense_tp, vocab_multiple, ... as dray_engine_spec has them. Parameters that
    are quantised are not among it. Raises DrayError, or ValueError for a parameter of another shape
    or when a tensor's place is missing."""
    from .weights import Block
    _l.check_word("engine", engine, ENGINES)
    pairs = dict(parameters.items() if hasattr(parameters, "items") else parameters)
    for key in spec:
        if key not in dict(_Spec._fields_) or key in ("size", "pp_layers", "experts", "quant"):
            raise TypeError(f"unknown keyword {key!r}")
    loaded = load_config(config)
    kinds = [str(t.dtype) for t in pairs.values()]
    dtype = max(sorted(set(kinds)), key=kinds.count, default=None)
    spec.setdefault("dtype", library().dray_dtype_parse(dtype.encode()) if dtype else 0)
    options = _Spec(tp=tp, tp_rank=tp_rank, engine=ENGINES.index(engine), **spec)
    places = {}  # offset: (name, tensor)
    for name, tensor in pairs.items():
        offset, ndim = c.c_uint64(), c.c_uint32()
        shape = (c.c_int64 * _l.MAX_DIMS)()
        try:
            call("dray_engine_parameter", c.byref(loaded), c.byref(options), name.encode(),
                 c.byref(offset), c.byref(ndim), shape)
        except DrayError as error:
            if error.name == "ENOENT":
                continue
            raise
        if list(tensor.shape) != list(shape[:ndim.value]):
            raise ValueError(f"{name}: the engine has {list(tensor.shape)}, {engine} with tp={tp} "
                             f"would have {list(shape[:ndim.value])}")
        places.setdefault(offset.value, (name, tensor))
    if not places:
        raise ValueError(f"none of {len(pairs)} parameters is one that {engine} has of {config}")
    layout, blocks, missing = c.c_void_p(), [], []
    call("dray_layout_engine", c.byref(loaded), c.byref(options), c.byref(layout))
    try:
        starts = sorted(places)
        for i in range(library().dray_layout_block_count(layout)):
            block = c.cast(library().dray_layout_block(layout, i), c.POINTER(_l.Block)).contents
            whole = _tensor(layout, block.tensor)
            at = bisect.bisect_right(starts, block.offset) - 1
            tensor = places[starts[at]][1].detach() if at >= 0 else None
            size = tensor.element_size() if at >= 0 else 1
            offset = block.offset - starts[at] if at >= 0 else 0
            if at < 0 or offset >= tensor.numel() * size:
                missing.append(whole.name.decode())
                continue
            if library().dray_dtype_parse(str(tensor.dtype).encode()) != whole.dtype:
                raise ValueError(f"{places[starts[at]][0]} is {tensor.dtype}, the layout has another dtype")
            if not tensor.is_contiguous():
                raise ValueError(f"{places[starts[at]][0]} is not contiguous")
            strides = [s // size for s in block.stride[:whole.ndim]]
            view = tensor.as_strided(list(block.extent[:whole.ndim]), strides,
                                     tensor.storage_offset() + offset // size)
            blocks.append(Block(whole.name.decode(), tuple(whole.shape[:whole.ndim]), view,
                                tuple(block.start[:whole.ndim])))
    finally:
        library().dray_layout_free(layout)
    if missing:
        raise ValueError(f"no parameter of the engine has {missing[0]} ({len(missing)} tensors are "
                         "without a place)")
    return blocks
