"""Weights between processes, in PyTorch's tensors or numpy's arrays: a trainer's ranks publish their
parameters where they are, an engine's ranks receive them where they want them. Nothing is gathered.

    publisher = dray.Publisher(model)                 # this rank's part, of FSDP2's module, say
    publisher.attach(optimizer)                       # waits for readers before the next write
    publisher.publish(step)

    blocks = [Block("model.layers.0.self_attn.q_proj.weight", (4096, 4096), qkv[:512], (512, 0)), ...]
    subscriber = dray.Subscriber(blocks)
    report = subscriber.update()

record() finds the blocks of any engine out of its load_weights; engine_blocks() makes those of SGLang's and
vLLM's parameters, after it has compared them with the checkpoint that the engine loaded; an engine that
cannot say where its parameters are, gives Subscriber its load_weights.
"""
from __future__ import annotations

from typing import Any, Callable, Mapping

from .engine import engine_blocks, prove, tensors
from .engines import Engines
from .host import empty, share
from .layouts import Layout
from .megatron import megatron, megatron_parameters
from .parameters import Block, FlatPart, fsdp1_parameters
from .publisher import Publisher
from .sessions import MODEL, Context
from .subscriber import Subscriber

__all__ = ["MODEL", "Block", "Context", "Engines", "FlatPart", "Layout", "Publisher", "Subscriber", "empty", "engine_blocks",
           "fsdp1_parameters", "megatron", "megatron_parameters", "megatron_shards", "prove", "record", "record_source",
           "share", "tensors"]


def record(load_weights: Callable, tensors: Mapping[str, Any], into: Any = None, device: Any = "cpu"):
    """What an engine's own loader puts where, found by running it on tensors without data: for
    Subscriber, in the place of Blocks. dray.record has the rest."""
    from .record import record
    return record(load_weights, tensors, into, device)


def record_source(convert: Callable, parameters: Any):
    """Which rectangle of which tensor of the checkpoint a trainer's parameters are, found by running its own conversion on
    tensors without data: for Publisher, in the place of a module. dray.record.source has the rest."""
    from .record.source import record_source
    return record_source(convert, parameters)


def megatron_shards(named: Any, tp: int = 1, tp_rank: int = 0, **options: Any) -> list:
    """A rank's parameters of Megatron-Core as Blocks of whole ones, for record_source; dray.record.source has the rest."""
    from .record.source import megatron_shards
    return megatron_shards(named, tp, tp_rank, **options)
