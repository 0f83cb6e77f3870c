"""A recording of an engine's model against its own load_weights, all tensors by bytes, from memory that
held something else."""
import copy
import hashlib
import random
import time

import torch
from dray.record.module import tensors_of
from dray.weights import record


def noise(tensors, seed, only=None):
    generator = torch.Generator().manual_seed(seed)
    for name, t in tensors.items():
        if t.is_floating_point() and t.device.type == "cpu" and (only is None or name in only):
            values = torch.randn(t.shape, generator=generator)
            t.detach().copy_(values) if t.dtype.itemsize > 1 else t.detach().view(torch.uint8).fill_(7)


def bits(tensor):
    return hashlib.blake2b(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy()).digest() \
        if tensor.numel() else b""


def every(model):
    return {n: t for n, t in tensors_of(model).items() if t.layout == torch.strided and
            t.device.type == "cpu"}


def parameters(model):
    return dict(model.named_parameters())


def compared(model, checkpoint, load=None):
    """What came of it: numbers, and names with reasons. load: the loader, if more than load_weights."""
    load = load or model.load_weights
    noise(parameters(model), 1)
    before = {n: bits(t) for n, t in every(model).items()}
    begun = time.monotonic()
    recorded = record(load, checkpoint, into=model)
    seconds = time.monotonic() - begun
    changed = [n for n, t in every(model).items() if bits(t) != before.get(n)]
    load((n, t.clone()) for n, t in checkpoint.items())
    wanted = {n: t.detach().clone() for n, t in every(model).items()}
    known = set(recorded._found)
    written = {n for n, t in wanted.items() if bits(t) != before.get(n)}
    silent = [f"{n}: written by the loader, not recorded" for n in written - known
              if not recorded._read]
    noise(every(model), 2, known)
    for block in recorded.blocks:
        whole = checkpoint[block.name]
        block.tensor.copy_(whole[tuple(slice(s, s + n) for s, n in zip(block.start, block.tensor.shape))])
    recorded.fill()
    in_place = recorded.in_place
    now = every(model)
    silent += [f"{n}: differs" for n in in_place if bits(now[n]) != bits(wanted[n])]
    if recorded.load_tensors:
        load((n, checkpoint[n].clone()) for n in recorded.load_tensors)
        now = every(model)
    rest = [n for n in wanted if n not in in_place and bits(now[n]) != bits(wanted[n])]
    names = set(parameters(model))
    return {"seconds": seconds, "changed": changed, "silent": silent, "rest": rest,
            "in_place": len(names & set(in_place)), "written": len(names & (known | written)),
            "by_loader": recorded.by_loader, "load_tensors": dict(recorded._read),
            "blocks": sum(len(p.parts) for p in recorded._found.values())}


def planted(model, checkpoint, count, seed):
    """One element off, in as many recordings: how many certify() reports."""
    rng, found = random.Random(seed), 0
    true = record(model.load_weights, checkpoint)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        recorded = copy.copy(true)
        recorded._found = {n: p._replace(parts=list(p.parts)) for n, p in true._found.items()}
        name = rng.choice([n for n, p in recorded._found.items() if any(q.offset for q in p.parts)])
        parts = recorded._found[name].parts
        i = rng.choice([i for i, q in enumerate(parts) if q.offset])
        parts[i] = parts[i]._replace(offset=parts[i].offset - 1)
        with recorded.certify() as load:
            load((n, torch.randn(t.shape, generator=generator).to(t.dtype)) for n, t in checkpoint.items())
        found += name in recorded.by_loader
    return found
