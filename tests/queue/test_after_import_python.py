"""What plug-ins do behind the import of a framework's module, which others may only look for first."""
import importlib
import importlib.util
import os
import sys
import tempfile
import unittest.mock

from begin import needs

with needs:
    import numpy  # noqa: F401

from dray.integrations import transfer_queue


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


with tempfile.TemporaryDirectory() as folder:
    main(folder)
print("ok")
