"""A run's checkpoints: `folder/step-000007` for each version, written by all ranks of a trainer together, each its
part of the tensors, and there when all of it is on the disk.

    dray.checkpoint.save("checkpoints", 7, model, parts={"optimizer": state}, context=context, rank=rank, world=2)
    version, path = dray.checkpoint.latest("checkpoints")
    dray.checkpoint.load(path, model)                       # each rank reads what it has of it"""
from __future__ import annotations

import contextlib
import ctypes as c
import json
import os
import pathlib
from typing import Any, Iterable, Mapping, Optional, Union

from . import _library as _l
from . import gpu as _g
from . import parameters as _p
from ._library import DrayError, call, library, text
from .engine import tensor_infos
from .weights import Context, Layout

__all__ = ["latest", "load", "load_optimizer", "optimizer_tensors", "read_file", "save"]


def _on_gpu(tensor):
    return getattr(tensor, "is_cuda", False)


class _OnHost:
    """This rank's part of a DTensor of a GPU, as a copy in host memory."""

    def __init__(self, local, parameter):
        self._local, self.shape = local, parameter.shape
        self.device_mesh, self.placements = parameter.device_mesh, parameter.placements

    def detach(self):
        return self

    def to_local(self):
        return self._local


def _with(tensor, memory):
    """Returns the same part of a tensor, in other memory."""
    if isinstance(tensor, _p.Block):
        return _p.Block(tensor.name, tensor.shape, memory, tensor.start)
    if isinstance(tensor, _p.Part):
        return tensor.within(memory)
    return _OnHost(memory, tensor) if hasattr(tensor, "placements") else memory


def _layout(tensors, written=False):
    """The layout, and (tensor of a GPU, its copy in host memory, which is in the layout) for each that is there.
    written: the tensors are to be written to."""
    layout, copies, given = Layout(), [], _p.given(tensors, False)
    pairs = given.pairs()
    if given.computes:
        if written:
            raise TypeError(f"load: tensors expected, found {type(given).__name__}, whose values are computed from "
                            "others")
        wait = given.waits and given.waits()
        if wait:
            wait()
        given.refresh()
    seen = set()
    for name, tensor in pairs:
        if not written and name in seen and not isinstance(tensor, (_p.Block, _p.Part)):  # either would be saved
            raise ValueError(f"{name}: came twice")
        seen.add(name)
        local = _p.local(tensor)[0]
        if written:
            _p.check_written(name, local)
        if _on_gpu(local):
            copy = local.to("cpu", copy=True)
            copies.append((local, copy))
            tensor = _with(tensor, copy)
        if isinstance(tensor, _p.Block):
            layout.add_block(tensor)
        else:
            layout.add_parameter(name, tensor)
    return layout, copies


def _bytes(name, data):
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise TypeError(f"files: bytes expected for {name}, found {type(data).__name__}")
    return bytes(data)


def _check_config(config):
    """Elsewhere in this package `config` is a path: here it is what the file has in it."""
    try:
        found = json.loads(config) if config else {}
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"config: the text of a config.json, a JSON object, expected, found {str(config)[:80]!r}")


def save(folder: Union[str, os.PathLike], version: int, tensors: Any, *, context: Optional[Context] = None,
         rank: int = 0, world: int = 1, parts: Optional[Mapping[str, Any]] = None,
         files: Optional[Mapping[str, bytes]] = None, config: Optional[str] = None, keep: int = 0,
         stay: Iterable[int] = (), deltas: int = 0, timeout: Optional[float] = None) -> None:
    """Writes a version of the tensors as `folder/step-NNNNNN`. All ranks of the trainer call it together; each rank
    writes its part. A reader finds the version when all of it is on the disk, and never a part of it.

    folder: in a file system that all ranks share, or "s3://bucket/prefix".
    tensors: a module, (name, tensor) pairs or a mapping of names to tensors; a tensor is whole, a DTensor or a Block.
    Tensors of a GPU are copied into host memory first.
    context, rank, world: the session by which the ranks meet, this rank, and the number of ranks. One rank alone needs
    no session.
    parts: {name: tensors} for more tensors beside the model's, each part in a folder of its own.
    files: {name: bytes}, which rank 0 writes. config: the text of the config.json that rank 0 writes.
    keep: how many of the newest versions stay (0: all); the versions in `stay` stay, too.
    deltas: how many versions in a row are kept as what changed since the version before."""
    parts, files = dict(parts or {}), {n: _bytes(n, d) for n, d in (files or {}).items()}
    stay = [_l.number("stay", each) for each in stay]
    _check_config(config)
    layouts = [_layout(each)[0] for each in (tensors, *parts.values())]
    lives = [layout.live() for layout in layouts]
    kept = (c.c_uint64 * max(1, len(stay)))(*stay)
    try:
        options = _l.CheckpointOptions(
            version=_l.number("version", version), keep=keep, deltas=deltas, rank=rank, world=world, config_json=text(config),
            timeout_ns=0 if timeout is None else _l.nanoseconds(timeout), part_count=len(parts),
            parts=(_l.CheckpointPart * max(1, len(parts)))(*(
                _l.CheckpointPart(text(name), layout.pointer, live)
                for name, layout, live in zip(parts, layouts[1:], lives[1:]))),
            files=(_l.CheckpointFile * max(1, len(files)))(*(
                _l.CheckpointFile(text(n), c.cast(d, c.c_void_p), len(d)) for n, d in files.items())),
            file_count=len(files), stay=c.addressof(kept), stay_count=len(stay))
        with context._use.beside() if context else contextlib.nullcontext():
            call("dray_checkpoint_save", context and context.pointer, os.fspath(folder).encode(),
                 layouts[0].pointer, lives[0], c.byref(options))
    finally:
        for layout in layouts:
            layout.close()


def load(path: Union[str, os.PathLike], tensors: Any) -> None:
    """Reads a checkpoint, or the folder of one of its parts, into the tensors of this rank, which may be whole,
    DTensors or Blocks: each rank reads its part. tensors: as save() takes them."""
    layout, copies = _layout(tensors, written=True)
    try:
        call("dray_checkpoint_read", os.fspath(path).encode(), layout.pointer, layout.live())
        for local, copy in copies:
            local.copy_(copy)
    finally:
        layout.close()


def latest(folder: Union[str, os.PathLike]) -> tuple:
    """The newest version in the folder: (version, path). The path is a str where the folder is in a bucket, else a
    pathlib.Path. Raises DrayError (ENOENT) when there is no version."""
    version, path = c.c_uint64(), c.c_void_p()
    call("dray_checkpoint_latest", os.fspath(folder).encode(), c.byref(version), c.byref(path))
    found = _l.take(path).decode()
    return version.value, found if found.startswith("s3://") else pathlib.Path(found)


def read_file(path: Union[str, os.PathLike], name: str) -> bytes:
    """The bytes of one of the `files` that save() wrote, also of a checkpoint in a bucket."""
    data, size = c.c_void_p(), c.c_size_t()
    call("dray_checkpoint_get", os.fspath(path).encode(), name.encode(), c.byref(data), c.byref(size))
    return _l.take(data, size.value)


# ---- optimisers ----------------------------------------------------------------------------------

def optimizer_tensors(model: Any, optimizer: Any) -> tuple:
    """({name: tensor}, JSON) of what torch's optimizer keeps of the model's parameters: tensors of their
    shapes, as "weight.exp_avg", and numbers. The learning rate and its like are the program's. DrayError
    (EUNSUPPORTED): it keeps something else, which could not be restored."""
    tensors, numbers = {}, {}
    for name, parameter in _p.clean(model.named_parameters()):
        for key, value in optimizer.state.get(parameter, {}).items():
            if hasattr(value, "shape") and tuple(value.shape) == tuple(parameter.shape):
                tensors[f"{name}.{key}"] = value
            elif isinstance(value, (int, float)) or hasattr(value, "numel") and value.numel() == 1:
                numbers.setdefault(name, {})[key] = float(value)
            elif value is not None:
                found = f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__
                raise DrayError(_l.EUNSUPPORTED, f"{name}.{key} of the optimizer: a number or a tensor of the parameter's "
                                f"shape {tuple(parameter.shape)} expected, found {found}")
    return tensors, json.dumps(numbers).encode()


def _dtypes(path):
    """{name: dtype} of a checkpoint's tensors."""
    layout = c.c_void_p()
    call("dray_checkpoint_layout", path.encode(), c.byref(layout), None)
    try:
        return {t.name.decode(): _g.torch_dtype(t.dtype) for t in tensor_infos(layout)}
    finally:
        library().dray_layout_free(layout)


def load_optimizer(path: Union[str, os.PathLike], model: Any, optimizer: Any, tensors: Optional[Iterable[str]] = None) -> None:
    """What optimizer_tensors gave, from a checkpoint with it as the part "optimizer" and the file
    "optimizer.json"; tensors: which of them, as ("exp_avg", "exp_avg_sq"); None: all. Parameters without any
    begin anew. DrayError (ENOENT), which changes nothing: of a parameter that the model has not."""
    import torch
    part, parameters, state = f"{os.fspath(path)}/optimizer", dict(_p.clean(model.named_parameters())), {}
    numbers = dict(_p.clean(json.loads(read_file(path, "optimizer.json")).items()))  # those of 0.1 have a wrapper's names
    saved = [(*name.rpartition(".")[::2], dtype) for name, dtype in _dtypes(part).items()]
    for name in [*numbers, *(name for name, _, _ in saved)]:
        if name not in parameters:
            raise DrayError(_l.ENOENT, f"{part}: state of {name}, which is no parameter of the model")
    for name, key, dtype in saved:
        if tensors is None or key in tensors:
            state.setdefault(name, {})[key] = torch.zeros_like(parameters[name], dtype=dtype)
    if state:
        load(part, {f"{name}.{key}": value for name, of in state.items() for key, value in of.items()})
    for name, of in numbers.items():
        state.setdefault(name, {}).update((key, torch.tensor(value)) for key, value in of.items())
    optimizer.state.update((parameters[name], of) for name, of in state.items())
