"""A rank of a trainer: transformers' module, sharded by FSDP2 over gloo, and vLLM beside it, which rank 0 starts.
trainer.py MODEL_TYPE FOLDER PLAIN DRAFT VERSIONS, with torchrun's names in the environment."""
import json
import os
import pathlib
import sys
import unittest.mock
from multiprocessing.connection import Listener

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory, base
from vllm.model_executor.model_loader import reload
from vllm.plugins import load_general_plugins

import dray.integrations.vllm as integration
from dray.integrations import vllm_trainer
from dray.integrations.vllm import DrayTrainerInitInfo

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import fsdp2
from fsdp2 import refused
from warm import Warm

PROMPTS, TOKENS = [[5, 7, 9, 11], [100, 3], [42, 41, 40, 39, 38, 37]], 12
warm = Warm() if os.environ["RANK"] == "0" else None  # of the engines, while nothing but imports has been done
model_type, folder, plain, draft, versions = *sys.argv[1:5], int(sys.argv[5])
# vLLM 0.32's latent attention on the CPU computes other tokens than transformers, out of the same checkpoint: those of
# such a model are compared, at the end, with vLLM's own from a checkpoint.
LATENT = model_type.startswith("deepseek")
# {version: the level at which vLLM sleeps before it}. At 2 the weights are lost; at 1 they are as they were.
ASLEEP = {2: 2, 3: 1} if draft == "0" else {}


class Engine(fsdp2.Spoken):
    """vLLM in a process of its own; the client that its trainer engines speak to."""

    def __init__(self, number, folder=folder):
        path = f"{folder}/engine{number}"
        listener = Listener(path)
        self.process = warm.start(HERE / "engine.py", folder, path, plain, draft)
        listener._listener._socket.settimeout(240)
        super().__init__(listener.accept())
        self._there.recv()
        listener.close()

    def kill(self):
        warm.kill(self.process)
        self.close()


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
    if draft == "1":
        engine.start_draft_weight_update()
        refused(RuntimeError, ["init_weight_transfer_engine", "draft=True"], lambda: engine.update_weights({"version": 1}))
        refused(TypeError, ["start_draft_weight_update", "expected", "found object"], lambda: vllm_trainer.start_draft(object()))


def sleeps(engine, level, before):
    """The engine's memory for weights is back, and it generates nothing yet."""
    if level == 1:
        assert engine.sleep(1) and engine.wake_up(None)
        assert engine.generate(PROMPTS, TOKENS) == before, "the tokens are others behind a sleep"
    assert engine.sleep(level) and not engine.wake_up(["weights"])
    assert engine.is_lost() == (level == 2)


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
    load_general_plugins()  # dray's among them, by its entry point
    rank, model, reference = fsdp2.trainer(folder)
    engine = None
    if rank == 0:
        engine = Engine(0)
        errors(engine, model)
    info = DrayTrainerInitInfo(rank=rank, config=None if model_type == "qwen2" else folder, timeout=300)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=engine, source=ModuleSource(model))
    of_draft = draft == "1" and WeightTransferTrainerFactory.trainer_init(
        DrayTrainerInitInfo(rank=rank, draft=True, timeout=300), client=engine, source=ModuleSource(model))
    seen = []
    for version in range(1, versions + 1):
        fsdp2.write(model, reference, version)
        if rank == 0 and version == 4:  # an engine dies, and another one joins
            engine.kill()
            engine = trainer.client = Engine(1)
            trainer.init_engine()
        wanted = greedy(reference) if rank == 0 else None
        if rank == 0:
            before = engine.generate(PROMPTS, TOKENS)
            assert before != wanted, f"version {version}: the tokens were these before the update"
            if level := ASLEEP.get(version):
                sleeps(engine, level, before)
        trainer.send_weights()
        if rank == 0:
            assert not level or engine.wake_up(["kv_cache"])
            found = engine.generate(PROMPTS, TOKENS)
            assert found != before, f"version {version}: the tokens are those of before the update"
            assert LATENT or found == wanted, f"version {version}: {wanted} expected of transformers, {found} came"
            report, left = engine.report()
            assert report["version"] == version
            seen.append(report["total_seconds"])
        if draft == "1":
            assert rank or engine.unlike_draft(), f"version {version}: the draft model has it already"
            of_draft.send_weights()
            if rank == 0:
                assert engine.unlike_draft() == [], f"version {version}: the draft model has not got it"
                assert engine.generate(PROMPTS, TOKENS) == wanted
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
    if of_draft:
        of_draft.shutdown()
    dist.destroy_process_group()


main()
