"""What a plug-in needs of the framework that it is for, and where the installed version differs from the one that
was tried."""
from __future__ import annotations

import importlib
import inspect
import sys
import threading
from typing import Mapping, NamedTuple


class Upstream(NamedTuple):
    name: str
    package: str
    tried: str                 # the version
    methods: Mapping           # {(module, path): names of the arguments that the plug-in gives, or is given}
    abstract: Mapping = {}     # {(module, class): names of what the plug-in defines for it}

    def differences(self) -> list:
        """Where this version is not the one that the plug-in was written for, in words; []: nowhere."""
        found = []
        for (module, path), wanted in self.methods.items():
            try:
                what = _at(module, path)
            except (ImportError, AttributeError):
                found.append(f"{module} has no {path}")
                continue
            given = list(inspect.signature(what).parameters)
            if given != wanted:
                found.append(f"{path} takes {_listed(given)}, expected {_listed(wanted)}")
        for (module, name), wanted in self.abstract.items():
            try:
                given = set(getattr(_at(module, name), "__abstractmethods__", ()))
            except (ImportError, AttributeError):
                continue  # told above, by its methods
            if given != wanted:
                found.append(f"{name} asks for {_listed(sorted(given))}, expected {_listed(sorted(wanted))}")
        return found

    def check(self) -> None:
        """RuntimeError, which says how this version differs from the one that was tried."""
        if found := self.differences():
            here = getattr(importlib.import_module(self.package), "__version__", "of no version")
            raise RuntimeError(f"dray's plug-in was tried with {self.name} {self.tried}, and {self.name} {here} differs "
                               f"from that: {'; '.join(found)}")


_looking: set = set()  # finders that look for a module now, and their threads


def spec_of_others(finder, name, path, target):
    """The module's spec as the other finders of sys.meta_path have it; None: they have none, or one of them asks
    within the look of this finder."""
    look = (id(finder), threading.get_ident())
    if look in _looking:
        return None
    _looking.add(look)
    try:
        for other in sys.meta_path:
            if other is not finder and hasattr(other, "find_spec"):
                spec = other.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None
    finally:
        _looking.discard(look)


def _at(module, path):
    what = importlib.import_module(module)
    for part in path.split("."):
        what = getattr(what, part)
    return what


def _listed(names):
    return ", ".join(names) or "nothing"
