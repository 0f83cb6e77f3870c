"""Layouts: the blocks of a member over the memory of its tensors."""
from __future__ import annotations

import ctypes as c
import sys
from typing import Optional

from . import _library as _l
from . import gpu as _g
from . import host as _h
from . import parameters as _p
from ._library import DrayError, call, library
from .engine import load_config, tensor_info


def _mesh_of(mesh, placements):
    m = _l.Mesh(ndim=mesh.ndim)
    m.shape[:mesh.ndim] = list(mesh.shape)
    for i, p in enumerate(placements):
        kind = type(p).__name__
        if kind == "_StridedShard":
            m.placements[i] = _l.Placement(2, p.dim, p.split_factor)
        elif kind == "Shard":
            m.placements[i] = _l.Placement(1, p.dim, 1)
        else:
            m.placements[i] = _l.Placement(0 if kind == "Replicate" else 3, 0, 1)
    return m


class Layout:
    """A dray_layout, and the live regions of it. What is in a dray arena is in one region a chunk,
    anything else in one region a storage: so few handles, or such that stay right when it moves."""

    def __init__(self, config: Optional[str] = None):
        self.pointer = c.c_void_p()
        self.regions = []
        self.private = False  # some of it is in host memory that other processes cannot map
        self.cuda = False     # some of it is on a GPU
        self._index = {}
        self._config = load_config(config) if config is not None else None
        call("dray_layout_new", c.byref(self.pointer))

    def close(self):
        pointer, self.pointer = self.pointer, None
        if pointer:
            library().dray_layout_free(pointer)
        for region in self.regions:
            region.close()
        self.regions = []

    def __del__(self):
        if not sys.is_finalizing():
            self.close()

    def _extent(self, tensor):
        """Which memory makes the region of a tensor: address, size, UUID, and what keeps it."""
        storage = tensor.untyped_storage()
        at, size = storage.data_ptr(), storage.nbytes()
        if not tensor.is_cuda:
            shared = _h.find(at)
            return (at, size, None, storage) if shared is None else (*shared[:2], None, storage)
        s = _g.storage_of(at)
        if s["form"] == _g.FORM_VMM:
            at, size = s["base"], s["bytes"]
        return at, size, s["uuid"], storage

    def region_of(self, tensor, name):
        """The region that has the tensor, and where in it the tensor begins."""
        self._check_signs(tensor, name)
        at, size, uuid, keep = self._extent(tensor)
        return self._region(at, size, uuid, keep, name), tensor.data_ptr() - at

    @staticmethod
    def _check_signs(tensor, name):
        if tensor.is_neg():
            raise DrayError(_l.EUNSUPPORTED, f"{name}: a tensor whose elements are its memory's expected, found one with "
                            "PyTorch's negative bit (is_neg()), whose memory has them with the other sign")

    def _region(self, at, size, uuid, keep, name):
        if at not in self._index:
            shared = None if uuid else _h.find(at)
            region = _g.Region(shared[2], keep, owned=False) if shared else \
                _g.Region.over(at, size, name, uuid is not None, keep)
            kind = _g.CUDA if uuid else _g.SHARED if shared else _g.HOST
            self.private = self.private or kind == _g.HOST
            self.cuda = self.cuda or kind == _g.CUDA
            info = _l.RegionInfo(kind, size, name.encode())
            if uuid:
                info.device[:] = uuid
            index = c.c_uint32()
            call("dray_layout_add_region", self.pointer, c.byref(info), c.byref(index))
            self._index[at] = index.value
            self.regions.append(region)
        return self._index[at]

    def _spans(self, tensor):
        """Whether it is in several allocations, as in PyTorch's expandable segments."""
        if not tensor.is_cuda:
            return False
        s = _g.storage_of(tensor.data_ptr())
        last = tensor.data_ptr() + sum((n - 1) * t for n, t in zip(tensor.shape, tensor.stride())
                                       ) * tensor.element_size()
        return s["form"] == _g.FORM_VMM and last >= s["base"] + s["bytes"]

    def _add_pieces(self, index, local, shape, start, name):
        """Rows of the whole tensor that are dense here, allocation by allocation."""
        if not local.is_contiguous() or list(local.shape[1:]) != list(shape[1:]):
            raise DrayError(-26, f"{name} lies in several allocations (expandable segments), and is "
                            "not whole rows: allocate it in dray.gpu.use_arena()")
        self.add_range(index, local, (start[0] if start else 0) *
                        (local.numel() // max(1, local.shape[0])), name)

    def add_range(self, index, local, first, name):
        """Elements of the whole tensor from `first` on, dense here, allocation by allocation."""
        self._check_signs(local, name)
        element, at = local.element_size(), local.data_ptr()
        end = at + local.numel() * element
        if not self._spans(local):
            region, offset = self.region_of(local, name)
            call("dray_layout_add_range", self.pointer, index, region, offset, first, local.numel())
            return
        while at < end:
            s = _g.storage_of(at)
            count = (min(end, s["base"] + s["bytes"]) - at) // element
            region = self._region(s["base"], s["bytes"], s["uuid"], local.untyped_storage(), name)
            call("dray_layout_add_range", self.pointer, index, region, at - s["base"], first, count)
            at, first = at + count * element, first + count

    def add_tensor(self, name, dtype, shape):
        if len(shape) > _p.MOST_DIMS:
            raise DrayError(_l.EUNSUPPORTED, f"{name}: at most {_p.MOST_DIMS} dimensions expected, found {len(shape)}")
        index, shape, code, called = c.c_uint32(), _p.folded(shape), _g.dtype_code(dtype), _l.text(name)
        if library().dray_layout_find(self.pointer, called, c.byref(index), None):
            sizes = (c.c_int64 * max(1, len(shape)))(*shape)
            call("dray_layout_add_tensor", self.pointer, called, code, len(shape), sizes, c.byref(index))
        else:
            self._same_tensor(name, index.value, code, shape)
        return index.value

    def _same_tensor(self, name, index, dtype, shape):
        """Blocks of one tensor agree on what all of it is."""
        known = tensor_info(self.pointer, index)
        if known.dtype != dtype:
            expected, found = (library().dray_dtype_name(each).decode() for each in (known.dtype, dtype))
            raise DrayError(_l.EDTYPE, f"{name}: {expected} expected, as in its other blocks, found {found}")
        if list(known.shape[:known.ndim]) != list(shape):
            raise DrayError(_l.ESHAPE, f"{name}: a whole tensor of shape {known.shape[:known.ndim]} expected, as in its other "
                            f"blocks, found {list(shape)}")

    def add_alias(self, alias, name):
        """Another name of a tensor, where the layout has none of either from its configuration."""
        index = c.c_uint32()
        find = library().dray_layout_find
        other = _l.text(alias)
        if find(self.pointer, other, c.byref(index), None) and not find(self.pointer, name.encode(), c.byref(index), None):
            call("dray_layout_add_alias", self.pointer, other, index, c.byref(index))

    def add_parameter(self, name, parameter):
        """A parameter of this rank: whole, or a DTensor's shard. Where nothing of it is here, only
        the name is added."""
        if isinstance(parameter, _p.Part):
            parameter.add_to(self, name)
            return
        local, mesh, placements = _p.local(parameter)
        if self._config is not None:
            self._add_module(name, local, mesh, placements)
            return
        tensor = self.add_tensor(name, local.dtype, tuple(parameter.shape))
        if local.numel() == 0:
            return
        if not local.is_contiguous():
            raise DrayError(-1, f"{name}: the local shard is not contiguous")
        if self._spans(local):
            start = None
            if mesh is not None:
                from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
                _, start = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
            self._add_pieces(tensor, local, parameter.shape, start, name)
            return
        region, offset = self.region_of(local, name)
        if mesh is None:
            whole = _p.folded(local.shape)
            self._dense(tensor, region, [0] * len(whole), whole, offset)
            return
        if local.dim() > _l.MAX_DIMS and any(getattr(p, "dim", 0) >= _l.MAX_DIMS - 1 for p in placements):
            raise DrayError(_l.EUNSUPPORTED, f"{name}: a cut along one of its first {_l.MAX_DIMS - 1} dimensions expected, "
                            f"found {tuple(placements)}")
        coordinate = (c.c_int64 * 8)(*mesh.get_coordinate())
        shape = (c.c_int64 * _l.MAX_DIMS)()
        m = _mesh_of(mesh, placements)
        call("dray_layout_add_dtensor", self.pointer, tensor, region, offset, c.byref(m), coordinate,
             shape)
        self._same_shard(name, shape, local)

    def _add_module(self, name, local, mesh, placements):
        """A parameter of transformers' module for the configuration: also one that experts are packed
        into."""
        if local.numel() and (not local.is_contiguous() or self._spans(local)):
            raise DrayError(-26, f"{name} lies in several pieces: allocate it in dray.gpu.use_arena()")
        region, offset = self.region_of(local, name) if local.numel() else (0, 0)
        shape = (c.c_int64 * _l.MAX_DIMS)()
        m = None if mesh is None else c.byref(_mesh_of(mesh, placements))
        coordinate = None if mesh is None else (c.c_int64 * 8)(*mesh.get_coordinate())
        call("dray_layout_add_module", self.pointer, c.byref(self._config), _l.text(name),
             _g.dtype_code(local.dtype), region, offset, m, coordinate, shape)
        self._same_shard(name, shape, local)

    @staticmethod
    def _same_shard(name, shape, local):
        found = _p.folded(local.shape)
        if list(shape[:len(found)]) != found:
            raise DrayError(-10, f"{name}: a shard of {shape[:len(found)]} expected, the tensor has {found}")

    def _dense(self, tensor, region, start, extent, offset):
        call("dray_layout_add_dense", self.pointer, tensor, region,
             (c.c_int64 * _l.MAX_DIMS)(*start), (c.c_int64 * _l.MAX_DIMS)(*extent), offset)

    def add_block(self, block):
        view = _p.local(block)[0]
        tensor = self.add_tensor(block.name, view.dtype, tuple(block.shape))
        if view.numel() == 0:
            return
        start = tuple(block.start or [0] * view.dim())
        if not (len(start) == view.dim() == len(block.shape) and
                all(0 <= at <= whole - n for at, n, whole in zip(start, view.shape, block.shape))):
            raise DrayError(_l.ESHAPE, f"{block.name}: a rectangle within {tuple(block.shape)} expected, found "
                            f"{tuple(view.shape)} from {start} on")
        if self._spans(view):
            self._add_pieces(tensor, view, block.shape, block.start, block.name)
            return
        region, offset = self.region_of(view, block.name)
        element = view.element_size()
        start, extent, stride = _p.folded_block(block.name, tuple(block.shape), start, list(view.shape),
                                                list(view.stride()))
        b, dims = _l.Block(tensor=tensor, region=region, offset=offset), len(extent)
        b.start[:dims], b.extent[:dims], b.stride[:dims] = start, extent, [s * element for s in stride]
        call("dray_layout_add_block", self.pointer, c.byref(b))

    def live(self):
        return (c.c_void_p * max(1, len(self.regions)))(*(r.pointer.value for r in self.regions))
