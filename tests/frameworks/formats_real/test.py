"""tests/weights/formats.py, with which the formats that dray makes are compared bit for bit, against the packages themselves:
torchao (MXFP8, MXFP4), compressed-tensors (NVFP4, INT4 symmetric and asymmetric, and MXFP4's numbers above 2^-124), DeepGEMM's
formulas in PyTorch as its own tests have them. Random tensors of every dtype, with rows of zeros, denormals, the largest numbers,
infinities and NaN."""
import os
import pathlib
import random
import sys

import torch

sys.path.insert(0, str(pathlib.Path(os.environ["DRAY_SOURCE_DIR"]) / "tests/weights"))
import formats
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

SEED = int(os.environ.get("DRAY_TEST_SEED", random.randrange(1 << 32)))
ROUNDS = 400 if os.environ.get("DRAY_SOAK") else 40
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
compared = 0


def bits(x):
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def same(what, ours, theirs, numbers=None):
    """numbers: where they are numbers; what has none is not compared."""
    global compared
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (what, ours.shape, theirs.shape, ours.dtype, theirs.dtype)
    differ = bits(ours) != bits(theirs)
    if numbers is not None:
        differ &= numbers
    assert not differ.any(), "%s: %d of %d, first at %s: %s, not %s (seed %d)" % (
        what, differ.sum(), differ.numel(), differ.nonzero()[0].tolist(), bits(ours)[differ][0], bits(theirs)[differ][0], SEED)
    compared += differ.numel()


def of_elements(groups, times):
    return groups.repeat_interleave(times, -1)


def torchao(kind, x):
    elements, mode = ((torch.float8_e4m3fn, ScaleCalculationMode.RCEIL) if kind == formats.MXFP8
                      else (torch.float4_e2m1fn_x2, ScaleCalculationMode.EVEN))
    scale, data = to_mx(x, elements, 32, mode)
    return data if kind == formats.MXFP8 else data.view(torch.uint8), scale.view(torch.uint8)


def check_mx(kind, x):
    ours = formats.quantise(kind, x)
    data, scale = torchao(kind, x)
    same(formats.NAMES[kind] + " scale", ours["_scale"], scale)
    numbers = of_elements(scale != 255, 32 if kind == formats.MXFP8 else 16)
    same(formats.NAMES[kind], ours["" if kind == formats.MXFP8 else "_packed"], data, numbers)


def args_of(**settings):
    args = QuantizationArgs(**settings)
    return args, QuantizationScheme(targets=["Linear"], weights=args)


def qparams(x, args, group, whole=None):
    view = x.unflatten(-1, (-1, group))
    return calculate_qparams(view.amin(-1), view.amax(-1), args, global_scale=whole)


def check_mxfp4(x):
    """compressed-tensors' own: of finite groups that are neither tiny nor about to overflow, but for the sign of zeros."""
    x = torch.where(x == 0, 0, x)
    args, scheme = args_of(num_bits=4, type="float", symmetric=True, strategy="group", group_size=32, scale_dtype=torch.uint8)
    scale, _ = qparams(x, args, 32)
    theirs = MXFP4PackedCompressor.compress({"weight": x, "weight_scale": scale}, scheme)
    ours = formats.mxfp4(x)
    amax = x.float().unflatten(-1, (-1, 32)).abs().amax(-1)
    fine = (amax >= 2.0 ** -120) & (amax < 2.0 ** 126)
    same("mxfp4 scale of compressed-tensors", ours["_scale"], theirs["weight_scale"], fine)
    same("mxfp4 of compressed-tensors", ours["_packed"], theirs["weight_packed"], of_elements(fine, 16))


def check_nvfp4(x, dtype):
    x = x.to(dtype)
    args, scheme = args_of(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16,
                           scale_dtype=torch.float8_e4m3fn)
    whole = generate_gparam(x.min(), x.max())
    scale, _ = qparams(x, args, 16, whole)
    theirs = NVFP4PackedCompressor.compress({"weight": x, "weight_scale": scale, "weight_global_scale": whole}, scheme)
    ours = formats.nvfp4(x, dtype)
    same("nvfp4 global scale", ours["_global_scale"], theirs["weight_global_scale"])
    stored = theirs["weight_scale"].view(torch.uint8)
    numbers = (stored & 0x7F) != 0x7F
    same("nvfp4 scale", ours["_scale"].view(torch.uint8), stored, numbers)
    assert ((ours["_scale"].view(torch.uint8)[~numbers]) == 0x7F).all()
    same("nvfp4", ours["_packed"], theirs["weight_packed"], of_elements(numbers, 8))


def check_int4(x, dtype, group, symmetric):
    x = x.to(dtype)
    args, scheme = args_of(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=group)
    scale, zero = qparams(x, args, group)
    state = {"weight": x, "weight_scale": scale}
    if not symmetric:
        state["weight_zero_point"] = zero
    theirs = PackedQuantizationCompressor.compress(state, scheme)
    ours = formats.quantise(formats.INT4 if symmetric else formats.INT4_ZERO, x, dtype, [1, group])
    numbers = torch.isfinite(scale)
    same("int4 scale", ours["_scale"], theirs["weight_scale"], numbers)
    same("int4", ours["_packed"], theirs["weight_packed"], of_elements(numbers, group // 8))
    if not symmetric:
        columns = numbers.all(0, keepdim=True).expand(ours["_zero_point"].shape)
        same("int4 zero points", ours["_zero_point"], theirs["weight_zero_point"], columns)


def packed_exponents(scale):
    """DeepGEMM's get_mn_major_tma_aligned_packed_ue8m0_tensor, in bytes: [rows, columns / block]."""
    return (scale.view(torch.int) >> 23).to(torch.uint8)


def check_deepgemm(x):
    rows, columns = x.shape
    down, across = -(-rows // 128) * 128, -(-columns // 128) * 128
    padded = torch.zeros(down, across, dtype=x.dtype)
    padded[:rows, :columns] = x
    view = padded.view(-1, 128, across // 128, 128)
    sf = view.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448.0
    exponent = ((sf.view(torch.int) >> 23) & 0xFF) + (sf.view(torch.int) & 0x7FFFFF).bool().int()
    sf = (exponent.clamp(1, 254) << 23).view(torch.float)
    q = (view * (1.0 / sf)).to(torch.float8_e4m3fn).view_as(padded)[:rows, :columns].contiguous()
    sf = sf.view(view.shape[0], view.shape[2]).index_select(0, torch.arange(rows) // 128)
    ours = formats.deepgemm(x)
    same("DeepGEMM's exponents", ours["_scale_inv"], packed_exponents(sf))
    same("DeepGEMM's elements", ours[""], q)


def main():
    rng = random.Random(SEED)
    for number in range(ROUNDS):
        torch.manual_seed(rng.getrandbits(32))
        group = rng.choice([16, 32, 64, 128])
        shape = [rng.randint(8, 150), 128 * rng.randint(1, 4)]
        x = torch.randn(shape) * 10.0 ** rng.uniform(-8, 4)
        x = x.to(rng.choice(DTYPES))
        check_deepgemm(x)
        if number % 2:
            x = formats.special(x)
        for kind in (formats.MXFP8, formats.MXFP4):
            if x.dtype != torch.float16: # which torchao does not take
                check_mx(kind, x)
        if x.dtype != torch.float16: # in which it has no room for the exponents
            check_mxfp4(x)
        for dtype in DTYPES:
            check_nvfp4(x, dtype)
            for symmetric in (True, False):
                check_int4(x, dtype, group, symmetric)
    print("%d numbers of torchao, compressed-tensors and DeepGEMM, bit for bit (seed %d)" % (compared, SEED))


main()
