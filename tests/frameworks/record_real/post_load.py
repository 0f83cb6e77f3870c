"""Recorded layouts of models that vLLM has loaded and made ready: they take new numbers in place where that is certified, and the rest
by load_weights within vLLM's layerwise reload, as dray's backend has them. All tensors by bytes, against a model that was loaded with
these numbers from the start. post_load.py MODEL_TYPE..., a line each."""
import sys
import tempfile

import vllm_engine  # before torch

import checkpoints
import compare
import torch
import vllm._custom_ops
from dray.integrations.rank import Load
from dray.integrations.vllm_engine import PastLoaders, Reload, kept_elsewhere, whole_modules
from dray.weights import record
from vllm.model_executor.layers import utils

CPU = torch.device("cpu")
vllm._custom_ops._supports_onednn = False  # as on GPUs: parameters lie as load_weights fills them
utils.check_cpu_sgl_kernel = lambda *_: False
torch.cpu._is_amx_tile_supported = torch.cpu._is_avx512_bf16_supported = lambda: False


def numbers(like, seed):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(t.shape, generator=generator).to(t.dtype) for n, t in like.items()}


def loaded(ranks, folder, checkpoint):
    """As vLLM starts."""
    model, config = ranks.model(folder)
    with vllm_engine.around(config):
        model.load_weights((n, t.clone()) for n, t in checkpoint.items())
        ranks.finish(model, config)
    return model, config


def tried(ranks, model_type, name, folder):
    """Two updates, of which the first certifies."""
    first = checkpoints.checkpoint(model_type, name, folder, 7)[1]
    model, config = loaded(ranks, folder, first)
    why, second, third = kept_elsewhere(model), numbers(first, 8), numbers(first, 9)

    reload = Reload(model, config.model_config, CPU, len(first))

    def by_load_weights(named, certificate=lambda: None):
        """Twice, where the first time finds modules that the reload does not wait for."""
        named = list(named)
        for _ in range(2):
            try:
                with Load(reload.load_weights, reload.begin, reload.end, certificate()) as load:
                    load(named)
                return
            except PastLoaders as found:
                print(found)

    def unlike(numbers):
        wanted, now = (compare.every(each) for each in (loaded(ranks, folder, numbers)[0], model))
        assert now.keys() == wanted.keys(), now.keys() ^ wanted.keys()
        return [n for n, t in wanted.items() if compare.bits(now[n]) != compare.bits(t)]

    with vllm_engine.around(config):
        reload.recorded = recorded = record(reload.load_weights, first, into=model)
        whole_modules(recorded)
        by_load_weights(second.items(), lambda: recorded.certify(reload.load_weights))
        whole_modules(recorded)
        bad = unlike(second)
        in_place = {} if why else recorded.in_place
        for block in recorded.blocks if in_place else ():
            block.tensor.copy_(third[block.name][tuple(slice(s, s + n) for s, n in zip(block.start, block.tensor.shape))])
        if in_place:
            recorded.fill()
        if left := list(recorded.load_tensors if in_place else third):
            by_load_weights((n, third[n]) for n in left)
        bad += unlike(third)
    print(f"{model_type}: {'DIFFERS ' + str(bad[:6]) if bad else 'equal'}, {len(in_place)} of {len(compare.every(model))} tensors in place; "
          f"{why or recorded.by_loader}", flush=True)
    return not bad


def main():
    ranks, wanted, well = vllm_engine.Ranks(1, 0), sys.argv[1:], True
    for model_type, name in checkpoints.architectures(("FOR_CAUSAL_LM_MAPPING",)):
        if model_type in wanted and vllm_engine.knows(name):
            with tempfile.TemporaryDirectory() as folder:
                well &= tried(ranks, model_type, name, folder)
            wanted.remove(model_type)
    assert not wanted, f"vLLM has none of {wanted}"
    sys.exit(not well)


main()
