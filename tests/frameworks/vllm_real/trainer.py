"""A rank of a trainer: transformers' module, sharded by FSDP2 over gloo, and vLLM beside it, which rank 0 starts.
trainer.py MODEL_TYPE FOLDER PLAIN VERSIONS, with torchrun's names in the environment."""
import json
import os
import pathlib
import subprocess
import sys
import unittest.mock
from multiprocessing.connection import Listener

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory, base
from vllm.model_executor.model_loader import reload
from vllm.plugins import load_general_plugins

import dray.integrations.vllm as integration
from dray.integrations.vllm import DrayTrainerInitInfo

PROMPTS, TOKENS = [[5, 7, 9, 11], [100, 3], [42, 41, 40, 39, 38, 37]], 12
HERE = pathlib.Path(__file__).resolve().parent
model_type, folder, plain, versions = *sys.argv[1:4], int(sys.argv[4])
# vLLM 0.32's latent attention on the CPU computes other tokens than transformers, out of the same checkpoint: those of
# such a model are compared, at the end, with vLLM's own from a checkpoint.
LATENT = model_type.startswith("deepseek")


class Engine:
    """vLLM in a process of its own; the client that its trainer engines speak to."""

    def __init__(self, number, folder=folder):
        path = f"{folder}/engine{number}"
        listener = Listener(path)
        self.process = subprocess.Popen([sys.executable, HERE / "engine.py", folder, path, plain])
        listener._listener._socket.settimeout(240)
        self._there = listener.accept()
        self._there.recv()
        listener.close()

    def __getattr__(self, name):
        def call(*arguments):
            self._there.send((name, arguments))
            value, failure = self._there.recv()
            if failure:
                raise RuntimeError(failure)
            return value
        return call

    def kill(self):
        self.process.kill()
        self.process.wait()
        self._there.close()


def no_gather(*_, **__):
    raise AssertionError("a tensor was gathered")


def written(parameter, name, version):
    """Writes this rank's part of a version's numbers; the whole of them."""
    generator = torch.Generator().manual_seed(version * 1000003 + sum(map(ord, name)))
    whole = torch.randn(parameter.shape, generator=generator) * 0.2 + ("norm" in name)
    local, part = parameter, whole
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
    local.copy_(part)
    return whole


def held(model):
    """What a checkpoint has of it: parameters, and biases of routers."""
    yield from model.named_parameters()
    yield from ((name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))


def refused(kind, words, what):
    try:
        what()
    except kind as failure:
        assert all(word in str(failure) for word in words), failure
        return
    raise AssertionError(f"not refused: {words}")


def errors(engine, model):
    """What is wrong is said by name, and changes nothing."""
    address = os.environ.pop("DRAY_ADDRESS")
    init = WeightTransferTrainerFactory.trainer_init
    refused(ValueError, ["DRAY_ADDRESS"], lambda: init(DrayTrainerInitInfo(rank=0, world=1), client=engine, source=model))
    os.environ["DRAY_ADDRESS"] = address
    with unittest.mock.patch.object(base.WeightTransferEngine, "__abstractmethods__", frozenset({"begin"})):
        refused(RuntimeError, ["0.32.0", "asks for begin", "start_weight_update"], integration.UPSTREAM.check)
    with unittest.mock.patch.object(reload, "initialize_layerwise_reload", lambda model, device: None):
        refused(RuntimeError, ["initialize_layerwise_reload takes model, device, expected model"], integration.UPSTREAM.check)
    if plain == "1":
        refused(RuntimeError, ["model.norm.weight", "(3,)"], lambda: engine.init_weight_transfer_engine(
            {"tensors": [["model.norm.weight", "float32", [3]]]}))
    refused(RuntimeError, ["tensors expected"], lambda: engine.init_weight_transfer_engine({}))
    engine.start_weight_update()
    refused(RuntimeError, ["init_weight_transfer_engine"], lambda: engine.update_weights({"version": 1}))


@torch.no_grad()
def greedy(model):
    """transformers' own tokens."""
    found = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        found.append(tokens[len(prompt):])
    return found


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    load_general_plugins()  # dray's among them, by its entry point
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval() if rank == 0 else None
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    DTensor.full_tensor = no_gather
    engine = None
    if rank == 0:
        engine = Engine(0)
        errors(engine, model)
    info = DrayTrainerInitInfo(rank=rank, config=None if model_type == "qwen2" else folder, timeout=120)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=engine, source=ModuleSource(model))
    seen = []
    for version in range(1, versions + 1):
        with torch.no_grad():
            whole = {name: written(p, name, version) for name, p in held(model)}
            if rank == 0:
                for name, p in held(reference):
                    p.copy_(whole[name])
                if version == 4:  # an engine dies, and another one joins
                    engine.kill()
                    engine = trainer.client = Engine(1)
                    trainer.init_engine()
        wanted = greedy(reference) if rank == 0 else None
        if rank == 0:
            before = engine.generate(PROMPTS, TOKENS)
            assert before != wanted, f"version {version}: the tokens were these before the update"
        trainer.send_weights()
        if rank == 0:
            found = engine.generate(PROMPTS, TOKENS)
            assert found != before, f"version {version}: the tokens are those of before the update"
            assert LATENT or found == wanted, f"version {version}: {wanted} expected of transformers, {found} came"
            report, left = engine.report()
            assert report["version"] == version
            seen.append(report["total_seconds"])
    if rank == 0 and LATENT:
        engine.kill()
        reference.save_pretrained(f"{folder}/saved")
        engine = Engine(9, f"{folder}/saved")
        wanted = engine.generate(PROMPTS, TOKENS)
        assert found == wanted, f"{wanted} expected of vLLM with the checkpoint, {found} came"
    if rank == 0:
        print(json.dumps({"model": model_type, "versions": len(seen), "left": left, "bytes": report["bytes"],
                          "seconds": [round(s, 4) for s in seen]}), flush=True)
        engine.kill()
    trainer.shutdown()
    dist.destroy_process_group()


main()
