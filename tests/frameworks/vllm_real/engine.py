"""An engine of vLLM, which does what comes through a socket: engine.py FOLDER SOCKET PLAIN DRAFT. PLAIN 1: parameters lie
as load_weights fills them, as on GPUs; 0: the CPU's kernels keep them in forms of their own. DRAFT 1: with a draft model,
which is of the same kind."""
import glob
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING", VLLM_CPU_KVCACHE_SPACE="1")
from multiprocessing.connection import Client

import torch
import vllm._custom_ops
from fsdp2 import serve
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig
from vllm.model_executor.layers import utils

folder, socket, plain, draft = sys.argv[1:]
torch.cpu._is_amx_tile_supported = lambda: False  # where a CPU has AMX, vLLM's attention of DeepSeek-V3 takes no float32
if plain == "1":
    vllm._custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False

llm = LLM(folder, load_format="auto" if glob.glob(f"{folder}/*.safetensors") else "dummy", dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64,
          max_num_seqs=4, weight_transfer_config=WeightTransferConfig(backend="dray"), speculative_config=
          {"method": "draft_model", "model": folder, "num_speculative_tokens": 2} if draft == "1" else None)
worker = llm.llm_engine.model_executor.driver_worker.worker


def generate(prompts, count):
    done = llm.generate([{"prompt_token_ids": p} for p in prompts],
                        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False), use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in done]


def report():
    """Of the last update; why tensors went by load_weights."""
    engine = worker.weight_transfer_engine
    return engine.report, engine.left


def unlike_draft():
    """Names of parameters in which the draft model is not the model."""
    of = dict(worker.get_draft_model().named_parameters())
    return [name for name, p in worker.get_model().named_parameters() if not torch.equal(p, of[name])]


class Sleep:
    """What vLLM's worker for GPUs does in its sleep, where the one for CPUs ignores it: at level 2 the weights' memory is lost,
    and only buffers are kept."""

    def __init__(self):
        self.kept = None
        worker.sleep, worker.wake_up = self.sleep, self.wake_up

    @torch.no_grad()
    def sleep(self, level=1):
        if level == 2:
            model = worker.get_model()
            self.kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
            for lost in (*model.parameters(), *model.buffers()):
                lost.fill_(torch.nan if lost.is_floating_point() else 0)

    @torch.no_grad()
    def wake_up(self, tags=None):
        if self.kept and (tags is None or "weights" in tags):
            for name, buffer in worker.get_model().named_buffers():
                buffer.copy_(self.kept[name])
            self.kept = None


Sleep()


def is_lost():
    return all(p.isnan().all() for p in worker.get_model().parameters())


def sleep(level):
    llm.sleep(level=level)
    return llm.llm_engine.is_sleeping()


def update_weights(update_info):
    llm.update_weights({"update_info": update_info})


def init_weight_transfer_engine(init_info):
    llm.init_weight_transfer_engine({"init_info": init_info})


known = {f.__name__: f for f in (generate, report, unlike_draft, is_lost, sleep, llm.wake_up, update_weights, init_weight_transfer_engine, llm.start_weight_update,
                                 llm.start_draft_weight_update, llm.finish_weight_update)}
with Client(socket) as trainer:
    trainer.send("ready")
    serve(trainer, known)
