"""What the processes of verl_real are made of: a platform of verl's for a machine without a GPU, verl's own trainer whose
weights are written by hand, and a rollout's adapter that only compares what it is given. $VERL_USE_EXTERNAL_MODULES names
this module."""
import contextlib
import os
import pathlib

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _constant(value):
    return lambda self, *_, **__: value


for _name in ("empty_cache", "memory_allocated", "memory_reserved"):  # which verl asks without looking for a GPU
    setattr(torch.cpu, _name, lambda: 0)

PlatformRegistry.register("cpu")(type("PlatformCPU", (PlatformBase,), {
    **{name: _constant(None) for name in PlatformBase.__abstractmethods__},
    "device_name": "cpu", "vendor_name": "none", "device_module": torch.cpu,
    "is_available": _constant(True), "current_device": _constant("cpu"), "device_count": _constant(1),
    "communication_backend_name": _constant("gloo"), "visible_devices_envvar": _constant("CUDA_VISIBLEtorch.cpuS"),
    "ray_resource_name": _constant("CPU"), "ray_noset_envvars": _constant([]),
    "nvtx_range": _constant(contextlib.nullcontext()), "is_ipc_supported": _constant(False)}))


def numbers(name, shape, step):
    """What a tensor holds after a step."""
    generator = torch.Generator().manual_seed(step * 1000003 + sum(map(ord, name)))
    return torch.randn(shape, generator=generator) * 0.2


class Adapter:
    """In the place of vLLM's and SGLang's: compares each tensor with what the step's numbers are. dies: a file; while it
    is there, the worker that takes it away ends in the middle of an update."""
    replica_rank, is_leader_rank = 0, True

    def __init__(self, shapes, dies):
        self._shapes, self._dies = shapes, pathlib.Path(dies)

    async def update_weights(self, weights, global_steps=None, wire_format="named_tensors"):
        assert wire_format == "named_tensors"
        came = {}
        async for name, tensor in weights:
            came[name] = tensor.clone()
            if len(came) == 5 and self._dies.exists():
                self._dies.unlink()
                os._exit(9)
        assert {name: tuple(t.shape) for name, t in came.items()} == self._shapes, "other tensors came"
        for name, tensor in came.items():
            assert torch.equal(tensor, numbers(name, tensor.shape, global_steps)), f"step {global_steps}: {name}"


def trainer_class():
    """verl's worker. Its import is the driver's and the workers' alone: verl finds its platform by it."""
    import ray
    from torch.distributed.tensor import DTensor, distribute_tensor
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.workers.engine_workers import ActorRolloutRefWorker

    class Trainer(ActorRolloutRefWorker):
        def __init__(self, *arguments, **options):
            torch.distributed.init_process_group("gloo")  # verl asks for a GPU's backend beside the CPU's
            super().__init__(*arguments, **options)

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def write(self, step):
            """Writes a step's numbers; the bytes of this rank's shards."""
            with torch.no_grad():
                held = 0
                for name, parameter in self.actor.engine.module.state_dict().items():
                    whole = numbers(name, parameter.shape, step)
                    if isinstance(parameter, DTensor):
                        part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
                        parameter.to_local().copy_(part.to_local())
                        held += part.to_local().nbytes
                    else:
                        parameter.copy_(whole)
                return held

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def forbid_gathering(self):
            def no_gather(*_, **__):
                raise AssertionError("a tensor was gathered")
            DTensor.full_tensor = DTensor.redistribute = no_gather
            return type(self.actor.engine).__name__

    return ray.remote(Trainer)
