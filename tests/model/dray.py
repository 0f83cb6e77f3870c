"""The library's model part through ctypes, for the tests that compare it with other libraries."""

import ctypes as c
import os
import sys

MAX_DIMS = 4


class Error(c.Structure):
    _fields_ = [("code", c.c_int32), ("origin", c.c_int32), ("raw", c.c_int64),
                ("message", c.c_char * 496)]


class RegionInfo(c.Structure):
    _fields_ = [("kind", c.c_int32), ("bytes", c.c_uint64), ("name", c.c_char_p),
                ("device", c.c_uint8 * 16)]


class TensorInfo(c.Structure):
    _fields_ = [("name", c.c_char_p), ("dtype", c.c_int32), ("ndim", c.c_uint32),
                ("shape", c.c_int64 * MAX_DIMS), ("alias_of", c.c_int32)]


class Block(c.Structure):
    _fields_ = [("tensor", c.c_uint32), ("region", c.c_uint32), ("start", c.c_int64 * MAX_DIMS),
                ("extent", c.c_int64 * MAX_DIMS), ("offset", c.c_uint64),
                ("stride", c.c_int64 * MAX_DIMS)]


class ModelConfig(c.Structure):
    _fields_ = [("family", c.c_char * 32)] + [
        (n, c.c_int64) for n in ("vocab_size", "hidden_size", "intermediate_size", "layers",
                                 "heads", "kv_heads", "head_dim", "max_positions")] + [
        ("rms_norm_eps", c.c_double), ("rope_theta", c.c_double)] + [
        (n, c.c_int32) for n in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tied", "dtype")] + [
        (n, c.c_int64) for n in ("experts", "moe_intermediate_size", "shared_experts",
                                 "first_k_dense", "sparse_step")] + [
        ("dense_layers", c.c_uint64 * 8)] + [
        (n, c.c_int64) for n in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
                                 "qk_rope_head_dim", "v_head_dim", "mtp_layers", "labels")] + [
        ("own", c.c_int64 * 32), ("kind_layers", c.c_uint64 * 8 * 3)]


class Placement(c.Structure):
    _fields_ = [("kind", c.c_int32), ("dim", c.c_int32), ("split_factor", c.c_int64)]


class Mesh(c.Structure):
    _fields_ = [("ndim", c.c_uint32), ("shape", c.c_int64 * 8), ("placements", Placement * 8)]


class Quant(c.Structure):
    _fields_ = [("kind", c.c_int32), ("scale_format", c.c_int32), ("scales", c.c_uint32),
                ("block", c.c_int64 * 2), ("values", c.c_uint32), ("second", c.c_uint32),
                ("shared", c.c_uint32)]


class ExpertMap(c.Structure):
    _fields_ = [("size", c.c_size_t), ("version", c.c_uint64), ("layers", c.c_uint32),
                ("slots", c.c_uint32), ("experts", c.POINTER(c.c_int32))]


class EngineQuant(c.Structure):
    _fields_ = [("size", c.c_size_t), ("kind", c.c_int32), ("scale_format", c.c_int32),
                ("block", c.c_int64 * 2), ("ignore", c.POINTER(c.c_char_p)),
                ("ignore_count", c.c_uint32)]


class EngineSpec(c.Structure):
    _fields_ = [("size", c.c_size_t), ("tp", c.c_uint32), ("tp_rank", c.c_uint32),
                ("dtype", c.c_int32), ("vocab_multiple", c.c_int64), ("kind", c.c_int32),
                ("pp_layers", c.POINTER(c.c_uint32)), ("experts", c.POINTER(ExpertMap)),
                ("quant", c.POINTER(EngineQuant)), ("pp", c.c_uint32), ("pp_rank", c.c_uint32),
                ("ep", c.c_uint32), ("dp", c.c_uint32), ("engine", c.c_int32),
                ("draft", c.c_int32), ("dense_tp", c.c_uint32), ("shared_tp", c.c_uint32),
                ("embed_tp", c.c_uint32), ("head_tp", c.c_uint32), ("fuse_shared", c.c_int32),
                ("redundant", c.c_uint32), ("transposed", c.c_uint32), ("w13_order", c.c_int32)]


class PlanMember(c.Structure):
    _fields_ = [("layout", c.c_void_p), ("member", c.c_uint64), ("name", c.c_char_p),
                ("host", c.c_uint64), ("process", c.c_uint64), ("device", c.c_uint64)]


class Copy(c.Structure):
    _fields_ = [(n, c.c_uint32) for n in ("source", "source_region", "destination_region", "tensor",
                                          "ndim")] + [
        ("source_dtype", c.c_int32), ("destination_dtype", c.c_int32),
        ("start", c.c_int64 * MAX_DIMS), ("extent", c.c_int64 * MAX_DIMS),
        ("source_offset", c.c_uint64), ("destination_offset", c.c_uint64),
        ("source_stride", c.c_int64 * MAX_DIMS), ("destination_stride", c.c_int64 * MAX_DIMS)]


class FlatPiece(c.Structure):
    _fields_ = [("name", c.c_char_p), ("ndim", c.c_uint32), ("shape", c.c_int64 * MAX_DIMS),
                ("offset", c.c_int64), ("first", c.c_int64), ("last", c.c_int64)]


class FlatParameter(c.Structure):
    _fields_ = [("size", c.c_size_t), ("dtype", c.c_int32), ("prefix", c.c_char_p),
                ("numel", c.c_int64), ("padding", c.c_int64), ("pieces", c.POINTER(FlatPiece)),
                ("count", c.c_uint32), ("config", c.POINTER(ModelConfig))]


class Fsdp1Spec(c.Structure):
    _fields_ = [("size", c.c_size_t), ("rank", c.c_uint32), ("world", c.c_uint32)] + [
        (n, c.c_int32) for n in ("dtype", "use_orig_params", "compute_dtype", "kind")]


class MegatronSpec(c.Structure):
    _fields_ = [("size", c.c_size_t)] + [
        (n, c.c_uint32) for n in ("tp", "cp", "ep", "etp", "dp", "pp", "vpp", "tp_rank", "ep_rank",
                                  "etp_rank", "pp_rank")] + [
        (n, c.c_int32) for n in ("experts", "dtype", "kind")] + [
        (n, c.c_int64) for n in ("vocab_multiple", "first_stage_layers", "last_stage_layers")] + [
        (n, c.c_int32) for n in ("embedding_in_split", "loss_in_split")]


class MegatronParameter(c.Structure):
    _fields_ = [("name", c.c_char * 192), ("vp_stage", c.c_uint32), ("dtype", c.c_int32),
                ("ndim", c.c_uint32), ("shape", c.c_int64 * MAX_DIMS), ("offset", c.c_uint64)]


class SafetensorsOptions(c.Structure):
    _fields_ = [("size", c.c_size_t), ("max_file_bytes", c.c_uint64),
                ("metadata_json", c.c_char_p), ("values_key", c.c_char_p),
                ("tensor_values", c.POINTER(c.c_char_p))]


class DrayError(Exception):
    def __init__(self, error):
        super().__init__(error.message.decode())
        self.code = error.code


def _open():
    path = os.environ.get("DRAY_LIBRARY")
    if not path or not os.path.exists(path):
        print("skipped: DRAY_LIBRARY names no library")
        sys.exit(77)
    lib = c.CDLL(path)
    lib.dray_dtype_size.restype = c.c_size_t
    lib.dray_dtype_name.restype = c.c_char_p
    lib.dray_layout_bytes.restype = c.c_uint64
    lib.dray_layout_tensor.restype = c.POINTER(TensorInfo)
    lib.dray_layout_region.restype = c.POINTER(RegionInfo)
    lib.dray_layout_block.restype = c.POINTER(Block)
    lib.dray_layout_quant.restype = c.POINTER(Quant)
    lib.dray_model_name.restype = c.c_char_p
    lib.dray_plan_count.restype = c.c_uint64
    lib.dray_plan_copies.restype = c.c_void_p
    return lib


lib = _open()
_libc = c.CDLL(None)
_libc.free.argtypes = [c.c_void_p]


def call(function, *args):
    error = Error()
    if function(*args, c.byref(error)) != 0:
        raise DrayError(error)


def i64s(values):
    values = list(values)
    return (c.c_int64 * max(1, len(values)))(*values)


class Layout:
    """Owns a dray_layout."""

    def __init__(self, handle=None):
        self.handle = handle or c.c_void_p()
        if handle is None:
            call(lib.dray_layout_new, c.byref(self.handle))

    def __del__(self):
        lib.dray_layout_free(self.handle)

    def add_region(self, size, kind=1, name=b"r"):
        index = c.c_uint32()
        call(lib.dray_layout_add_region, self.handle,
             c.byref(RegionInfo(kind=kind, bytes=size, name=name)), c.byref(index))
        return index.value

    def add_tensor(self, name, dtype, shape):
        index = c.c_uint32()
        call(lib.dray_layout_add_tensor, self.handle, name.encode(), dtype, len(shape),
             i64s(shape), c.byref(index))
        return index.value

    def add_alias(self, name, target):
        call(lib.dray_layout_add_alias, self.handle, name.encode(), target, None)

    def add_dtensor(self, tensor, region, offset, mesh_shape, placements, coordinate):
        mesh = Mesh(ndim=len(mesh_shape))
        mesh.shape[:len(mesh_shape)] = mesh_shape
        for i, p in enumerate(placements):
            mesh.placements[i] = Placement(*p)
        local = (c.c_int64 * MAX_DIMS)()
        call(lib.dray_layout_add_dtensor, self.handle, tensor, region, c.c_uint64(offset),
             c.byref(mesh), i64s(coordinate), local)
        return list(local)[:self.tensor(tensor).ndim]

    def find(self, name):
        index = c.c_uint32()
        call(lib.dray_layout_find, self.handle, name, c.byref(index))
        return index.value

    def tensor(self, i):
        return lib.dray_layout_tensor(self.handle, i).contents

    def region(self, i):
        return lib.dray_layout_region(self.handle, i).contents

    def tensors(self):
        return [self.tensor(i) for i in range(lib.dray_layout_tensor_count(self.handle))]

    def regions(self):
        return [self.region(i) for i in range(lib.dray_layout_region_count(self.handle))]

    def blocks(self):
        """(tensor, region, start, extent, offset, stride), cut to the tensor's dimensions."""
        out = []
        for i in range(lib.dray_layout_block_count(self.handle)):
            b = lib.dray_layout_block(self.handle, i).contents
            n = self.tensor(b.tensor).ndim
            out.append((b.tensor, b.region, list(b.start)[:n], list(b.extent)[:n], b.offset,
                        list(b.stride)[:n]))
        return out


def model_layout(function, config, *arguments):
    """The layout that a whole-model builder makes."""
    handle = c.c_void_p()
    call(function, c.byref(config), *arguments, c.byref(handle))
    return Layout(handle)


def packed(layout):
    data, size = c.c_void_p(), c.c_size_t()
    call(lib.dray_layout_pack, layout.handle, c.byref(data), c.byref(size))
    out = c.string_at(data, size.value)
    _libc.free(data)
    return out


def plan(sources, destination):
    """The copies (Copy) that fill the destination's layout from those of the sources."""
    members = (PlanMember * len(sources))(
        *[PlanMember(s.handle, i, None, 1, i + 1, 0) for i, s in enumerate(sources)])
    to, handle = PlanMember(destination.handle, 1 << 20, None, 1, 1 << 20, 0), c.c_void_p()
    call(lib.dray_plan_new, members, len(sources), c.byref(to), None, c.byref(handle))
    try:
        copies = c.cast(lib.dray_plan_copies(handle), c.POINTER(Copy))
        return [Copy.from_buffer_copy(copies[i]) for i in range(lib.dray_plan_count(handle))]
    finally:
        lib.dray_plan_free(handle)


def safetensors_layout(path):
    handle = c.c_void_p()
    call(lib.dray_layout_safetensors, os.fsencode(path), c.byref(handle))
    return Layout(handle)


def safetensors_begin(directory, like, max_file_bytes=0, metadata=None, values=None):
    """values: (key, one text or None for each tensor)"""
    handle = c.c_void_p()
    options = SafetensorsOptions(c.sizeof(SafetensorsOptions), max_file_bytes,
                                 metadata and metadata.encode())
    if values:
        texts = [v and v.encode() for v in values[1]]
        options.values_key = values[0].encode()
        options.tensor_values = (c.c_char_p * (len(texts) + 1))(*texts)
    call(lib.dray_safetensors_begin, os.fsencode(directory), like.handle, c.byref(options),
         c.byref(handle))
    return Layout(handle)


def safetensors_finish(directory, layout):
    call(lib.dray_safetensors_finish, os.fsencode(directory), layout.handle)
