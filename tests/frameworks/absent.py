"""For pytest (-p absent): stand-ins for packages, those that $ABSENT names, which a repository's modules import and the tests that are run
do not use, where they are not here."""
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
import unittest.mock

NAMES = os.environ["ABSENT"].split(",")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = self._missing
        return module

    def exec_module(self, module):
        module.__version__ = "99"

    @staticmethod
    def _missing(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return unittest.mock.MagicMock(name=name)


for name in ("torch", "transformers"):  # they look for what is not here, and find it not
    if name not in NAMES:
        importlib.import_module(name)
sys.meta_path.append(Absent())  # behind all others: what is here is taken
