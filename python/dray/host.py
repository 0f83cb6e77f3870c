"""Host memory that other processes map: what a trainer's parameters are in to be read in place."""
from __future__ import annotations

import bisect
import collections
import contextlib
import ctypes as c
import math
import threading
import weakref
from typing import Any, Optional

from ._library import call, library

_SHARED = 2  # dray_region_kind
_ALIGN = 256
_lock = threading.Lock()
_bases, _regions = [], {}  # first addresses, ascending; {address: (bytes, dray_region *)}
_ended = collections.deque()  # first addresses of memory that nobody has any more


def _torch():
    import torch
    return torch


def _free(base):
    """Python may call it anywhere, also in a thread that has the lock: then the memory is freed behind that."""
    _ended.append(base)
    _sweep()


def _sweep():
    while _ended and _lock.acquire(False):
        pointer = None
        try:
            if _ended:  # another thread may have been faster
                base = _ended.popleft()
                _bases.remove(base)
                _, pointer = _regions.pop(base)
        finally:
            _lock.release()
        library().dray_region_free(pointer)


@contextlib.contextmanager
def _locked():
    with _lock:
        yield
    _sweep()


def _memory(size: int, name: str):
    """A region's bytes; freed with the last tensor or array over them."""
    pointer = c.c_void_p()
    call("dray_region_alloc", _SHARED, size, name.encode(), c.byref(pointer))
    base = library().dray_region_base(pointer)
    with _locked():
        bisect.insort(_bases, base)
        _regions[base] = size, pointer
    memory = (c.c_ubyte * size).from_address(base)
    weakref.finalize(memory, _free, base).atexit = False
    return memory


def _bytes(memory):
    torch = _torch()
    return torch.frombuffer(memory, dtype=torch.uint8)


def find(address: int) -> Optional[tuple]:
    """(base, bytes, dray_region *) of the shared memory that an address is in."""
    with _locked():
        at = bisect.bisect_right(_bases, address) - 1
        if at < 0:
            return None
        base = _bases[at]
        size, pointer = _regions[base]
    return (base, size, pointer) if address < base + size else None


def empty(*shape: int, dtype: Any = None):
    """A tensor (of zeros) in shared memory: for weights that are made by hand. With one of numpy's dtypes an
    array; None: PyTorch's default."""
    if len(shape) == 1 and not isinstance(shape[0], int):
        shape = tuple(shape[0])
    if dtype is None or type(dtype).__module__ == "torch":
        torch = _torch()
        dtype = dtype or torch.get_default_dtype()
        size = math.prod(shape) * dtype.itemsize
        return _bytes(_memory(max(size, 1), "tensor"))[:size].view(dtype).view(shape)
    import numpy as np
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    return np.frombuffer(_memory(max(size, 1), "tensor"), np.uint8)[:size].view(dtype).reshape(shape)


def share(module: Any, name: str = "parameters"):
    """Moves the module's parameters and buffers (of the CPU, whole ones) into shared memory, one
    region; engines of this host then read them where they are. Call it before an optimizer is made.
    Returns the module."""
    torch = _torch()
    found = {}  # storage: tensors over it
    for tensor in [*module.parameters(), *module.buffers()]:
        if hasattr(tensor, "placements"):
            raise TypeError("share() is for whole tensors: a DTensor's shard is published out of private "
                            "memory, through staging")
        if tensor.device.type == "cpu" and find(tensor.data_ptr()) is None:
            found.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    places, end = [], 0
    for tensors in found.values():
        places.append(end)
        end += -(-tensors[0].untyped_storage().nbytes() // _ALIGN) * _ALIGN
    if not end:
        return module
    whole = _bytes(_memory(end, name))
    with torch.no_grad():
        for place, tensors in zip(places, found.values()):
            storage = tensors[0].untyped_storage()
            old = torch.empty(0, dtype=torch.uint8).set_(storage)
            part = whole[place:place + storage.nbytes()]
            part.copy_(old)
            for tensor in tensors:
                at = place + tensor.storage_offset() * tensor.element_size()
                typed = whole[at:at + (place + storage.nbytes() - at) // tensor.element_size() *
                              tensor.element_size()].view(tensor.dtype)
                tensor.data = typed.as_strided(tensor.shape, tensor.stride())
    return module
