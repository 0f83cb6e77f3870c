"""A list of tensors as bytes of a fixed number, to be published as a tensor: who receives tensors must know their shapes
before."""
from __future__ import annotations

import json
import zlib

import torch

BYTES = 1 << 20


def pack(tensors, more=None):
    """tensors: {name: (shape, dtype)}. more: what else is to be told, as JSON holds it. A tensor of BYTES bytes."""
    every = [[name, str(dtype).rpartition(".")[2], list(shape)] for name, (shape, dtype) in tensors.items()]
    packed = zlib.compress(json.dumps([every, more]).encode())
    whole = len(packed).to_bytes(8, "little") + packed
    if len(whole) > BYTES:
        raise ValueError(f"the model's {len(tensors)} tensors: a list of at most {BYTES} bytes expected, found {len(whole)}")
    return torch.frombuffer(bytearray(whole.ljust(BYTES, b"\0")), dtype=torch.uint8)


def packed(room):
    """What pack() made, without what fills it up."""
    whole = room.numpy()
    return whole[8:8 + int.from_bytes(whole[:8].tobytes(), "little")].tobytes()


def unpack(packed):
    """(tensors, more) of what packed() gave."""
    every, more = json.loads(zlib.decompress(packed))
    return {name: (tuple(shape), getattr(torch, dtype)) for name, dtype, shape in every}, more
