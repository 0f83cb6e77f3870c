"""Handles as PyTorch has them and as dray has them: reduce_tensor's arguments become a handle and come
back the same, for random tensors; what dray cannot say is refused. GPUs and arenas through the
binding, on the fake driver. (Between PyTorch processes on GPUs: tests/weights/test_fsdp_python.py.)"""
import ctypes as c
import os
import tempfile

from begin import needs, rng

with needs:
    import torch

if os.environ.get("DRAY_TEST_CUDA") != "real":
    folder = tempfile.TemporaryDirectory()
    os.environ.update(DRAY_CUDA_LIBRARY=os.environ["DRAY_FAKE_CUDA"], FAKE_CUDA_DEVICES="2",
                      FAKE_CUDA_STATE=os.path.join(folder.name, "state"))
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
import dray  # noqa: E402
from dray import gpu  # noqa: E402
from dray._library import call  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool,
          torch.float8_e4m3fn, torch.float64, torch.int16]


def refused(name, function, *arguments):
    try:
        function(*arguments)
    except dray.DrayError as e:
        assert e.name == name, (e.name, str(e))
        return str(e)
    raise AssertionError(f"{function.__name__} was not refused")


def some_arguments():
    dtype = rng.choice(DTYPES)
    size = [rng.randrange(1, 5) for _ in range(rng.randrange(0, 5))]
    stride, step = [], 1
    for n in reversed(size):
        stride.insert(0, step)
        step *= n + rng.randrange(2)
    offset = rng.randrange(7)
    sync = rng.random() < 0.5
    storage = (offset + step + rng.randrange(100)) * dtype.itemsize
    return (torch.nn.Parameter if rng.random() < 0.3 else torch.Tensor, torch.Size(size),
            tuple(stride), offset, torch.UntypedStorage, dtype, rng.randrange(2),
            rng.choice([b"", b"\x02c"]) + rng.randbytes(64), storage, rng.randrange(10 ** 9),
            rng.random() < 0.5, b"/torch_%d" % rng.randrange(999), rng.randrange(99),
            rng.randbytes(64) if sync else b"", sync)


def round_trips():
    seen = gpu.devices()
    for _ in range(300):
        arguments = some_arguments()
        if arguments[6] >= len(seen):
            continue
        rebuilt = gpu.from_rebuild(arguments)
        assert bytes(rebuilt.handle.device) == seen[arguments[6]].uuid
        rebuilt.handle = gpu.Handle.unpack(rebuilt.handle.pack())
        assert gpu.to_rebuild(rebuilt) == arguments
        # another process counts the GPUs in another order
        assert gpu.to_rebuild(rebuilt, lambda uuid: 5)[6] == 5


def refusals():
    arguments = list(some_arguments())
    arguments[7] = b"\x02e" + bytes(20)
    assert "arena" in refused("EUNSUPPORTED", gpu.from_rebuild, arguments)
    arguments = list(some_arguments())
    arguments[1], arguments[2] = torch.Size([1] * 5), (1,) * 5
    refused("EINVALID", gpu.from_rebuild, arguments)
    rebuilt = gpu.from_rebuild([torch.Tensor, torch.Size([2]), (1,), 0, torch.UntypedStorage,
                                torch.float32, 0, bytes(range(64)), 8, 0, False, b"x", 0, b"",
                                False])
    rebuilt.handle.offset = 2
    refused("EINVALID", gpu.to_rebuild, rebuilt)
    rebuilt.handle.form = gpu.FORM_VMM
    refused("EUNSUPPORTED", gpu.to_rebuild, rebuilt)
    refused("EFORMAT", gpu.Handle.unpack, b"DRYH")
    refused("ENOENT", gpu.resume, "nothing")


def arenas():
    address = c.c_uint64()
    arena = gpu._arena("weights", gpu.devices()[0].ordinal, chunk_bytes=4 << 20)
    call("dray_arena_alloc", arena, 1 << 20, c.byref(address))
    s = gpu.storage_of(address.value)
    assert s["base"] == address.value and s["bytes"] == 4 << 20 and s["form"] == gpu.FORM_VMM
    region = gpu.Region.over(address.value, 1 << 20, "r")
    assert region.nbytes == 1 << 20 and region.address == address.value and region.fd == -1
    handle = region.describe()
    assert region.fd >= 0 and handle.base_bytes == 4 << 20
    again = gpu.Region.open(gpu.Handle.unpack(handle.pack()), region.fd)
    assert again.address == region.address  # its own export
    again.close()
    region.unexport()
    assert gpu.arena_status("weights", gpu.devices()[0].ordinal)["used_bytes"] == 1 << 20
    region.check()
    call("dray_arena_free", arena, address)
    refused("ESTALE", region.check)
    region.close()


round_trips()
refusals()
arenas()
