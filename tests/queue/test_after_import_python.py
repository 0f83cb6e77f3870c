"""What plug-ins do behind the import of a framework's module, which others may only look for first."""
import importlib
import importlib.abc
import importlib.util
import os
import sys
import tempfile
import unittest.mock

from begin import needs

with needs:
    import numpy  # noqa: F401

from dray.integrations import transfer_queue


class Hook(importlib.abc.MetaPathFinder):
    """Another one's finder, which looks for the module within its own look, and wraps the loader."""

    def __init__(self):
        self.looking = False

    def find_spec(self, name, path=None, target=None):
        if name != "transfer_queue" or self.looking:
            return None
        self.looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.looking = False
        spec.loader = Wrapped(spec.loader)
        return spec


class Wrapped(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)


def main(folder):
    os.mkdir(os.path.join(folder, "transfer_queue"))
    module = os.path.join(folder, "transfer_queue", "__init__.py")
    with open(module, "w", encoding="utf-8") as file:
        file.write("raise OSError('not yet')\n")
    sys.path.insert(0, folder)
    with unittest.mock.patch.object(transfer_queue, "register") as registered:
        for _ in range(2):
            assert importlib.util.find_spec("transfer_queue").origin == module
        try:
            importlib.import_module("transfer_queue")
            raise AssertionError("the module's own error")
        except OSError:
            pass
        registered.assert_not_called()
        with open(module, "w", encoding="utf-8") as file:
            file.write("here = True  # and of another length\n")
        importlib.invalidate_caches()
        found = importlib.import_module("transfer_queue")
        assert found.here and type(found.__spec__.loader).__name__ == "SourceFileLoader"
        registered.assert_called_once_with()
        importlib.reload(found)
        registered.assert_called_once_with()
        del sys.modules["transfer_queue"]
    for first in (True, False):
        mine, hook = transfer_queue._Behind(), Hook()
        sys.meta_path[:0] = [mine, hook] if first else [hook, mine]
        with unittest.mock.patch.object(transfer_queue, "register") as registered:
            assert importlib.import_module("transfer_queue").here
            registered.assert_called_once_with()
        sys.meta_path.remove(hook)
        del sys.modules["transfer_queue"]
    two = [transfer_queue._Behind(), transfer_queue._Behind()]  # as after a reload of the plug-in
    sys.meta_path[:0] = two
    with unittest.mock.patch.object(transfer_queue, "register") as registered:
        assert importlib.import_module("transfer_queue").here
        registered.assert_called()
    assert not set(two) & set(sys.meta_path)


with tempfile.TemporaryDirectory() as folder:
    main(folder)
print("ok")
