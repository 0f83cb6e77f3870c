"""load= of a Subscriber into a GPU's memory, bucket by bucket: bits, errors of the loader. On the fake driver what lies there is read
by the driver's own copies; with DRAY_TEST_CUDA=real the tensors are PyTorch's."""
import ctypes as c
import os
import sys
import tempfile

from begin import needs, rng, seed

with needs:
    import torch

REAL = os.environ.get("DRAY_TEST_CUDA") == "real"
if REAL and not torch.cuda.is_available():
    sys.exit(77)
if not REAL:
    if not os.environ.get("DRAY_FAKE_CUDA"):
        print("DRAY_FAKE_CUDA names no fake driver")
        sys.exit(77)
    state = tempfile.TemporaryDirectory()
    os.environ.update(DRAY_CUDA_LIBRARY=os.environ["DRAY_FAKE_CUDA"], DRAY_NVRTC_LIBRARY=os.environ["DRAY_FAKE_CUDA"],
                      FAKE_CUDA_DEVICES="1", FAKE_CUDA_STATE=os.path.join(state.name, "state"))
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
import dray  # noqa: E402
from dray import gpu  # noqa: E402
from served import refused  # noqa: E402

seen = []

if not REAL:
    driver, context = c.CDLL(os.environ["DRAY_CUDA_LIBRARY"]), c.c_void_p()
    assert driver.cuInit(0) == 0 and driver.cuDevicePrimaryCtxRetain(c.byref(context), 0) == 0

    def copied(address, size):
        """What the driver says that a GPU's address has: others are refused by it."""
        room = torch.empty(size, dtype=torch.uint8)
        driver.cuCtxSetCurrent(context)
        code = driver.cuMemcpyDtoH_v2(c.c_void_p(room.data_ptr()), c.c_uint64(address), c.c_size_t(size))
        assert code == 0, f"cuMemcpyDtoH: {code}"
        seen.append(size)
        return room

    gpu.bytes_at, gpu.finish = copied, lambda: None

generator = torch.Generator().manual_seed(seed)
tensors = {f"t{i}": torch.randn([rng.randrange(1, 300) for _ in range(rng.randrange(0, 3))], generator=generator)
           .to(rng.choice([torch.float32, torch.bfloat16])) for i in range(30)}
tensors.update({f"large{i}": torch.randn(rng.randrange(250, 320), 300, generator=generator) for i in range(4)})
came = {}


def load(named):
    for name, tensor in named:
        assert not REAL or tensor.is_cuda, name
        came[name] = tensor.to("cpu", copy=True)


def fails(named):
    raise RuntimeError("no room")


with dray.serve():
    refused(TypeError, "only with load=", dray.Subscriber, tensors, load_device="cuda")
    refused(ValueError, "load_device", dray.Subscriber, load=load, tensors=tensors, load_device="tpu")
    held = {name: dray.weights.empty(*t.shape, dtype=t.dtype) for name, t in tensors.items()}
    with dray.Publisher(held) as publisher, \
            dray.Subscriber(load=load, tensors=tensors, bucket_bytes=512 << 10, load_device="cuda") as subscriber:
        for version in range(1, 4):
            for name, t in held.items():
                t.copy_(tensors[name] * version)
            publisher.publish(version)
            came.clear()
            subscriber.update()
            assert came.keys() == tensors.keys()
            assert all(torch.equal(came[name], t) for name, t in held.items()), version
            publisher.wait()
        if not REAL:
            assert len(seen) >= 3 * 3, seen  # several buckets each
        publisher.publish(4)
        with dray.Subscriber(load=fails, tensors=tensors, group="other", load_device="cuda") as other:
            refused(dray.DrayError, "no room", other.update)
