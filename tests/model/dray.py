"""The library's model part through ctypes, for the tests that compare it with other libraries."""

import ctypes as c
import importlib.util
import os
import sys

MAX_DIMS = 4


def _declared():
    """The package's table of what the headers declare, without the package; its structs are filled in as ctypes' are."""
    path = os.path.join(os.environ["DRAY_SOURCE_DIR"], "python", "dray", "_declared.py")
    spec = importlib.util.spec_from_file_location("declared", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Sized.__init__ = c.Structure.__init__
    return module


declared = _declared()


def __getattr__(name):
    return getattr(declared, name)


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
    lib.dray_layout_tensor.restype = c.POINTER(declared.TensorInfo)
    lib.dray_layout_region.restype = c.POINTER(declared.RegionInfo)
    lib.dray_layout_block.restype = c.POINTER(declared.Block)
    lib.dray_layout_quant.restype = c.POINTER(declared.Quant)
    lib.dray_model_name.restype = c.c_char_p
    lib.dray_plan_count.restype = c.c_uint64
    lib.dray_plan_copies.restype = c.c_void_p
    return lib


lib = _open()
_libc = c.CDLL(None)
_libc.free.argtypes = [c.c_void_p]


def call(function, *args):
    error = declared.Error()
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
             c.byref(declared.RegionInfo(kind=kind, bytes=size, name=name)), c.byref(index))
        return index.value

    def add_tensor(self, name, dtype, shape):
        index = c.c_uint32()
        call(lib.dray_layout_add_tensor, self.handle, name.encode(), dtype, len(shape),
             i64s(shape), c.byref(index))
        return index.value

    def add_alias(self, name, target):
        call(lib.dray_layout_add_alias, self.handle, name.encode(), target, None)

    def add_dtensor(self, tensor, region, offset, mesh_shape, placements, coordinate):
        mesh = declared.Mesh(ndim=len(mesh_shape))
        mesh.shape[:len(mesh_shape)] = mesh_shape
        for i, p in enumerate(placements):
            mesh.placements[i] = declared.Placement(*p)
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
    members = (declared.PlanMember * len(sources))(
        *[declared.PlanMember(s.handle, i, None, 1, i + 1, 0) for i, s in enumerate(sources)])
    to, handle = declared.PlanMember(destination.handle, 1 << 20, None, 1, 1 << 20, 0), c.c_void_p()
    call(lib.dray_plan_new, members, len(sources), c.byref(to), None, c.byref(handle))
    try:
        copies = c.cast(lib.dray_plan_copies(handle), c.POINTER(declared.Copy))
        return [declared.Copy.from_buffer_copy(copies[i]) for i in range(lib.dray_plan_count(handle))]
    finally:
        lib.dray_plan_free(handle)


def safetensors_layout(path):
    handle = c.c_void_p()
    call(lib.dray_layout_safetensors, os.fsencode(path), c.byref(handle))
    return Layout(handle)


def safetensors_begin(directory, like, max_file_bytes=0, metadata=None, values=None):
    """values: (key, one text or None for each tensor)"""
    handle = c.c_void_p()
    options = declared.SafetensorsOptions(c.sizeof(declared.SafetensorsOptions), max_file_bytes,
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
