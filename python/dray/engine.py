"""Which rectangle of which tensor is where in the parameters of an engine's rank: SGLang's and
vLLM's fused parameters, from the model's configuration."""
from __future__ import annotations

import bisect
import ctypes as c
import os
from typing import Any, Iterable, Mapping, Optional, Union

from . import _library as _l
from ._library import DrayError, call, library
from .parameters import Block, Given, given, is_parameter, local

ENGINES = ("sglang", "vllm")
W13_ORDERS = ("gate-up", "up-gate")
_HOST_BYTES = 1 << 30  # of copies of GPU memory that are compared together


def load_config(config: str) -> _l.ModelConfig:
    """Of a config.json, a folder with one, or a name that `dray plan --model` knows."""
    loaded = _l.ModelConfig()
    call("dray_model_config_load", str(config).encode(), c.byref(loaded))
    return loaded


def tensor_info(layout, index):
    return c.cast(library().dray_layout_tensor(layout, index), c.POINTER(_l.TensorInfo)).contents


def tensor_infos(layout):
    return (tensor_info(layout, i) for i in range(library().dray_layout_tensor_count(layout)))


def tensors(config: str) -> dict:
    """{name: (shape, dtype)} of the model's checkpoint. config: a config.json, a folder with one, or
    a name that `dray plan --model` knows."""
    from . import gpu
    layout, loaded = c.c_void_p(), load_config(config)
    call("dray_layout_full", c.byref(loaded), 0, 0, c.byref(layout))
    try:
        return {t.name.decode(): (tuple(t.shape[:t.ndim]), gpu.torch_dtype(t.dtype))
                for t in tensor_infos(layout) if t.alias_of < 0}
    finally:
        library().dray_layout_free(layout)


# ---- what is there -------------------------------------------------------------------------------

def _on_host(blocks):
    """Lists of them, in host memory; of those on GPUs no more than _HOST_BYTES at once."""
    some, size = [], 0
    for block in blocks:
        tensor = local(block)[0]
        copied = tensor.numel() * tensor.element_size() if tensor.is_cuda else 0
        if some and size + copied > _HOST_BYTES:
            yield some
            some, size = [], 0
        some.append(Block(block.name, block.shape, tensor.cpu(), block.start))
        size += copied
    yield some


def _differing(blocks, checkpoint):
    """{name: elements} of Blocks that do not have the checkpoint's bits."""
    from .weights import Layout
    found = {}
    for some in _on_host(blocks):
        layout = Layout()

        def differs(_, index, elements):
            block = c.cast(library().dray_layout_block(layout.pointer, index), c.POINTER(_l.Block))
            name = tensor_info(layout.pointer, block.contents.tensor).name.decode()
            found[name] = found.get(name, 0) + elements

        for block in some:
            layout.add_block(block)
        try:
            call("dray_layout_prove", layout.pointer, layout.live(), os.fspath(checkpoint).encode(),
                 c.cast(_l.ProveFn(differs), c.c_void_p), None)
        except DrayError as error:
            if error.code != _l.ECHECKSUM:
                raise
        finally:
            layout.close()
    return found


def _refuse(differing, checkpoint, orders=""):
    name, elements = next(iter(differing.items()))
    raise DrayError(_l.ECHECKSUM, f"{name}: {elements} elements are not what {os.fspath(checkpoint)} has there"
                    f"{orders}, and so it is with {len(differing) - 1} other tensors: memory in a kernel's own "
                    "layout, or of another checkpoint. Give Subscriber load=, the engine's load_weights, "
                    "instead of Blocks")


def prove(blocks: Iterable, checkpoint: Union[str, os.PathLike]) -> None:
    """Whether Blocks say rightly where tensors are. Compares their memory, which the engine loaded from the
    checkpoint (a file or folder of safetensors) by its own means, bit for bit. Raises DrayError
    (ECHECKSUM) with the name of a tensor that differs. Reads all of both."""
    differing = _differing(blocks, checkpoint)
    if differing:
        _refuse(differing, checkpoint)


def _checkpoint_of(config, checkpoint):
    if checkpoint is not None:
        return checkpoint
    folder = config if os.path.isdir(config) else os.path.dirname(os.path.abspath(config))
    if os.path.exists(config) and any(n.endswith(".safetensors") for n in os.listdir(folder)):
        return folder
    raise ValueError(f"checkpoint: there are no safetensors beside {config}. Which folder did the engine "
                     "load? What lies where in fused parameters is compared with it. checkpoint=False: it "
                     "loaded none, and you vouch for the order of gate and up (w13_order). Otherwise give "
                     "Subscriber load=, the engine's load_weights, instead of Blocks")


def _proven_order(blocks, make, checkpoint, order):
    """Which of the orders of w13 the memory is in. blocks: in this one, or the first."""
    differing = _differing(blocks, checkpoint)
    moved = [] if order else [(a, b) for a, b in zip(blocks, make(W13_ORDERS[1]))
                              if a.tensor.data_ptr() != b.tensor.data_ptr()]
    if not differing:
        if moved and all(a.tensor.equal(b.tensor) for a, b in moved):
            raise ValueError(f"w13_order: gate and up of all experts are the same in {checkpoint}, which "
                             f"says nothing of their order: {' or '.join(W13_ORDERS)} expected")
        return order or W13_ORDERS[0]
    if moved and differing.keys() <= {a.name for a, _ in moved} and \
            not _differing([b for _, b in moved], checkpoint):
        return W13_ORDERS[1]
    return _refuse(differing, checkpoint, " (in either order of gate and up)" if moved else "")


# ---- what is where -----------------------------------------------------------------------------

class EngineBlocks(list, Given):
    """The Blocks, as long as the list is not changed; made anew where the engine has replaced its
    parameters."""

    def __init__(self, make, parameters):
        self._make, self._parameters, self._at = make, parameters, None
        self.pairs()

    def edited(self):
        return len(self) != len(self._made) or any(a is not b for a, b in zip(self, self._made))

    def places(self):
        return self._parameters.places()

    def pairs(self):
        at = self.places()
        if at != self._at:
            self._made = self._make()
            self[:], self._at = self._made, at
        return [(block.name, block) for block in self]


def engine_blocks(config: str, parameters: Union[Mapping[str, Any], Iterable], *, tp: int = 1,
                  tp_rank: int = 0, engine: str = "sglang",
                  checkpoint: Union[None, bool, str, os.PathLike] = None,
                  w13_order: Optional[str] = None, **spec: int) -> list:
    """The blocks of an engine's rank, for Subscriber: no gathering, no load_weights.

    config: a config.json, a folder with one, or a name that `dray plan --model` knows. parameters: the
    engine's module (SGLang's, vLLM's), or its (name, tensor) pairs (qkv_proj, gate_up_proj,
    w13_weight, ...); what the model has no tensor for is left out.
    checkpoint: the safetensors that the engine has loaded, by default those beside config. All its
    memory is compared with them, once: kernels' own layouts have the same names and shapes, and
    experts are as [gate; up] or as [up; gate] (w13_order, "gate-up" or "up-gate": found out where it is
    not said). False: the engine loaded none (dummy weights), and the caller vouches for it.
    spec: ep, dp, pp, pp_rank, dense_tp, vocab_multiple, ... as dray_engine_spec has them. Parameters
    that are quantised are not among it.
    Raises DrayError (ECHECKSUM: the memory is another; what then is left is Subscriber's load=), or
    ValueError for a parameter of another shape, when a tensor's place is missing, or when there is
    nothing to compare with."""
    _l.check_word("engine", engine, ENGINES)
    if w13_order is not None:
        _l.check_word("w13_order", w13_order, W13_ORDERS)
    for key in spec:
        if key not in dict(_l.EngineSpec._fields_) or key in ("size", "pp_layers", "experts", "quant"):
            raise TypeError(f"unknown keyword {key!r}")
    loaded, now = load_config(config), given(parameters)

    def make(order):
        return _make(config, loaded, dict(now.pairs()), order, tp=tp, tp_rank=tp_rank, engine=engine, **spec)

    blocks = make(w13_order or W13_ORDERS[0])
    checkpoint = _checkpoint_of(config, checkpoint)
    if checkpoint is not False:
        w13_order = _proven_order(blocks, make, checkpoint, w13_order)
    elif loaded.experts and w13_order is None:
        raise ValueError(f"w13_order: {' or '.join(W13_ORDERS)} expected, as experts lie in this engine's "
                         "kernel: without a checkpoint nothing tells")
    return EngineBlocks(lambda: make(w13_order or W13_ORDERS[0]), now)


def _make(config, loaded, pairs, order, *, tp, tp_rank, engine, **spec):
    kinds = [str(t.dtype) for t in pairs.values()]
    dtype = max(sorted(set(kinds)), key=kinds.count, default=None)
    spec.setdefault("dtype", library().dray_dtype_parse(dtype.encode()) if dtype else 0)
    options = _l.EngineSpec(tp=tp, tp_rank=tp_rank, engine=ENGINES.index(engine),
                    w13_order=W13_ORDERS.index(order), **spec)
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
            whole = tensor_info(layout, block.tensor)
            at = bisect.bisect_right(starts, block.offset) - 1
            name, parameter = places[starts[at]]
            tensor, offset = parameter.detach(), block.offset - starts[at]
            size = tensor.element_size()
            if at < 0 or offset >= tensor.numel() * size:
                missing.append(whole.name.decode())
                continue
            if library().dray_dtype_parse(str(tensor.dtype).encode()) != whole.dtype:
                raise ValueError(f"{name} is {tensor.dtype}, the layout has another dtype")
            if not tensor.is_contiguous():
                raise ValueError(f"{name} is not contiguous")
            view = tensor.as_strided(list(block.extent[:whole.ndim]),
                                     [s // size for s in block.stride[:whole.ndim]],
                                     tensor.storage_offset() + offset // size)
            blocks.append(Block(whole.name.decode(), tuple(whole.shape[:whole.ndim]), view,
                                tuple(block.start[:whole.ndim]),
                                of=parameter if is_parameter(parameter) else None))
    finally:
        library().dray_layout_free(layout)
    if missing:
        raise ValueError(f"no parameter of the engine has {missing[0]} ({len(missing)} tensors are "
                         "without a place)")
    return blocks
