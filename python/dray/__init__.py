"""dray for Python: a thin layer over libdray's C ABI (ctypes; nothing to compile).

The library is $DRAY_LIBRARY, else that of the prefix where this package is installed, else
libdray.so.0 as the system finds it."""
from . import gpu, weights
from ._library import DrayError, library_path, version

__all__ = ["DrayError", "Queue", "StreamDataLoader", "gpu", "library_path", "version", "weights"]


def __getattr__(name):
    """What needs numpy, when it is asked for."""
    if name in ("Queue", "StreamDataLoader"):
        from . import queue
        return getattr(queue, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
