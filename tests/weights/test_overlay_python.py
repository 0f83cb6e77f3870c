"""Checkpoints that are deltas on a base: a reader of the documented format rebuilds the tensors bit
for bit; dray reads the same; what is missing, changed, cut or forged is refused by name."""
import ctypes as c
import json
import os
import shutil
import subprocess
import sys
import tempfile

from begin import needs, seed as SEED

with needs:
    import numpy as np
    from safetensors.numpy import load_file

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "model"))
import dray

rng = np.random.default_rng(SEED)
DTYPES = {1: np.float64, 2: np.float32, 4: np.float16, 10: np.int8, 13: np.uint16, 14: np.uint8}


def with_memory(state, work, fill=True):
    """Calls work(layout, regions) on memory that holds the tensors; returns what it holds then."""
    layout, buffers, regions = dray.Layout(), {}, (c.c_void_p * (len(state) + 1))()
    codes = {d: code for code, d in DTYPES.items()}
    for i, (name, array) in enumerate(state.items()):
        tensor = layout.add_tensor(name, codes[array.dtype.type], list(array.shape))
        region = layout.add_region(array.nbytes)
        if array.nbytes:
            dray.call(dray.lib.dray_layout_add_dense, layout.handle, tensor, region,
                      dray.i64s([0] * array.ndim), dray.i64s(array.shape), c.c_uint64(0))
        buffers[name] = c.create_string_buffer(array.tobytes() if fill else b"", array.nbytes + 1)
        out = c.c_void_p()
        dray.call(dray.lib.dray_region_wrap, buffers[name], c.c_uint64(array.nbytes), b"r",
                  c.byref(out))
        regions[i] = out
    try:
        work(layout, regions)
    finally:
        for i in range(len(state)):
            dray.lib.dray_region_free(c.c_void_p(regions[i]))
    return {name: buffers[name].raw[:array.nbytes] for name, array in state.items()}


def save(folder, state, version, deltas, keep):
    options = dray.CheckpointOptions(size=c.sizeof(dray.CheckpointOptions), version=version, keep=keep, deltas=deltas)
    with_memory(state, lambda layout, regions: dray.call(
        dray.lib.dray_checkpoint_save, None, os.fsencode(folder), layout.handle, regions,
        c.byref(options)))


def read(path, state):
    return with_memory(state, lambda layout, regions: dray.call(
        dray.lib.dray_checkpoint_read, os.fsencode(path), layout.handle, regions), fill=False)


def moved(element, steps, dtype):
    """The element's bits, so many values of its dtype further."""
    bits = 8 * dtype.itemsize
    sign, whole = 1 << bits - 1, 1 << bits
    if dtype.kind != "f":
        return (element + steps) % whole
    number = whole - 1 - element if element & sign else element + sign
    number = (number + steps) % whole
    return number - sign if number & sign else whole - 1 - number


def decode(data, elements, dtype):
    """What became of elements that held these bits: codes of the documented format."""
    text = "".join(format(byte, "08b")[::-1] for byte in data)
    at = 0
    for element in elements:
        zeros = 0
        while zeros < 7 and text[at] == "0":
            zeros, at = zeros + 1, at + 1
        if zeros == 7:
            yield int(text[at:at + 8 * dtype.itemsize][::-1], 2)
            at += 8 * dtype.itemsize
            continue
        steps = (1 << zeros) + int("0" + text[at + 1:at + 1 + zeros][::-1], 2)
        yield moved(element, -steps if text[at + 1 + zeros] == "1" else steps, dtype)
        at += 2 + zeros
    assert len(text) - at < 8 and "1" not in text[at:]


def rebuild(path):
    """By the documented format alone."""
    own = load_file(os.path.join(path, "model.safetensors"))
    if not os.path.exists(os.path.join(path, "delta.json")):
        return own
    with open(os.path.join(path, "delta.json")) as f:
        said = json.load(f)
    base = rebuild(os.path.join(os.path.dirname(path), said["base"]))
    result = {}
    for name in said["tensors"]:
        if name in own:
            result[name] = own[name]
            continue
        array = base[name].copy()
        if name + ".dray_delta.table" in own:
            flat, at = array.reshape(-1), 0
            data = own[name + ".dray_delta.data"].tobytes()
            for s, (entries, gaps) in enumerate(own[name + ".dray_delta.table"]):
                position, found, end = s * said["slice"] - 1, [], at + int(gaps)
                coded, entries = entries >> 31, int(entries) & 0x7fffffff
                assert not coded or said["version"] == 3
                while len(found) < entries if coded else at < end:
                    position += data[at]
                    if data[at] < 255:
                        position += 1
                        found.append(position)
                    at += 1
                assert len(found) == entries
                bits = flat.view("u%d" % array.itemsize)
                size = end - at if coded else entries * array.itemsize
                bits[found] = (list(decode(data[at:at + size], bits[found].tolist(), array.dtype)) if coded
                               else np.frombuffer(data[at:at + size], bits.dtype))
                at += size
            assert at == len(data)
        result[name] = array
    return result


def change(array, share):
    array = array.copy()
    bits = array.reshape(-1).view("u%d" % array.itemsize)
    chosen = rng.random(bits.size) < share
    few = rng.integers(-200, 201, bits.size) if rng.random() < 0.5 else np.where(rng.random(bits.size) < 0.5, -1, 1)
    if rng.random() < 0.3:
        few = rng.integers(0, 1 << 62, bits.size)
    bits[chosen] += few[chosen].astype(np.int64).astype(bits.dtype)
    return array


def refused(path, state, *words):
    try:
        read(path, state)
    except dray.DrayError as error:
        assert all(word in str(error) for word in words), (str(error), words)
        return
    raise AssertionError("read, in spite of %s" % (words,))


def forge(root, path, state, base):
    """Each damage to a copy of all."""
    def cut(name, size):
        with open(os.path.join(path, name), "r+b") as f:
            f.truncate(max(0, os.path.getsize(f.name) + size))

    def flip(name, at):
        with open(os.path.join(path, name), "r+b") as f:
            f.seek(at, 2)
            byte = f.read(1)[0]
            f.seek(at, 2)
            f.write(bytes([byte ^ 1]))

    def edit(key, value):
        with open(os.path.join(path, "delta.json")) as f:
            said = json.load(f)
        said[key] = value
        with open(os.path.join(path, "delta.json"), "w") as f:
            json.dump(said, f)

    damages = [
        (lambda: cut("model.safetensors", -1), "model.safetensors"),
        (lambda: cut("delta.json", -5), "delta.json"),
        (lambda: [flip("model.safetensors", -1 - i * 3) for i in range(9)], ""),
        (lambda: edit("base", "../x"), "delta.json"),
        (lambda: edit("base", "step-000001/../" + os.path.basename(base)), "delta.json"),
        (lambda: edit("base", "step-000099"), "step-000099"),
        (lambda: edit("base_sum", "0" * 16), os.path.basename(base)),
        (lambda: edit("tensors", {"nowhere": "0" * 16}), "nowhere"),
        (lambda: shutil.rmtree(base), os.path.basename(base)),
        (lambda: shutil.rmtree(os.path.join(root, "step-000001")), "step-000001"),
        (lambda: edit("version", 1), ""),
        (lambda: edit("version", 2), ""),
        (lambda: edit("version", 4), "version 1 to 3"),
        (lambda: edit("number", 2), "delta"),
        (lambda: edit("base", os.path.basename(path)), "delta"),
    ]
    kept = root + ".kept"
    shutil.copytree(root, kept, symlinks=True)
    for damage, word in damages:
        damage()
        refused(path, state, word)
        shutil.rmtree(root)
        shutil.copytree(kept, root, symlinks=True)
    shutil.rmtree(kept)


def main(root):
    shapes = [(), (7,), (0,), (3, 5), (2, 3, 4), (130, 9), (300, 700), (3, 65536)]
    state = {"t.%d" % i: rng.integers(0, 256, int(np.prod(s)) * np.dtype(d).itemsize, np.uint8)
             .view(d).reshape(s)
             for i, (d, s) in enumerate((d, s) for d in DTYPES.values() for s in shapes)}
    for version in range(1, 8):
        save(root, state, version, deltas=3, keep=2)
        path = os.path.join(root, "step-%06d" % version)
        assert os.path.exists(os.path.join(path, "delta.json")) == (version not in (1, 5)), version
        held, built = read(path, state), rebuild(path)
        for name, array in state.items():
            assert held[name] == array.tobytes() == built[name].tobytes(), (version, name)
        there = sorted(name for name in os.listdir(root) if name.startswith("step-"))
        assert there == ["step-%06d" % v for v in {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 3, 4],
                                                   5: [1, 2, 3, 4, 5], 6: [5, 6],
                                                   7: [5, 6, 7]}[version]], there
        if "DRAY_PROGRAM" in os.environ:
            subprocess.run([os.environ["DRAY_PROGRAM"], "verify", path], check=True,
                           stdout=subprocess.DEVNULL)
            text = subprocess.run([os.environ["DRAY_PROGRAM"], "inspect", path], check=True,
                                  stdout=subprocess.PIPE).stdout.decode()
            assert ("a delta on " in text) == (version not in (1, 5)), text
        if version == 4:
            forge(root, path, state, os.path.join(root, "step-000003"))
        state = {name: change(array, rng.choice([0, 0.001, 0.01, 0.1, 1]))
                 for name, array in state.items()}
        if version == 3: # what is forged has codes
            state["t.7"] = state["t.7"].copy()
            state["t.7"].view(np.uint64)[::2, ::50] += 1


with tempfile.TemporaryDirectory() as temporary:
    main(os.path.join(temporary, "run"))
