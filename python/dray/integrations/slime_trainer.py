"""A rank of slime's trainer that hands Megatron-Core's parameters to SGLang as they lie: nothing is gathered or
converted."""
from __future__ import annotations

import importlib
import time
import uuid
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from .. import weights
from ..parameters import local
from ..record.source import megatron_shards, record_source
from .published import Options, Published
from .ray_engines import RayEngines
from .slime import _MEGATRON

QUANTISED = ("fp8", "compressed-tensors")  # by slime, before it sends
TIMEOUT = 600.0


class Shard:
    """A parameter as megatron_shards asks for it: cut as slime's own gathering takes it to be. now: where it is."""

    def __init__(self, name, parameter, now):
        self.shape, self.now = parameter.shape, now
        whole = "expert_bias" in name or getattr(parameter, "parallel_mode", None) == "duplicated"
        self.tensor_model_parallel = not whole and getattr(parameter, "tensor_model_parallel", False)
        self.partition_dim = getattr(parameter, "partition_dim", -1)
        if "linear_fc2.weight" in name and self.partition_dim == 0:
            self.partition_dim = 1  # of Megatron's grouped experts
        stride = getattr(parameter, "partition_stride", 1)
        if self.tensor_model_parallel and stride != 1 and not (stride == 2 and "linear_fc1" in name):
            raise NotImplementedError(f"{name}: partition_stride 1 expected (2 for linear_fc1), found {stride}")

    def detach(self):
        return self.now().detach()


def source(args, model, weights_getter, model_name):
    """This rank's parameters as the checkpoint's tensors: what slime's own conversion makes of them, recorded."""
    common = importlib.import_module(f"{_MEGATRON}.update_weight.common")
    to_hf = importlib.import_module(f"{_MEGATRON}.megatron_to_hf")
    kept = getattr(args, "colocate", False) or getattr(args, "offload_train", False)  # parameters leave the GPU in turns

    def now(name, parameter):
        return lambda: weights_getter()[name] if kept else parameter.data

    parts = {False: [], True: []}
    for name, parameter in common.named_params_and_buffers(args, model):
        parts[".experts." in name].append((name, Shard(name, parameter, now(name, parameter))))
    dense = megatron_shards(parts[False], mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank())
    experts = megatron_shards(parts[True], mpu.get_expert_tensor_parallel_world_size(),
                              mpu.get_expert_tensor_parallel_rank()) if parts[True] else []

    def convert(named):
        for name, tensor in named:
            yield from to_hf.convert_to_hf(args, model_name, name, tensor, None)

    return record_source(convert, dense + experts)


class DrayWeightUpdater:
    """What slime's actor makes in the place of its UpdateWeightFromDistributed and UpdateWeightFromTensor. weight_version:
    the last that was published, or that was to be."""

    def __init__(self, args, model, weights_getter, *, model_name, quantization_config) -> None:
        method = (quantization_config or {}).get("quant_method")
        if method in QUANTISED:
            raise NotImplementedError(f"dray: engines of unquantised weights expected, found quant_method {method}, which "
                                      "slime quantises on the way: leave --custom-megatron-init-path out")
        self.args, self.weight_version, self.update_weight_metrics = args, 0, {}
        self._of = args, model, weights_getter, model_name
        self._published = self._engines = None

    def pop_metrics(self) -> dict:
        found, self.update_weight_metrics = self.update_weight_metrics, {}
        return found

    def connect_rollout_engines(self, rollout_engines, rollout_engine_lock=None, engine_gpu_counts=None,
                                engine_gpu_offsets=None, engine_parallel_configs=None) -> None:
        """On all ranks. Engines that are new are told what is published; their ranks record where they want it."""
        if self._published is None:
            self._open()
        counts = engine_gpu_counts or [self.args.rollout_num_gpus_per_engine] * len(rollout_engines)
        self._together(lambda: self._engines.connect(rollout_engines, counts, self._published.handshake))

    def _open(self) -> None:
        """On all ranks."""
        made: Any = None

        def describe():
            nonlocal made
            made = source(*self._of)
            return {name: (tuple(block.shape), local(block)[0].dtype) for name, block in made.pairs()}

        tensors = {name: of for each in self._everywhere(describe) for name, of in each.items()}  # of the checkpoint

        def publisher():
            self._published = Published(made, dist.get_rank(), Options(dist.get_world_size(), timeout=TIMEOUT,
                                                                       tensors=tensors), "slime")
        try:
            self._everywhere(publisher)
        except BaseException:
            if self._published is not None:  # all ranks open anew
                self._published.close()
            self._published = None
            raise
        self._engines = RayEngines(f"slime-{uuid.uuid4().hex[:16]}")

    def _everywhere(self, what: Any) -> list:
        """On all ranks: what(); returns what each of them returned. Where it fails on one, all ranks raise."""
        told, failure = (None, None), None
        try:
            told = what(), None
        except Exception as error:  # told to all ranks
            told, failure = (None, f"rank {dist.get_rank()}: {type(error).__name__}: {error}"), error
        there: list = [None] * dist.get_world_size()
        dist.all_gather_object(there, told, group=_gloo())
        if failures := [why for _, why in there if why]:
            raise RuntimeError(f"dray, weight version {self.weight_version}: {'; '.join(failures)}") from failure
        return [found for found, _ in there]

    def disconnect_rollout_engines(self) -> None:
        """Nothing: no process group was made."""

    def _together(self, what: Any) -> None:
        """On rank 0: what(). Where it fails, all ranks raise."""
        failure = [None]
        if dist.get_rank() == 0:
            try:
                what()
            except Exception as error:  # told to all ranks
                failure = [f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(failure, src=0, group=_gloo())
        if failure[0] is not None:
            raise RuntimeError(f"dray, weight version {self.weight_version}: {failure[0]}")

    @torch.no_grad()
    def update_weights(self) -> None:
        """On all ranks: publishes, has all engines take it while they pause, and returns when nobody reads any more. Where
        one fails, all ranks raise, and that engine goes on with the version that it holds."""
        begun = time.monotonic()
        version = self.weight_version = self.weight_version + 1  # no number is published twice, whatever fails
        try:
            self._everywhere(lambda: self._published.publisher.publish(version))
            self._together(lambda: self._engines.update(version))
        finally:
            self._published.publisher.wait()  # for the last that this rank has published
        self.update_weight_metrics["dray/update_seconds"] = time.monotonic() - begun


def _gloo():
    return importlib.import_module("slime.utils.distributed_utils").get_gloo_group()
