"""dray for Python: a thin layer over libdray's C ABI (ctypes; nothing to compile).

The library is $DRAY_LIBRARY, else libdray.so.0 as the system finds it."""
from . import gpu, weights
from ._library import DrayError, library_path, version
from .queue import Queue, StreamDataLoader

__all__ = ["DrayError", "Queue", "StreamDataLoader", "gpu", "library_path", "version", "weights"]
