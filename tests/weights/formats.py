"""The formats of quantised tensors as PyTorch computes them, after the packages that engines take them
from: torchao 0.18 (MXFP8, MXFP4), compressed-tensors 0.20 (NVFP4, INT4, INT4_ZERO), DeepGEMM at 38939a4
(DEEPGEMM). tests/frameworks/formats_real compares these formulas with the packages themselves.

Each function takes floats [..., rows, columns] and gives the parts by the ends of their names. What is
NaN is the positive quiet one, and of what has no number (a group with a NaN) elements are as dray has
them: the packages leave them to the processor."""
import torch

BLOCK, TENSOR, DEEPGEMM, MXFP8, MXFP4, NVFP4, INT4, INT4_ZERO = range(1, 9)
NAMES = {DEEPGEMM: "fp8-deepgemm", MXFP8: "mxfp8", MXFP4: "mxfp4", NVFP4: "nvfp4", INT4: "int4",
         INT4_ZERO: "int4-zero"}
NAN = float("nan")


def grouped(x, size):
    return x.unflatten(-1, (-1, size))


def pack(nibbles, per):
    """`per` elements of four bits beside each other, the first one's lowest."""
    shifts = 4 * torch.arange(per, dtype=torch.int64)
    whole = (grouped(nibbles.to(torch.int64), per) << shifts).sum(-1)
    return whole.to(torch.uint8) if per == 2 else whole.to(torch.int32)


def canonical(x):
    return torch.where(torch.isnan(x), torch.full_like(x, NAN), x)


def saturated(x):
    """F8E4M3 of floats, infinities as 448. PyTorch 2.13 converts them so, too; 2.11 makes NaNs of them (its pull
    request 178817)."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)


def e2m1(x):
    """Codes of f32 numbers, to nearest even; without signs."""
    a = x.abs()
    code = torch.zeros(x.shape, dtype=torch.int64)
    for edge, up in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False),
                     (3.5, True), (5.0, False)):
        code += (a >= edge) if up else (a > edge)
    return code


def deepgemm(x, block=(128, 128)):
    rows, columns = x.shape[-2:]
    down, across = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.zeros(x.shape[:-2] + (down * block[0], across * block[1]), dtype=x.dtype)
    padded[..., :rows, :columns] = x
    view = padded.unflatten(-1, (across, block[1])).unflatten(-3, (down, block[0]))
    amax = view.abs().float().amax(dim=(-1, -3), keepdim=True)
    bits = (amax.clamp(1e-4) / 448.0).view(torch.int)
    exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(1, 254)
    scale = (exponent << 23).view(torch.float)
    q = saturated(view * (1.0 / scale)).flatten(-4, -3).flatten(-2, -1)
    exponents = exponent.to(torch.uint8).flatten(-4, -3).flatten(-2, -1)
    exponents = exponents.repeat_interleave(block[0], -2)[..., :rows, :]
    return {"": q[..., :rows, :columns].contiguous(), "_scale_inv": exponents.contiguous()}


def mxfp8(x):
    view = grouped(x, 32)
    amax = view.abs().amax(-1, keepdim=True).float()
    descale = amax / 448.0
    bits = descale.view(torch.int)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    exponent = torch.where(descale < 2.0 ** -126, (descale > 2.0 ** -127).int(), exponent)
    exponent = torch.where(torch.isinf(descale), 254, exponent)
    exponent = torch.where(torch.isnan(descale), 255, exponent)
    factor = torch.exp2(127 - exponent.float())
    factor = torch.where(exponent == 0, 1.0, factor)
    factor = torch.where(exponent == 254, 2.0 ** -127, factor)
    factor = torch.where(exponent == 255, NAN, factor)
    y = (view.float() * factor).clamp(-448, 448)
    q = y.to(torch.float8_e4m3fn).view(torch.uint8)
    q = torch.where(torch.isnan(y), 0x7F, q.to(torch.int)).to(torch.uint8)
    return {"": q.flatten(-2, -1).view(torch.float8_e4m3fn),
            "_scale": exponent.to(torch.uint8).squeeze(-1)}


def mxfp4(x):
    view = grouped(x, 32).float()
    amax = view.abs().amax(-1, keepdim=True)
    exponent = ((((amax.view(torch.int) + 0x200000) & 0x7F800000) >> 23) - 2).clamp(min=0)
    scale = (exponent.clamp(min=1) << 23).view(torch.float)
    y = view / torch.where(torch.isnan(amax), float("inf"), scale)
    code = e2m1(y) | (torch.signbit(y).long() << 3)
    code = torch.where(torch.isnan(y), 3, code)
    exponent = torch.where(torch.isnan(amax), 255, exponent)
    return {"_packed": pack(code.flatten(-2, -1), 2),
            "_scale": exponent.to(torch.uint8).squeeze(-1)}


def global_scale(tensors, dtype):
    """Of all tensors that share it."""
    amax = torch.stack([x.to(dtype).abs().max() for x in tensors]).max()
    amax = torch.clamp(amax, min=torch.finfo(dtype).tiny)
    scale = 448.0 * 6.0 / amax
    return torch.nan_to_num(scale, nan=1.0, posinf=1.0, neginf=1.0).float().reshape([1])


def nvfp4(x, dtype, shared=None):
    whole = global_scale(shared or [x], dtype)
    view = grouped(x.to(dtype), 16)
    local = view.abs().amax(-1, keepdim=True) / torch.tensor(6.0, dtype=dtype)
    scaled = whole * local
    stored = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
    value = stored.float()
    zero = value == 0
    value = torch.where(zero, 0.125, value)
    code = torch.where(torch.isnan(scaled), 0x7F, stored.view(torch.uint8).int())
    code = torch.where(zero, 0x20, code).to(torch.uint8)
    y = (view / (value / whole)).clamp(-6, 6)
    q = e2m1(y) | ((y < 0).long() << 3)
    q = torch.where(torch.isnan(y), 0, q)
    return {"_packed": pack(q.flatten(-2, -1), 2),
            "_scale": code.squeeze(-1).view(torch.float8_e4m3fn), "_global_scale": whole}


def four_bits(y):
    """Numbers of -8 to 7, plus 8; a NaN as 0 is."""
    return torch.where(torch.isnan(y), 0, y.clamp(-8, 7).round()).long() + 8


def int4(x, dtype, group):
    view = grouped(x.to(dtype), group)
    amax = view.abs().amax(-1, keepdim=True)
    scale = amax / torch.tensor(7.5, dtype=dtype)
    scale = torch.where(scale == 0, torch.tensor(torch.finfo(dtype).eps, dtype=dtype), scale)
    return {"_packed": pack(four_bits(view / scale).flatten(-2, -1), 8),
            "_scale": canonical(scale).squeeze(-1)}


def int4_zero(x, dtype, group):
    view = grouped(x.to(dtype), group)
    low = view.amin(-1, keepdim=True).clamp(max=0)
    high = view.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low) / torch.tensor(15.0, dtype=dtype)
    zero = torch.tensor(-8.0) - low / scale
    zero = torch.where(torch.isnan(zero), 0, zero.clamp(-8, 7).round()).to(dtype)
    scale = torch.where(scale == 0, torch.tensor(torch.finfo(dtype).eps, dtype=dtype), scale)
    y = view / scale + zero
    zeros = four_bits(zero).squeeze(-1)
    rows = zeros.shape[-2]
    padded = torch.zeros(zeros.shape[:-2] + (-(-rows // 8) * 8, zeros.shape[-1]), dtype=torch.int64)
    padded[..., :rows, :] = zeros
    return {"_packed": pack(four_bits(y).flatten(-2, -1), 8),
            "_scale": canonical(scale).squeeze(-1),
            "_zero_point": pack(padded.mT, 8).mT.contiguous()}


def quantise(kind, x, dtype=torch.bfloat16, block=(128, 128), shared=None):
    if kind == DEEPGEMM:
        return deepgemm(x, block)
    if kind == NVFP4:
        return nvfp4(x, dtype, shared)
    if kind in (INT4, INT4_ZERO):
        return (int4 if kind == INT4 else int4_zero)(x, dtype, block[1])
    return (mxfp8 if kind == MXFP8 else mxfp4)(x)


def near_ties(kind, shape, group, generator):
    """f32 numbers whose quotients by their group's scale are a few units in the last place from where the code
    changes: what takes products with the inverse of a scale for quotients gets some of them wrong."""
    most = 1 + torch.rand([], generator=generator)  # of every group, so that all have one scale
    edges = torch.arange(0.5, 7) if kind == INT4 else torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    by = most / 7.5 if kind == INT4 else 448 / global_scale([most], torch.float32)
    x = by * edges[torch.randint(0, len(edges), shape, generator=generator)]
    x = (x.view(torch.int32) + torch.randint(-2, 3, shape, generator=generator, dtype=torch.int32)).view(torch.float32)
    x[..., ::group] = most
    return x * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)


def special(x):
    """Rows of numbers at the edges; x: [rows, columns], at least 8 x 32."""
    x = x.clone()
    x[0] = 0
    x[1] = -0.0
    x[2] *= 1e-38
    x[3] = x[3].sign() * 3e38 if x.dtype != torch.float16 else x[3].sign() * 65504
    x[4] = torch.linspace(-6, 6, x.shape[1]).to(x.dtype)
    x[5, ::7] = -0.0
    x[6, 0] = float("inf")
    x[6, 1] = -float("inf")
    x[7, 0] = NAN
    x[7, 1:3] = x[7, 1:3].abs()
    return x
