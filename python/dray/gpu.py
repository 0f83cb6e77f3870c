"""GPU memory: regions over tensors, arenas that PyTorch allocates from, release and resume, and
handles that go where PyTorch's own go.

    with dray.gpu.use_arena("weights"):          # everything allocated here is in dray's arena:
        model = build().cuda()                   # a rank's parameters are a handle or a few
    ...
    dray.gpu.release("weights")                  # the GPU is somebody else's, the content kept
    dray.gpu.resume("weights")                   # at the same addresses as before

Needs PyTorch for what takes or gives tensors; everything else does without."""
import ctypes as c
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass

from . import _library as _l
from ._library import DrayError, call, library

HOST, SHARED, PINNED, CUDA, FILE = (
    _l.REGION_HOST, _l.REGION_SHARED, _l.REGION_PINNED, _l.REGION_CUDA, _l.REGION_FILE)
FORM_NONE, FORM_VMM, FORM_IPC = _l.CUDA_FORM_NONE, _l.CUDA_FORM_VMM, _l.CUDA_FORM_IPC
_IPC_BYTES = 64


def _torch():
    import torch
    return torch


def _fields(struct, *leave_out):
    return {name: getattr(struct, name) for name, _ in struct._fields_
            if name not in ("size",) + leave_out}


# ---- devices -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Gpu:
    """A GPU that this process sees. Its uuid is the same for all processes; ordinal is not."""
    uuid: bytes
    uuid_text: str
    name: str
    pci: str
    bytes: int
    ordinal: int
    arch: int
    multiprocessors: int


def devices():
    """All that this process sees; raises DrayError (EUNSUPPORTED) where there is no driver."""
    count, found = c.c_int32(), []
    call("dray_gpu_count", c.byref(count), None)
    for i in range(count.value):
        gpu = _l.Gpu()
        call("dray_gpu_get", i, c.byref(gpu))
        found.append(Gpu(bytes(gpu.uuid), gpu.uuid_text.decode(), gpu.name.decode(),
                         gpu.pci.decode(), gpu.bytes, gpu.ordinal, gpu.arch, gpu.multiprocessors))
    return found


def _uuid_of(ordinal):
    return next(g.uuid for g in devices() if g.ordinal == ordinal)


def storage_of(address):
    """The allocation that an address is in: base, bytes, allocation (its number), form, uuid."""
    s = _l.GpuStorage()
    call("dray_gpu_storage_of", address, c.byref(s))
    return dict(_fields(s), uuid=bytes(s.uuid))


# ---- arenas --------------------------------------------------------------------------------------

_pools = {}
_pools_lock = threading.Lock()


def mem_pool(tag="weights"):
    """The torch.cuda.MemPool of the tag, made at the first call and kept: the allocator of a pool
    must outlive all of its memory."""
    torch = _torch()
    with _pools_lock:
        if tag not in _pools:
            library()
            allocator = torch.cuda.memory.CUDAPluggableAllocator(
                _l.library_path(), "dray_torch_malloc", "dray_torch_free")
            _pools[tag] = (torch.cuda.MemPool(allocator.allocator()), allocator)
        return _pools[tag][0]


@contextmanager
def use_arena(tag="weights", device=None, chunk_bytes=0, peers=False):
    """CUDA tensors made inside are in the arena of the tag. chunk_bytes (of the first call for a tag
    and GPU): one handle exports so much. peers: other GPUs of this process may use it, too."""
    torch = _torch()
    device = torch.cuda.current_device() if device is None else torch.device("cuda", device).index
    torch.zeros(1, device=f"cuda:{device}")
    _arena(tag, device, chunk_bytes, peers)
    pool = mem_pool(tag)
    call("dray_torch_use", tag.encode())
    try:
        with torch.cuda.use_mem_pool(pool, device=device):
            yield pool
    finally:
        call("dray_torch_use", None)


def _arena(tag, device, chunk_bytes=0, peers=False):
    options, out = _l.ArenaOptions(chunk_bytes=chunk_bytes, peers=int(peers)), c.c_void_p()
    call("dray_torch_arena", tag.encode(), device, c.byref(options), c.byref(out))
    return out


def arena_status(tag="weights", device=0):
    status = _l.ArenaStatus()
    call("dray_arena_get_status", _arena(tag, device), c.byref(status))
    return _fields(status)


def prepare(tag=None):
    """Pins the host memory that release will need for what is allocated now."""
    report = _l.ArenaReport()
    call("dray_arena_prepare", tag and tag.encode(), c.byref(report))
    return _fields(report)


def release(tag=None, drop=False, force=False, stream=None, timeout=60.0):
    """Gives the memory of the tag's arenas (None: of all) back to the GPU; their content is kept in
    pinned host memory, or dropped. Waits for what the stream (None: the current one) does so far."""
    fence, event = _fence(stream)
    options = _l.ArenaReleaseOptions(drop=int(drop), force=int(force), after=c.pointer(fence),
                       timeout_ns=_l.nanoseconds(timeout))
    report = _l.ArenaReport()
    call("dray_arena_release", tag and tag.encode(), c.byref(options), c.byref(report))
    del event
    return _fields(report)


def resume(tag=None, free_pinned=False, timeout=60.0):
    """Takes memory for them again, at the same addresses, and copies the content back."""
    options, report = _l.ArenaResumeOptions(free_pinned=int(free_pinned), timeout_ns=_l.nanoseconds(timeout)), _l.ArenaReport()
    call("dray_arena_resume", tag and tag.encode(), c.byref(options), c.byref(report))
    return _fields(report)


def _fence(stream=None):
    """A fence after what the stream does so far, and the event behind it, to be kept while it is
    used."""
    torch = _torch()
    event = torch.cuda.Event(interprocess=True)
    event.record(torch.cuda.current_stream() if stream is None else stream)
    return _l.Fence(kind=1, event=event.cuda_event), event


# ---- handles -------------------------------------------------------------------------------------

class Handle(_l.Handle):
    """How another process reaches a storage: dray_handle of memory.h."""

    def pack(self):
        room = (c.c_uint8 * library().dray_handle_packed_size())()
        call("dray_handle_pack", c.byref(self), room, len(room))
        return bytes(room)

    @classmethod
    def unpack(cls, data):
        handle = cls()
        call("dray_handle_unpack", data, len(data), c.byref(handle))
        return handle


def torch_dtype(code):
    """A dtype of dray's as PyTorch's."""
    names = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16",
             "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BOOL": "bool"}
    name = library().dray_dtype_name(code).decode()
    kinds = {"I": "int", "U": "uint"}
    return getattr(_torch(), names.get(name) or kinds[name[0]] + name[1:])


def dtype_code(dtype):
    code = library().dray_dtype_parse(str(dtype).encode())
    if not code:
        raise TypeError(f"{dtype} is no dtype of dray's")
    return code


# The arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor, in their order.
REBUILD = ("tensor_cls tensor_size tensor_stride tensor_offset storage_cls dtype storage_device "
           "storage_handle storage_size_bytes storage_offset_bytes requires_grad "
           "ref_counter_handle ref_counter_offset event_handle event_sync_required").split()


@dataclass
class Rebuilt:
    """A handle that came out of PyTorch's arguments, and what a handle has no room for."""
    handle: Handle
    tensor_cls: type
    storage_cls: type
    requires_grad: bool
    prefix: bytes                # of storage_handle: PyTorch's format version, and 'c'
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_sync_required: bool
    event_handle: bytes

    def done(self, device):
        """The importer's copies are complete: once for each set of arguments, as rebuilding does."""
        _torch().UntypedStorage._release_ipc_counter(self.ref_counter_handle,
                                                     self.ref_counter_offset, device=device)


def from_rebuild(arguments, uuid_of=_uuid_of):
    """The handle in reduce_tensor's second value. In the process that reduced the tensor: the device
    in there is an index, which means another GPU elsewhere (uuid_of: index to UUID)."""
    if len(arguments) != len(REBUILD):
        raise ValueError(f"{len(REBUILD)} arguments expected, as reduce_tensor gives them, found {len(arguments)}")
    a = dict(zip(REBUILD, arguments))
    handle = a["storage_handle"]
    prefix, key = handle[:-_IPC_BYTES], handle[-_IPC_BYTES:]
    if len(handle) < _IPC_BYTES or (prefix and prefix[-1:] != b"c"):
        raise DrayError(-26, "a storage of expandable segments, or of another allocator, has no IPC "
                        "handle: allocate it in dray.gpu.use_arena(), or pass it through staging")
    element = a["dtype"].itemsize
    shape, stride = list(a["tensor_size"]), [s * element for s in a["tensor_stride"]]
    if len(shape) > _l.MAX_DIMS:
        raise DrayError(-1, f"a tensor of {len(shape)} dimensions: {_l.MAX_DIMS} are possible")
    h = Handle(kind=CUDA, dtype=dtype_code(a["dtype"]), ndim=len(shape), form=FORM_IPC,
               offset=a["tensor_offset"] * element, storage_bytes=a["storage_size_bytes"],
               base_offset=a["storage_offset_bytes"],
               base_bytes=a["storage_offset_bytes"] + a["storage_size_bytes"])
    h.shape[:len(shape)], h.stride[:len(shape)] = shape, stride
    h.key[:] = key
    h.device[:] = uuid_of(a["storage_device"])
    if a["event_sync_required"]:
        h.event[:] = a["event_handle"]
    return Rebuilt(h, a["tensor_cls"], a["storage_cls"], a["requires_grad"], prefix,
                   a["ref_counter_handle"], a["ref_counter_offset"], a["event_sync_required"],
                   a["event_handle"])


def to_rebuild(rebuilt, ordinal_of=None):
    """The arguments again, for the process that calls it: its own index of the GPU is in there."""
    h = rebuilt.handle
    dtype = torch_dtype(h.dtype)
    if h.kind != CUDA or h.form != FORM_IPC:
        raise DrayError(-26, "PyTorch rebuilds memory of cudaMalloc alone: import the handle instead")
    if any(b % dtype.itemsize for b in (*h.stride[:h.ndim], h.offset)):
        raise DrayError(-1, "strides and offset are not whole elements")
    uuid = bytes(h.device)
    device = ordinal_of(uuid) if ordinal_of else next(
        g.ordinal for g in devices() if g.uuid == uuid)
    return (rebuilt.tensor_cls, _torch().Size(h.shape[:h.ndim]),
            tuple(s // dtype.itemsize for s in h.stride[:h.ndim]), h.offset // dtype.itemsize,
            rebuilt.storage_cls, dtype, device, rebuilt.prefix + bytes(h.key), h.storage_bytes,
            h.base_offset, rebuilt.requires_grad, rebuilt.ref_counter_handle,
            rebuilt.ref_counter_offset, rebuilt.event_handle, rebuilt.event_sync_required)


# ---- regions -------------------------------------------------------------------------------------

class Region(_l.Opened):
    """Memory that blocks are in: dray_region. What it was made of must outlive it (it keeps a tensor
    that it was given)."""
    _frees = "dray_region_free"

    def __init__(self, pointer, keep=None, owned=True):
        self._open_as("the region")
        self.pointer, self._keep, self._owned = pointer, keep, owned

    @classmethod
    def over(cls, address, size, name="", cuda=True, keep=None):
        out = c.c_void_p()
        if cuda:
            call("dray_region_wrap_cuda", address, size, name.encode(), c.byref(out))
        else:
            call("dray_region_wrap", address, size, name.encode(), c.byref(out))
        return cls(out, keep)

    @classmethod
    def of(cls, tensor, name=""):
        """The tensor's whole storage."""
        s = tensor.untyped_storage()
        return cls.over(s.data_ptr(), s.nbytes(), name, tensor.is_cuda, s)

    @classmethod
    def open(cls, handle, fd=-1, writable=False):
        """What another process exported, mapped for the current GPU."""
        out = c.c_void_p()
        call("dray_region_import", c.byref(handle), fd, int(writable), c.byref(out))
        return cls(out)

    def _end(self):
        if self._owned:
            super()._end()
        self.pointer = self._keep = None

    def __del__(self):
        if not sys.is_finalizing():
            self.close()

    @property
    def nbytes(self):
        return self._number("dray_region_bytes")

    @property
    def address(self):
        """Where GPUs see it; of host memory that no GPU can see: where the CPU sees it."""
        return self._number("dray_region_device_address") or self._number("dray_region_base")

    @property
    def fd(self):
        """The descriptor to send along with the handle (SCM_RIGHTS); -1: there is none."""
        return self._number("dray_region_fd")

    def check(self):
        """Raises DrayError (ESTALE) when the memory was freed, or its arena released."""
        self._call("dray_region_check")

    def unexport(self):
        """Ends the export, when no other process has the memory mapped any more."""
        with self._use:
            library().dray_region_unexport(self.pointer)

    def describe(self, tensor=None):
        """A handle to one tensor inside, or to all of it as bytes."""
        handle = Handle()
        if tensor is not None:
            element = tensor.element_size()
            handle.dtype, handle.ndim = dtype_code(tensor.dtype), tensor.dim()
            handle.shape[:tensor.dim()] = list(tensor.shape)
            handle.stride[:tensor.dim()] = [s * element for s in tensor.stride()]
            handle.offset = tensor.data_ptr() - self.address
        self._call("dray_handle_describe", c.byref(handle))
        return handle

    def tensor(self, handle=None, device=None):
        """A tensor over the memory, which the region must outlive: of the handle's shape, or bytes.
        """
        torch = _torch()
        at, size = self.address, self.nbytes
        flat = torch.as_tensor(_Bytes(at, size, self), device=device or "cuda")
        if handle is None or not handle.dtype:
            return flat
        dtype = torch_dtype(handle.dtype)
        typed = flat[handle.offset:]
        typed = typed[:typed.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return typed.as_strided(handle.shape[:handle.ndim],
                                [s // dtype.itemsize for s in handle.stride[:handle.ndim]])


class _Bytes:
    """What PyTorch takes memory of others by."""

    def __init__(self, address, size, keep):
        self._keep = keep
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "version": 3,
                                         "data": (address, False), "strides": None}


def bytes_at(address, size):
    """A tensor over memory of the current GPU, which is another one's."""
    return _torch().as_tensor(_Bytes(address, size, None), device="cuda")


def finish():
    """Until the current GPU has done what it was given."""
    _torch().cuda.synchronize()
