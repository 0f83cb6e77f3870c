"""Conversions against PyTorch, bit for bit, NaN included; quantisation against its formula in
PyTorch; the checksum against its formula in Python.

PyTorch's own NaN depends on its code path: to bfloat16 its scalar code gives 0x7FC0 and its vector code
0xFFFF; from bfloat16 to float16 the scalar code drops the payload. dray gives 0x7FC0 and keeps the
payload, so conversions to bfloat16 are compared with PyTorch's scalar code and the others with its
vector code: two processes, as the choice is made when torch is loaded."""
import os
import random
import subprocess
import sys

TO_BF16, OTHERS = "to-bf16", "others"
if len(sys.argv) == 1:
    for part in (TO_BF16, OTHERS):
        environment = dict(os.environ, ATEN_CPU_CAPABILITY="default") if part == TO_BF16 else None
        done = subprocess.run([sys.executable, __file__, part], env=environment)
        if done.returncode:
            sys.exit(done.returncode)
    sys.exit(0)

try:
    import numpy as np
    import torch
except ImportError as missing:
    print(missing)
    sys.exit(77)

# test_cuda_python.py gives the GPU's.
PROGRAM = os.path.join(os.environ["DRAY_BUILD_DIR"],
                       os.environ.get("DRAY_TEST_KERNELS", "mover_test_kernels"))
SEED = int(os.environ.get("DRAY_TEST_SEED", random.randrange(1 << 32)))
print("DRAY_TEST_SEED=%d" % SEED)
rng = np.random.default_rng(SEED)

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
         "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "F64": np.uint64,
        "F8_E4M3": np.uint8, "F8_E5M2": np.uint8}


server = None


def ask(data, *arguments):
    """mover_helper_cuda answers many requests: its driver takes long to start."""
    global server
    if not server:
        server = subprocess.Popen([PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    server.stdin.write(" ".join([*arguments, "%d\n" % len(data)]).encode())
    server.stdin.write(data)
    server.stdin.flush()
    size = server.stdout.readline()
    if not size:
        sys.exit("%s ended with %s at %s" % (PROGRAM, server.wait(), arguments))
    return server.stdout.read(int(size))


def call(data, *arguments, kernels=""):
    if "DRAY_TEST_KERNELS" in os.environ and arguments != ("list",):
        return ask(data, *arguments)
    return subprocess.run([PROGRAM, *arguments], input=data, stdout=subprocess.PIPE, check=True,
                          timeout=120, env=dict(os.environ, DRAY_KERNELS=kernels)).stdout


def f32_patterns():
    high = np.arange(65536, dtype=np.uint32) << 16  # every bf16, and what lies around its ties
    ties = [high + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    near = [halves + step for step in (0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF)]  # the same for f16
    smallest = np.arange(0, 0x39000000, 9973, dtype=np.uint32)  # denormal in f16 or in f32
    eighths = np.arange(0x37000000, 0x48000000, 1 << 19, dtype=np.uint32)  # ties of 8 bits
    near += [sign | eighths + np.uint32(step) for step in (0, 1, 0xFFFFFFFF) for sign in (0, 0x80000000)]
    return np.concatenate(ties + near + [smallest, rng.integers(0, 1 << 32, 1 << 20, np.uint32)])


def f64_patterns():
    singles = f32_patterns()[::7].view(np.float32).astype(np.float64).view(np.uint64)
    near = [singles + np.uint64(step) for step in (0, 1, (1 << 28) - 1, 1 << 28, (1 << 28) + 1)]
    return np.concatenate(near + [rng.integers(0, 1 << 64, 1 << 19, np.uint64)])


def patterns(name):
    if BITS[name] == np.uint8:
        return np.arange(256, dtype=np.uint8)
    if BITS[name] == np.uint16:
        return np.arange(65536, dtype=np.uint16)
    with np.errstate(all="ignore"):
        return f32_patterns() if name == "F32" else f64_patterns()


def check_casts(part):
    names = call(b"", "list").decode().split()
    for source in TORCH:
        bits = np.ascontiguousarray(patterns(source))
        tensor = torch.from_numpy(bits.view("i%d" % bits.itemsize)).view(TORCH[source])
        for target in TORCH:
            if source == target or (target == "BF16") != (part == TO_BF16):
                continue
            size = np.dtype(BITS[target]).itemsize
            integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
            converted = tensor.to(TORCH[target])
            want = converted.view(integer).numpy().view(BITS[target])
            nan = torch.isnan(converted).numpy()
            if target == "F8_E4M3":  # PyTorch before 2.13 makes NaN of what is too large
                over = nan & ~torch.isnan(tensor).numpy()
                sign = torch.signbit(tensor.double()).numpy().astype(np.uint8) << 7
                want = np.where(over, sign | 0x7E, want)
            for name in names:
                got = np.frombuffer(call(bits.tobytes(), "cast", name, source, target), BITS[target])
                same = got == want
                if (source, target) == ("BF16", "F16") and \
                        torch.backends.cpu.get_cpu_capability() == "DEFAULT":
                    same |= nan & ((got & 0x7C00) == 0x7C00) & ((got & 0x3FF) != 0)
                if not same.all():
                    at = int(np.argmin(same))
                    sys.exit("%s, %s -> %s: %#x became %#x, PyTorch gives %#x" %
                             (name, source, target, bits[at], got[at], want[at]))


def to_power_of_two(scale):
    """DeepGEMM's ceil_to_ue8m0."""
    bits = scale.abs().float().view(torch.int)
    return ((((bits >> 23) & 0xFF) + (bits & 0x7FFFFF).bool().int()).clamp(1, 254) << 23).view(torch.float)


def quantised(x, cell, target, format):
    """quant.h's formula over x, a tensor cut into cells from its origin: (q, scales, y)."""
    ends = [-(-n // c) for n, c in zip(x.shape, cell)]
    padded = torch.zeros([e * c for e, c in zip(ends, cell)], dtype=x.dtype)
    padded[tuple(slice(0, n) for n in x.shape)] = x
    view = padded.view([n for pair in zip(ends, cell) for n in pair])
    amax = view.abs().float().amax(dim=tuple(range(1, view.ndim, 2)), keepdim=True).clamp(1e-4)
    scale = amax / torch.finfo(TORCH[target]).max
    if format:
        scale = to_power_of_two(scale)
    most = torch.finfo(TORCH[target]).max  # PyTorch casts what is more to NaN, or (2.13) to this
    q = (view * (1.0 / scale)).float()
    q = (q.clamp(-most, most) if target == "F8_E4M3" else q).to(TORCH[target])
    y = (q.float() * scale).to(x.dtype)
    part = tuple(slice(0, n) for n in x.shape)
    return q.view(padded.shape)[part], scale.view(ends), y.view(padded.shape)[part]


def compare(got, want, dtype, what):
    size = want.element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
    tensor = torch.from_numpy(np.frombuffer(got, "i%d" % size if size > 1 else "u1").copy())
    nan = torch.isnan(want.float()).flatten()
    same = (tensor == want.contiguous().view(integer).flatten()) | \
        (nan & torch.isnan(tensor.view(want.dtype).float()))
    assert same.all(), "%s: at %d, %s is wrong" % (what, int(torch.argmin(same.int())), dtype)


def check_quantise(x, name, target, format, cell, kernels):
    """Of x, a box that ends where the tensor does and begins where cells do, or inside them."""
    q, scales, y = quantised(x, cell, target, format)
    text = [",".join(map(str, v)) for v in ([0] * x.ndim, x.shape, cell)]
    raw = x.contiguous().view(torch.uint8).numpy().tobytes()
    out = call(raw, "quantise", name, target, str(format), *text, kernels=kernels)
    what = "%s of %s to %s, cells %s, %s, format %d" % (list(x.shape), name, target, cell, kernels,
                                                        format)
    n = scales.numel() * 4
    compare(out[:n], scales, "scale", what)
    compare(out[n:n + q.numel()], q, target, what)
    compare(out[n + q.numel():], y, name, what)


def check_quantisation():
    names = call(b"", "list").decode().split()
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 3e38])
    for kernels in names:
        for name in ("F32", "BF16", "F16"):
            for target in ("F8_E4M3", "F8_E5M2"):
                format = int(rng.integers(2))
                shape = tuple(int(n) for n in rng.integers(1, 300, 2))
                x = torch.from_numpy(rng.normal(size=shape) * 10.0 ** rng.uniform(-6, 3)).to(TORCH[name])
                check_quantise(x, name, target, format, (128, 128), kernels)
                check_quantise(x, name, target, 1 - format, shape, kernels)
                odd = torch.from_numpy(rng.normal(size=(3, 40, 50))).to(TORCH[name])
                for value in special:
                    odd[tuple(int(rng.integers(n)) for n in odd.shape)] = value
                cell = (1, int(rng.integers(1, 45)), int(rng.integers(1, 60)))
                check_quantise(odd, name, target, format, cell, kernels)
                if name != "F32":  # each pattern among its neighbours, and each magnitude as the largest
                    bits = every.view(TORCH[name]).view(256, 256)
                    check_quantise(bits, name, target, format, (1, 64), kernels)
                    check_quantise(bits, name, target, format, (1, 1), kernels)


MASK = (1 << 64) - 1


def row_factor(row):
    z = (row + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return (z ^ z >> 31) | 1


def column_factor(column):
    x = (column & 0xFFFFFFFF) * 0x9E3779B1 & 0xFFFFFFFF ^ (column >> 32) * 0x85EBCA77 & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x2C1B3C6D & 0xFFFFFFFF
    x ^= x >> 12
    return x | 1


def sum_of(array, start, shape):
    """array: unsigned integers, the rectangle at `start` of a tensor of `shape`."""
    total = 0
    for index, value in np.ndenumerate(array):
        place = [s + i for s, i in zip(start, index)]
        row = 0
        for extent, i in zip(shape[:-1], place[:-1]):
            row = row * extent + i
        column, value = (place[-1] if place else 0), int(value)
        if array.itemsize == 8:
            words = [(2 * column, value & 0xFFFFFFFF), (2 * column + 1, value >> 32)]
        else:
            words = [(column, value)]
        for c, bits in words:
            total += row_factor(row) * column_factor(c) * bits
    return total & MASK


def program_sum(dtype, array, start, shape):
    text = [",".join(map(str, numbers)) for numbers in (shape, start, array.shape)]
    return int(call(np.ascontiguousarray(array).tobytes(), "sum", dtype, *text))


def cut(array, start, pieces):
    """Random disjoint rectangles that cover the array, with their starts."""
    parts = [(array, tuple(start))]
    for _ in range(pieces):
        whole, at = parts.pop(rng.integers(len(parts)))
        axes = [d for d in range(whole.ndim) if whole.shape[d] > 1]
        if not axes:
            parts.append((whole, at))
            continue
        d = int(rng.choice(axes))
        n = int(rng.integers(1, whole.shape[d]))
        first, second = np.split(whole, [n], axis=d)
        parts += [(first, at), (second, at[:d] + (at[d] + n,) + at[d + 1:])]
    return parts


def check_sums():
    widths = {"U8": np.uint8, "F16": np.uint16, "F32": np.uint32, "I64": np.uint64}
    for round in range(24):
        dtype = list(widths)[round % 4]
        ndim = int(rng.integers(0, 5))
        extent = tuple(int(n) for n in rng.integers(1, [1, 4000, 70, 17, 9][ndim] + 1, ndim))
        start = tuple(int(n) for n in rng.integers(0, 1000, ndim))
        if round % 5 == 0 and ndim:  # columns beyond 2^32, of fewer than 2^63 bytes
            start = tuple(s % 100 for s in start[:-1]) + ((1 << 33) - extent[-1] // 2,)
        shape = tuple(s + e + int(rng.integers(0, 5)) for s, e in zip(start, extent))
        array = rng.integers(0, np.iinfo(widths[dtype]).max, extent, widths[dtype], endpoint=True)
        array = np.asarray(array, widths[dtype])
        want = sum_of(array, start, shape)
        got = program_sum(dtype, array, start, shape)
        assert got == want, (dtype, shape, start, extent, got, want)
        parts = [program_sum(dtype, part, at, shape) for part, at in cut(array, start, 5)]
        assert sum(parts) & MASK == want, (dtype, shape, start, extent, parts, want)


check_casts(sys.argv[1])
if sys.argv[1] == OTHERS:
    check_sums()
    check_quantisation()
if server:
    server.stdin.close()
    if server.wait(timeout=120):
        sys.exit("%s ended with %d" % (PROGRAM, server.returncode))
