"""dray for Python: a thin layer over libdray's C ABI (ctypes; nothing to compile).

The library is $DRAY_LIBRARY, else that of the prefix where this package is installed, else
libdray.so.0 as the system finds it."""
import importlib

from . import gpu, trace, weights
from ._library import DrayError, DrayTimeout, library_path, version
from .lease import Lease
from .weights import Block, Publisher, Subscriber

__all__ = ["Batch", "Block", "Claim", "DrayError", "DrayTimeout", "Lease", "Publisher", "Queue", "Refill", "Role",
           "RunEnded", "Server", "StreamDataLoader", "Subscriber", "Task", "__version__", "adapters", "checkpoint", "gpu",
           "library_path", "program", "serve", "trace", "version", "weights"]

_MODULES = ("adapters", "checkpoint")
_LAZY = {"Queue": "queue", "Claim": "queue", "Refill": "queue", "Task": "queue",
         "StreamDataLoader": "loader", "Batch": "loader",
         "Role": "role", "RunEnded": "role",
         "Server": "server", "serve": "server", "program": "server"}


def __getattr__(name):
    """What needs numpy, or is seldom wanted, when it is asked for."""
    if name == "__version__":
        return version()
    if name in _LAZY:
        return getattr(importlib.import_module("." + _LAZY[name], __name__), name)
    if name in _MODULES:
        return importlib.import_module("." + name, __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
