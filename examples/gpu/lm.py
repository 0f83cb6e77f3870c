"""The model of this job, on the device that there is: a folder's (config.json, with or without weights), or the demo's from
scratch; and what both of its programs share."""
import argparse
import contextlib
import json
import os
import pathlib
import sys

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import dray

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "roles"))
from model import make_model  # noqa: E402 (of the demo)


def arguments(doc, **more):
    """--name VALUE each, (default, or all choices, what it is), beside those that both programs have."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--model", help="a folder with a config.json; weights that are not there are random")
    parser.add_argument("--dtype", help="of what is computed; bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    for name, (default, about) in more.items():
        kind = {"type": type(default), "default": default}
        if default is False:
            kind = {"action": "store_true"}
        elif isinstance(default, tuple):
            kind = {"choices": default, "default": default[0]}
        parser.add_argument("--" + name.replace("_", "-"), help=about, **kind)
    made = parser.parse_args()
    made.device = torch.device("cpu")
    if torch.cuda.is_available():
        made.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(made.device)
    torch.set_num_threads(made.threads)
    made.dtype = getattr(torch, made.dtype or ("bfloat16" if made.device.type == "cuda" else "float32"))
    return made


def make(job, options, dtype):
    """The same on all ranks: the seed is the job's."""
    if options.model is None:
        return make_model(job).to(options.device, dtype)
    folder = pathlib.Path(options.model)
    if any(folder.glob("*.safetensors")):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(options.device)
    torch.manual_seed(job["seed"])
    with options.device:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype).to(dtype)


def described(job, options):
    """The model without its numbers."""
    with torch.device("meta"):
        return make(job, argparse.Namespace(model=options.model, device=torch.device("meta")), options.dtype)


def config_json(model):
    kind = type(model).__name__.removeprefix("FSDP")
    return json.dumps(dict(model.config.to_dict(), architectures=[kind], torch_dtype="float32"))


def layers(model):
    """The modules that FSDP gathers one by one."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def log_probs(model, prompts, responses, temperature=1.0):
    """(log-probs of the responses' tokens, which of them are some), both of (rows, longest)."""
    before, behind = max(map(len, prompts)), max(map(len, responses))
    tokens = torch.zeros(len(prompts), before + behind, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, there, prompt, response in zip(tokens, mask, prompts, responses):
        place = slice(before - len(prompt), before + len(response))
        row[place] = torch.as_tensor([*prompt, *response])
        there[place] = 1
    tokens, mask = tokens.to(model.device), mask.to(model.device)
    logits = model(input_ids=tokens, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                   use_cache=False, logits_to_keep=behind + 1).logits[:, :-1].float() / temperature
    found = -F.cross_entropy(logits.flatten(0, 1), tokens[:, before:].flatten(), reduction="none")
    return found.view(len(prompts), behind), mask[:, before:].bool()


_released = set()  # tags of arenas


@contextlib.contextmanager
def turn(role, device, tag, drop=False):
    """The role's turn on the devices that others have, too; nothing where it shares none. The memory of the arena `tag` is
    there only meanwhile (drop: without its content)."""
    shared = "DRAY_LEASES" in os.environ and device.type == "cuda"
    with role.lease():
        if tag in _released:
            dray.gpu.resume(tag)
            _released.discard(tag)
        yield
        if shared:
            dray.gpu.release(tag, drop=drop)
            _released.add(tag)


def arena(device, tag):
    """Tensors that are made within can be released by turn()."""
    return dray.gpu.use_arena(tag) if "DRAY_LEASES" in os.environ and device.type == "cuda" else contextlib.nullcontext()
