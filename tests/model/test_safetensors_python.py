"""dray reads what the safetensors library writes, and the other way round: every dtype, scalars,
empty tensors, odd names, one file and several with an index."""

import json
import os
import random
import tempfile

from begin import needs, scale as SCALE, seed as SEED

with needs:
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

import dray

random.seed(SEED)
torch.manual_seed(SEED)

DTYPES = {1: torch.float64, 2: torch.float32, 3: torch.bfloat16, 4: torch.float16,
          5: torch.float8_e4m3fn, 6: torch.float8_e5m2, 7: torch.int64, 8: torch.int32,
          9: torch.int16, 10: torch.int8, 11: torch.uint64, 12: torch.uint32, 13: torch.uint16,
          14: torch.uint8, 15: torch.bool}
SHAPES = [(), (0,), (1,), (5,), (3, 4), (2, 0, 3), (2, 3, 4), (1, 2, 3, 5), (0, 0, 0, 0), (129,)]
NAMES = ["model.a", "größe", 'with"quote', "back\\slash", "a/b c", "a" * 200, "__metadata",
         "0", " ", "名前"]


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() \
        if tensor.numel() else b""


def make(dtype, shape):
    size = 1
    for s in shape:
        size *= s
    data = torch.randint(0, 2 if dtype == torch.bool else 256,
                         (size * torch.empty(0, dtype=dtype).element_size(),), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


def random_state(count):
    state = {}
    for i in range(count):
        name = random.choice(NAMES) + (str(i) if i >= len(NAMES) else "")
        state[name] = make(random.choice(list(DTYPES.values())), random.choice(SHAPES))
    for i, dtype in enumerate(DTYPES.values()):
        state[f"every.{i}"] = make(dtype, random.choice(SHAPES))
    return state


def read_through(layout):
    """The tensors as the layout's blocks say where they are."""
    out = {}
    files = [open(r.name, "rb").read() for r in layout.regions()]
    for r, data in zip(layout.regions(), files):
        assert r.bytes == len(data) and r.kind == 5 and os.path.isabs(r.name)
    tensors = layout.tensors()
    for t in tensors:
        shape = list(t.shape)[:t.ndim]
        out[t.name.decode()] = torch.empty(shape, dtype=DTYPES[t.dtype])
    covered = set()
    for tensor, region, start, extent, offset, _ in layout.blocks():
        t = tensors[tensor]
        shape = list(t.shape)[:t.ndim]
        assert start == [0] * t.ndim and extent == shape and tensor not in covered
        covered.add(tensor)
        dtype = DTYPES[t.dtype]
        size = out[t.name.decode()].numel() * dray.lib.dray_dtype_size(t.dtype)
        raw = bytearray(files[region][offset:offset + size])
        out[t.name.decode()] = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)
    for i, t in enumerate(tensors):
        assert (i in covered) == (out[t.name.decode()].numel() > 0)
    return out


def same(a, b):
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape, name
        assert bits(a[name]) == bits(b[name]), name


def like(state):
    layout = dray.Layout()
    codes = {d: code for code, d in DTYPES.items()}
    for name, tensor in state.items():
        layout.add_tensor(name, codes[tensor.dtype], list(tensor.shape))
    return layout


def fill(layout, state):
    tensors = layout.tensors()
    for tensor, region, _, _, offset, _ in layout.blocks():
        t = state[tensors[tensor].name.decode()]
        assert offset % t.element_size() == 0, "unaligned"
        with open(layout.region(region).name, "r+b") as f:
            f.seek(offset)
            f.write(bits(t))


def write(folder, state, **options):
    layout = dray.safetensors_begin(folder, like(state), **options)
    fill(layout, state)
    dray.safetensors_finish(folder, layout)
    return layout


def ours_is_read_by_python(folder):
    state = random_state(random.randrange(1, 12))
    write(folder, state)
    assert os.listdir(folder) == ["model.safetensors"], os.listdir(folder)
    path = os.path.join(folder, "model.safetensors")
    same(load_file(path), state)
    with safe_open(path, framework="pt") as f:
        assert f.metadata() == {"format": "pt"}
    same(read_through(dray.safetensors_layout(folder)), state)
    with open(path, "rb") as f:
        assert int.from_bytes(f.read(8), "little") % 8 == 0


def ours_in_several_files(folder):
    state = random_state(random.randrange(8, 40))
    state["large"] = make(torch.float32, (500,))  # larger than a file may be: one of its own
    limit = random.choice([1000, 1500, 1900])
    said = {name: None if random.random() < 0.2 else "value of " + name for name in state}
    write(folder, state, max_file_bytes=limit, metadata='{"a":"b"}',
          values=("our.key", list(said.values())))
    with open(os.path.join(folder, "model.safetensors.index.json")) as f:
        index = json.load(f)
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
                      for i in range(len(shards))], shards
    assert sorted(os.listdir(folder)) == sorted(shards + ["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == sum(len(bits(t)) for t in state.values())
    loaded = {}
    for shard in shards:
        path = os.path.join(folder, shard)
        part = load_file(path)
        assert os.path.getsize(path) <= limit or len(part) == 1
        assert all(index["weight_map"][name] == shard for name in part)
        with safe_open(path, framework="pt") as f:
            metadata = f.metadata()
        assert json.loads(metadata.pop("our.key")) == {n: said[n] for n in part if said[n]}
        assert metadata == {"a": "b"}
        loaded.update(part)
    same(loaded, state)
    same(read_through(dray.safetensors_layout(folder)), state)
    same(read_through(dray.safetensors_layout(
        os.path.join(folder, "model.safetensors.index.json"))), state)


def pythons_is_read_by_us(folder):
    state = random_state(random.randrange(0, 12))
    path = os.path.join(folder, random.choice(["model.safetensors", "other.safetensors"]))
    save_file(state, path, metadata=random.choice([None, {"format": "pt"}]))
    same(read_through(dray.safetensors_layout(folder)), state)
    same(read_through(dray.safetensors_layout(path)), state)


def pythons_in_several_files(folder):
    state = random_state(random.randrange(4, 30))
    shards = [{} for _ in range(3)]
    weight_map = {}
    for name, tensor in state.items():
        i = random.randrange(3)
        shards[i][name] = tensor
        weight_map[name] = f"part-{i}.safetensors"
    for i, shard in enumerate(shards):
        save_file(shard, os.path.join(folder, f"part-{i}.safetensors"))
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {"total_size": 1}, "weight_map": weight_map}, f)
    same(read_through(dray.safetensors_layout(folder)), state)


def the_same_bytes_as_pythons(folder):
    """Same order, same padding: the two libraries write one file for one state."""
    state = random_state(random.randrange(1, 10))
    for name in [n for n in state if not n.isascii()]:
        del state[name]
    save_file(state, os.path.join(folder, "theirs"), metadata={"format": "pt"})
    write(folder, state)
    with open(os.path.join(folder, "theirs"), "rb") as a, \
            open(os.path.join(folder, "model.safetensors"), "rb") as b:
        theirs, ours = a.read(), b.read()
    n = int.from_bytes(theirs[:8], "little")
    assert list(json.loads(theirs[8:8 + n])) == list(json.loads(ours[8:8 + n]))
    assert theirs == ours


def rewriting_a_folder(folder):
    """One checkpoint after another in one folder, of changing numbers of files."""
    for limit in random.sample([0, 1000, 1200, 1500, 2000, 0], 5):
        state = random_state(random.randrange(1, 30))
        write(folder, state, max_file_bytes=limit)
        same(read_through(dray.safetensors_layout(folder)), state)
        names = os.listdir(folder)
        assert not any(n.endswith(".partial") for n in names), names
        assert ("model.safetensors" in names) != ("model.safetensors.index.json" in names), names
        pieces = [n for n in names if n.startswith("model-")]
        assert len({n[-17:] for n in pieces}) <= 1, names


def names_that_are_refused(folder):
    """Control characters, which reach messages and logs, are in no name."""
    name = random.choice(["tab\tname", "new\nline", "\x1b[2J", "\x7f"])
    save_file({name: torch.zeros(3), "other": torch.ones(2)}, os.path.join(folder, "model.safetensors"))
    for refused in (lambda: dray.safetensors_layout(folder), lambda: like({name: torch.zeros(3)})):
        try:
            refused()
        except dray.DrayError as error:
            assert "control characters" in str(error), error
        else:
            raise AssertionError(f"{name!r} was taken")


CASES = [names_that_are_refused, ours_is_read_by_python, ours_in_several_files, pythons_is_read_by_us,
         pythons_in_several_files, the_same_bytes_as_pythons, rewriting_a_folder]

for case in CASES:
    for _ in range(12 * SCALE):
        with tempfile.TemporaryDirectory() as folder:
            case(folder)
    print("ok", case.__name__)
