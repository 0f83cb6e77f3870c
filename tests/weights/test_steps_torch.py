"""How many bytes a delta of a checkpoint takes when 1 % of all elements changed: to random values, and by a step of
PyTorch's AdamW on f32 masters of a bf16 model. Beside them the bounds: the entropy of where elements changed, and of
what they became (random: all bits; AdamW: how far they moved). What is read back is what was saved, bit for bit."""
import ctypes as c
import math
import os
import sys
import tempfile

from begin import needs, seed

with needs:
    import torch

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "model"))
import dray

# dray's number of a dtype, and the dtype
BF16, F16, F32 = (3, torch.bfloat16), (4, torch.float16), (2, torch.float32)
BITS = {2: torch.int16, 4: torch.int32}


def with_memory(state, code, work):
    """Calls work(layout, regions) on memory that holds the tensors, which is then what it holds."""
    layout, regions = dray.Layout(), (c.c_void_p * (len(state) + 1))()
    for i, (name, array) in enumerate(state.items()):
        bytes_of = array.numel() * array.element_size()
        tensor = layout.add_tensor(name, code, list(array.shape))
        region = layout.add_region(bytes_of)
        dray.call(dray.lib.dray_layout_add_dense, layout.handle, tensor, region, dray.i64s([0] * array.ndim),
                  dray.i64s(array.shape), c.c_uint64(0))
        out = c.c_void_p()
        dray.call(dray.lib.dray_region_wrap, c.c_void_p(array.data_ptr()), c.c_uint64(bytes_of), b"r", c.byref(out))
        regions[i] = out
    try:
        work(layout, regions)
    finally:
        for i in range(len(state)):
            dray.lib.dray_region_free(c.c_void_p(regions[i]))


def delta_of(before, after, code):
    """Share of the bytes that the files of the delta take."""
    with tempfile.TemporaryDirectory() as folder:
        for version, state in ((1, before), (2, after)):
            options = dray.CheckpointOptions(size=c.sizeof(dray.CheckpointOptions), version=version, keep=2, deltas=4)
            with_memory(state, code, lambda layout, regions: dray.call(
                dray.lib.dray_checkpoint_save, None, os.fsencode(folder), layout.handle, regions, c.byref(options)))
        path = os.path.join(folder, "step-000002")
        held = {name: torch.zeros_like(array) for name, array in after.items()}
        with_memory(held, code, lambda layout, regions: dray.call(
            dray.lib.dray_checkpoint_read, os.fsencode(path), layout.handle, regions))
        for name, array in after.items():
            kind = BITS[array.element_size()]
            assert torch.equal(held[name].view(kind), array.view(kind)), name
        assert os.path.exists(os.path.join(path, "delta.json"))
        size = os.path.getsize(os.path.join(path, "model.safetensors"))
    return size / sum(array.numel() * array.element_size() for array in after.values())


def bits_of(state):
    return torch.cat([array.view(BITS[array.element_size()]).flatten() for array in state.values()]).long()


def ordered(bits, width):
    """Signed bits in the order of the floats that they are."""
    low = -(1 << width - 1)
    return torch.where(bits < 0, low - bits - 1, bits)


def entropy(share):
    return -(share * math.log2(share) + (1 - share) * math.log2(1 - share))


def bound(before, after, random):
    """Of all bits, those that nobody can foresee; and the share that changed."""
    was, now = bits_of(before), bits_of(after)
    width = 8 * next(iter(after.values())).element_size()
    changed = was != now
    share = changed.double().mean().item()
    what = float(width)
    if not random:
        steps = (ordered(now, width) - ordered(was, width))[changed]
        counts = torch.unique(steps, return_counts=True)[1].double()
        what = -(counts / counts.sum() * (counts / counts.sum()).log2()).sum().item()
    return (entropy(share) + share * what) / width, share


def randomly(state, share):
    after = {}
    for name, array in state.items():
        kind = BITS[array.element_size()]
        bits = array.clone().view(kind)
        low = -(1 << 8 * array.element_size() - 1)
        other = torch.randint(low, -low, bits.shape, dtype=torch.int64).to(kind)
        after[name] = torch.where(torch.rand(bits.shape) < share, other, bits).view(array.dtype)
    return after


def model():
    layers = [torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1024), torch.nn.GELU(),
              torch.nn.Linear(1024, 256)]
    for layer in layers[::2]:
        torch.nn.init.normal_(layer.weight, 0, 0.02)
    return torch.nn.Sequential(*layers)


def adamw(dtype, rate):
    """The weights as engines get them, before and after one step of many."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    x, y = torch.randn(256, 256), torch.randn(256, 256)
    held = []
    for step in range(41):
        rows = torch.randint(0, 256, (32,))
        optimizer.zero_grad()
        ((net(x[rows]) - y[rows]) ** 2).mean().backward()
        held = held[-1:] + [{n: p.detach().to(dtype).clone() for n, p in net.named_parameters()}]
        optimizer.step()
    return held


def of_one_percent(dtype, rate):
    """The same at a learning rate at which about 1 % of all elements change: found by one that is near."""
    return adamw(dtype, rate * 0.01 / bound(*adamw(dtype, rate), False)[1])


def check(what, before, after, code, random, most):
    limit, share = bound(before, after, random)
    taken = delta_of(before, after, code)
    print(f"{what}: {100 * share:.2f} % changed, delta {100 * taken:.3f} % of the bytes, bound {100 * limit:.3f} %, "
          f"{taken / limit:.2f} of it")
    assert taken <= most * limit, (what, taken, limit)
    return taken, share


torch.manual_seed(seed)
weights = {name: p.detach() for name, p in model().named_parameters()}
as_bf16 = {name: array.to(torch.bfloat16) for name, array in weights.items()}
taken, share = check("random, bf16", as_bf16, randomly(as_bf16, 0.01), BF16[0], True, 1.06)
assert taken <= 0.016, taken
check("random, f32", weights, randomly(weights, 0.01), F32[0], True, 1.06)
taken, share = check("AdamW, bf16", *of_one_percent(BF16[1], 6e-7), BF16[0], False, 1.3)
assert 0.008 < share < 0.0125 and taken <= 0.008 * max(1, share / 0.01), (share, taken)
check("AdamW, f16", *of_one_percent(F16[1], 7e-8), F16[0], False, 1.4)
few = {name: torch.where(torch.rand(array.shape) < 0.01, torch.nextafter(array, torch.ones_like(array)), array)
       for name, array in weights.items()}
check("one step up, f32", weights, few, F32[0], False, 1.5)
