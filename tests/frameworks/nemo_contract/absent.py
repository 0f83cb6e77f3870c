"""For pytest: packages that NeMo-RL's modules import and their tests of checkpoint engines do not use, where they are not here."""
import importlib.abc
import importlib.machinery
import sys
import types
import unittest.mock

NAMES = ("vllm", "uvicorn", "fastapi", "starlette", "pynvml", "openai", "megatron", "nemo_automodel", "wandb", "mlflow", "swanlab",
         "tensorboard", "nixl", "cupy", "hydra", "omegaconf", "datasets", "torchdata", "accelerate", "peft", "aiohttp", "psutil",
         "matplotlib", "plotly", "nemo_gym", "decord", "torchvision", "requests", "math_verify", "debugpy", "nvtx")


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
        module.__version__ = "0"

    @staticmethod
    def _missing(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return unittest.mock.MagicMock(name=name)


import torch  # noqa: E402, F401  (they look for what is not here, and find it not)
import transformers  # noqa: E402, F401
sys.meta_path.append(Absent())  # behind all others: what is here is taken
