"""A checkpoint with sums in its metadata is what the safetensors library reads; the sums are those of
the formula; files changed by others are found."""
import ctypes as c
import json
import os
import random
import sys
import tempfile

from begin import needs, seed as SEED

with needs:
    import numpy as np
    from safetensors import safe_open
    from safetensors.numpy import load_file, save_file

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "model"))
import dray

rng = np.random.default_rng(SEED)
DTYPES = {1: np.float64, 2: np.float32, 4: np.float16, 14: np.uint8}
MASK = (1 << 64) - 1


def row_factor(row):
    z = (row + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return (z ^ z >> 31) | 1


def column_factor(column):
    x = column * 0x9E3779B1 & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x2C1B3C6D & 0xFFFFFFFF
    x ^= x >> 12
    return x | 1


def sum_of(array):
    columns = array.shape[-1] if array.ndim else 1
    words = np.ascontiguousarray(array).view("u%d" % min(array.itemsize, 4)) if array.ndim else \
        array.reshape(1).view("u%d" % min(array.itemsize, 4))
    words = words.reshape(-1, columns * max(1, array.itemsize // 4) if array.itemsize == 8
                          else columns)
    total = 0
    for row, values in enumerate(words):
        line = sum(column_factor(i) * int(v) for i, v in enumerate(values))
        total += row_factor(row) * line
    return total & MASK


def write(folder, state):
    layout = dray.Layout()
    buffers, regions = [], (c.c_void_p * (len(state) + 1))()
    codes = {d: code for code, d in DTYPES.items()}
    for i, (name, array) in enumerate(state.items()):
        tensor = layout.add_tensor(name, codes[array.dtype.type], list(array.shape))
        region = layout.add_region(array.nbytes)
        zero = dray.i64s([0] * array.ndim)
        if array.nbytes:
            dray.call(dray.lib.dray_layout_add_dense, layout.handle, tensor, region, zero,
                      dray.i64s(array.shape), c.c_uint64(0))
        buffer = c.create_string_buffer(array.tobytes() or b"\0")
        buffers.append(buffer)
        out = c.c_void_p()
        dray.call(dray.lib.dray_region_wrap, buffer, c.c_uint64(array.nbytes), b"r", c.byref(out))
        regions[i] = out
    dray.call(dray.lib.dray_checkpoint_write, os.fsencode(folder), layout.handle, regions, None)
    for i in range(len(state)):
        dray.lib.dray_region_free(c.c_void_p(regions[i]))


def compared(folder):
    count, sums = c.c_uint32(), c.c_void_p()
    dray.call(dray.lib.dray_checksums_of_checkpoint, os.fsencode(folder), c.byref(count),
              c.byref(sums))
    dray.lib.dray_checksums_free(sums)
    return count.value


def message_of(folder):
    try:
        compared(folder)
    except dray.DrayError as error:
        return str(error)
    return ""


def main(folder):
    shapes = [(), (1,), (7,), (0,), (3, 5), (2, 3, 4), (130, 9)]
    state = {"t.%d" % i: rng.integers(0, 256, int(np.prod(s)) * np.dtype(d).itemsize, np.uint8)
             .view(d).reshape(s)
             for i, (d, s) in enumerate((d, s) for d in DTYPES.values() for s in shapes)}
    write(folder, state)
    path = os.path.join(folder, "model.safetensors")
    loaded = load_file(path)
    assert loaded.keys() == state.keys()
    for name, array in state.items():
        assert loaded[name].tobytes() == array.tobytes() and loaded[name].shape == array.shape, name
    with safe_open(path, framework="np") as f:
        metadata = f.metadata()
    assert metadata["format"] == "pt", metadata
    sums = json.loads(metadata["dray.sums"])
    full = {name: array for name, array in state.items() if array.size}
    assert sums == {name: "%016x" % sum_of(array) for name, array in full.items()}
    assert compared(folder) == len(full)
    # somebody saves it again with the metadata: right, changed, and without
    save_file(loaded, path, metadata=metadata)
    assert compared(folder) == len(full)
    victim = random.choice([name for name, array in full.items() if array.nbytes > 8])
    changed = dict(loaded)
    changed[victim] = loaded[victim].copy()
    changed[victim].reshape(-1).view(np.uint8)[3] ^= 0x10
    save_file(changed, path, metadata=metadata)
    said = message_of(folder)
    assert victim in said and path in said and " 1 tensors" in said, said
    save_file(loaded, path, metadata=dict(metadata, **{"dray.sums": "{}"}))
    assert "dray.sums" in message_of(folder), message_of(folder)
    more = json.dumps(dict(sums, **{"nowhere": "0" * 16}))
    save_file(loaded, path, metadata=dict(metadata, **{"dray.sums": more}))
    assert "sums of %d tensors" % (len(sums) + 1) in message_of(folder), message_of(folder)
    save_file(loaded, path, metadata=dict(metadata, **{"dray.sums": "what"}))
    assert path in message_of(folder), message_of(folder)
    save_file(changed, path)
    assert compared(folder) == 0


with tempfile.TemporaryDirectory() as base:
    main(os.path.join(base, "checkpoint"))
