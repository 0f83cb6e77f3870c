"""A rank of a trainer of the frameworks' tests: transformers' module of a folder's config.json, sharded by FSDP2 over
gloo, and, on rank 0, the same module whole; numbers that are each version's own."""
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM


def no_gather(*_, **__):
    raise AssertionError("a tensor was gathered")


def trainer(folder, dtype=torch.float32):
    """(rank, the sharded module, the whole one or None)"""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    reference = AutoModelForCausalLM.from_config(config, dtype=dtype).eval() if rank == 0 else None
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    DTensor.full_tensor = no_gather
    return rank, model, reference


@torch.no_grad()
def write(model, reference, version):
    """A version's numbers into both."""
    whole = {name: _written(p, name, version) for name, p in _held(model)}
    for name, p in _held(reference) if reference is not None else ():
        p.copy_(whole[name])


def _held(model):
    """What a checkpoint has of it: parameters, and biases of routers."""
    yield from model.named_parameters()
    yield from ((name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))


def _written(parameter, name, version):
    """Writes this rank's part of a parameter; the whole of it."""
    generator = torch.Generator().manual_seed(version * 1000003 + sum(map(ord, name)))
    whole = (torch.randn(parameter.shape, generator=generator) * 0.2 + ("norm" in name)).to(parameter.dtype)
    local, part = parameter, whole
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()
    local.copy_(part)
    return whole


def refused(kind, words, what):
    """That what() raises, and that what it says has these words."""
    try:
        what()
    except kind as failure:
        assert all(word in str(failure) for word in words), failure
        return
    raise AssertionError(f"not refused: {words}")


class Spoken:
    """The other end of a Connection: its functions, called by name; what they raise, raised here."""

    def __init__(self, connection):
        self._there = connection

    def __getattr__(self, name):
        def call(*arguments):
            self._there.send((name, arguments))
            value, failure = self._there.recv()
            if failure:
                raise RuntimeError(failure)
            return value
        return call

    def close(self):
        self._there.close()


def serve(connection, known):
    """Does what a Spoken asks for, until it is closed."""
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((known[name](*arguments), None))
        except Exception as failure:
            connection.send((None, f"{type(failure).__name__}: {failure}"))
