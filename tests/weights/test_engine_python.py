"""Engines that loaded a checkpoint their own way, against engine_blocks: experts as [gate; up] and as
[up; gate], rows that a kernel shuffled, dense parameters that were fused in another order. An update
is right, compared with what the engine's own loader would have made of it, or the engine is refused
before it."""
import json
import os
import sys

from begin import coordinator, needs, seed

with needs:
    import torch
    from safetensors.torch import save_file

import dray
from dray.weights import Block, Context, Publisher, Subscriber, engine_blocks, tensors
from served import refused, try_all

torch.manual_seed(seed)
EXPERTS, LAYERS, TP = 4, 3, 2  # layer 0 is dense
CONFIG = {"model_type": "qwen3_moe", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48,
          "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
          "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
          "tie_word_embeddings": False, "torch_dtype": "bfloat16", "num_experts": EXPERTS,
          "moe_intermediate_size": 16, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
          "mlp_only_layers": [0]}


class Engine(torch.nn.Module):
    """A rank's parameters, by name as SGLang and vLLM have them; `load` is its weight loader. first:
    which of gate and up lies first in w13, of each layer."""

    def __init__(self, rank, first, shuffle=(), swap=()):
        super().__init__()
        self.rank, self.first, self.shuffle, self.swap = rank, first, shuffle, swap
        self.names = {}

    def put(self, name, value):
        if name in self.shuffle:  # rows, as kernels with tiles of their own have them
            value = value.flip(-2) if value.dim() > 1 else value.flip(0)
        if name not in self.names:
            self.names[name] = name.replace(".", "/")
            self.register_parameter(self.names[name], torch.nn.Parameter(torch.zeros_like(value)))
        with torch.no_grad():
            self.get_parameter(self.names[name]).copy_(value)

    def load(self, w):
        rows = lambda n: w[n].chunk(TP)[self.rank]  # noqa: E731
        columns = lambda n: w[n].chunk(TP, 1)[self.rank]  # noqa: E731
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            self.put(name, rows(name))
        self.put("model.norm.weight", w["model.norm.weight"])
        for i in range(LAYERS):
            at = f"model.layers.{i}."
            for norm in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm",
                         "self_attn.k_norm"):
                self.put(f"{at}{norm}.weight", w[f"{at}{norm}.weight"])
            attention = at + "self_attn."
            self.fuse(attention + "qkv_proj.weight", [rows(f"{attention}{p}_proj.weight") for p in "qkv"])
            self.put(attention + "o_proj.weight", columns(attention + "o_proj.weight"))
            if i == 0:
                self.fuse(at + "mlp.gate_up_proj.weight",
                          [rows(f"{at}mlp.{p}_proj.weight") for p in ("gate", "up")])
                self.put(at + "mlp.down_proj.weight", columns(at + "mlp.down_proj.weight"))
                continue
            self.put(at + "mlp.gate.weight", w[at + "mlp.gate.weight"])
            order = ("gate", "up") if self.first[i] == "gate" else ("up", "gate")
            each = [f"{at}mlp.experts.{e}." for e in range(EXPERTS)]
            self.put(at + "mlp.experts.w13_weight", torch.stack(
                [torch.cat([rows(f"{e}{p}_proj.weight") for p in order]) for e in each]))
            self.put(at + "mlp.experts.w2_weight",
                     torch.stack([columns(e + "down_proj.weight") for e in each]))
        return self

    def fuse(self, name, parts):
        self.put(name, torch.cat(parts[::-1] if name in self.swap else parts))

    def named_parameters(self, *arguments, **options):
        for name, parameter in super().named_parameters(*arguments, **options):
            yield name.replace("/", "."), parameter

    def move(self):
        """All Parameters are others."""
        self.load_state_dict({n: t.clone() for n, t in self.state_dict().items()}, assign=True)


def first(of):
    return [of] * LAYERS


def random_weights():
    return {n: torch.randn(shape, dtype=dtype) for n, (shape, dtype) in tensors(path).items()}


def loaded(rank=0, of="gate", **options):
    return Engine(rank, of if isinstance(of, list) else first(of), **options).load(checkpoint)


def blocks_of(model, **options):
    return engine_blocks(path, model, tp=TP, tp_rank=model.rank, **options)


def orders():
    """Both are found out, and stay what they are when the engine replaces its parameters."""
    for of in ("gate", "up"):
        models = [loaded(rank, of) for rank in range(TP)]
        w = random_weights()
        with Publisher(w, of, context=trainer) as publisher:
            subscribers = [Subscriber(blocks_of(m), of, of, r, TP, context=engines[r])
                           for r, m in enumerate(models)]
            for version in (1, 2):
                publisher.wait()
                for t in w.values():
                    t.add_(version)
                publisher.publish(version)
                for s in subscribers:
                    s.start(min_version=version)
                left = list(subscribers)
                while left:
                    left = [s for s in left if not s.poll()]
                for s, m in zip(subscribers, models):
                    assert s.finish()["verified_tensors"] == len(w)
                    wanted = dict(Engine(m.rank, first(of)).load(w).named_parameters())
                    for name, p in m.named_parameters():
                        assert torch.equal(p, wanted[name]), f"experts that hold {of} first: {name}"
                    m.move()
            for s in subscribers:
                s.close()


def layouts_of_their_own():
    """What is in no order that is known: refused, with the tensor's name and the way out."""
    w13, w2 = (f"model.layers.1.mlp.experts.{n}_weight" for n in ("w13", "w2"))
    qkv, gate_up = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"
    cases = [(dict(shuffle=[w13]), "layers.1.mlp.experts.0."), (dict(shuffle=[w2]), "down_proj"),
             (dict(shuffle=[qkv]), "self_attn."), (dict(swap=[gate_up]), "layers.0.mlp."),
             (dict(swap=[qkv]), "layers.1.self_attn."), (dict(of=["gate", "gate", "up"]), "layers.2.mlp"),
             (dict(of="up", shuffle=[w2]), ".mlp.experts.")]
    for options, name in cases:
        error = refused(dray.DrayError, name, blocks_of, loaded(**options))
        assert error.name == "ECHECKSUM" and "load=" in str(error), error
    model = loaded(of="up")
    error = refused(dray.DrayError, "experts.0.", blocks_of, model, w13_order="gate-up")
    assert error.name == "ECHECKSUM", error
    blocks_of(model, w13_order="up-gate")
    with torch.no_grad():  # weights of nobody: "dummy", as rollout engines are often started
        for p in model.parameters():
            p.zero_()
    refused(dray.DrayError, "load=", blocks_of, model)


def without_proof():
    """Nothing to compare with: refused, but for what the caller vouches for."""
    model = loaded()
    alone = os.path.join(folder, "alone.json")
    os.mkdir(os.path.join(folder, "config"))
    with open(path + "/config.json", encoding="utf-8") as file, \
            open(os.path.join(folder, "config/config.json"), "w", encoding="utf-8") as copy:
        copy.write(file.read())
    alone = os.path.join(folder, "config/config.json")
    options = {"tp": TP, "tp_rank": 0}
    for config in (alone, os.path.dirname(alone)):
        error = refused(ValueError, "checkpoint", engine_blocks, config, model, **options)
        assert "load=" in str(error), error
    engine_blocks(alone, model, checkpoint=path, **options)
    engine_blocks(path + "/config.json", model, **options)
    refused(ValueError, "w13_order", engine_blocks, alone, model, checkpoint=False, **options)
    refused(ValueError, "w13_order", engine_blocks, alone, model, w13_order="w31", **options)
    blocks = engine_blocks(alone, model, checkpoint=False, w13_order="up-gate", **options)
    assert len(blocks) > len(list(model.named_parameters()))
    refused(dray.DrayError, "nowhere", engine_blocks, alone, model, checkpoint="/nowhere", **options)


def another_shape_or_dtype():
    """One parameter is not what the engine would have: it is named."""
    model = loaded()
    pairs = [(name, p.detach()) for name, p in model.named_parameters()]
    name, tensor = next((n, t) for n, t in pairs if t.dim() == 2)
    same_size = torch.float16 if tensor.dtype == torch.bfloat16 else torch.int32
    for other in (tensor[:-1], tensor.view(same_size)):
        changed = [(n, other if n == name else t) for n, t in pairs]
        error = refused(ValueError, name, engine_blocks, path, changed, tp=TP, tp_rank=0)
        assert ("would have" in str(error)) == (other.shape != tensor.shape), error
        assert ("another dtype" in str(error)) == (other.dtype != tensor.dtype), error


def halves_that_are_the_same():
    """They say nothing of their order, and the next version may differ."""
    same = {n: checkpoint[n.replace("up_proj", "gate_proj")] if ".experts." in n else t
            for n, t in checkpoint.items()}
    save(same, "same")
    model = Engine(0, first("up")).load(same)
    options = {"tp": TP, "checkpoint": os.path.join(folder, "same")}
    refused(ValueError, "w13_order", engine_blocks, path, model, **options)
    engine_blocks(path, model, w13_order="up-gate", **options)


def blocks_by_hand():
    """Are compared when they are asked about."""
    name = "model.layers.1.self_attn.q_proj.weight"
    whole = checkpoint[name]
    rows = whole[8:24].clone()
    dray.weights.prove([Block(name, tuple(whole.shape), rows, (8, 0))], path)
    error = refused(dray.DrayError, name, dray.weights.prove,
                    [Block(name, tuple(whole.shape), rows, (0, 0))], path)
    assert error.name == "ECHECKSUM", error
    dray.weights.prove([Block(name, tuple(whole.shape), lambda: rows.T.contiguous().T, (8, 0))], path)


def edited():
    """A list that was changed is the Blocks that are in it: an engine that has replaced its parameters
    is refused, as nobody can make them anew."""
    model, w = loaded(), random_weights()
    parts = blocks_of(model)
    wanted = [b for b in parts if "self_attn" in b.name]
    name = wanted[0].name
    del parts[:]
    parts += wanted
    with Publisher(w, "edited", context=trainer) as publisher, \
            Subscriber(parts, "edited", "edited", context=engines[0]) as subscriber:
        publisher.publish(1)
        assert subscriber.update()["verified_tensors"] < len(w)
        assert torch.equal(wanted[0].tensor, w[name].chunk(TP)[0])
        model.move()
        error = refused(dray.DrayError, "self_attn", subscriber.update)
        assert error.name == "ESTALE", error


def save(w, name):
    at = os.path.join(folder, name)
    os.mkdir(at)
    with open(os.path.join(at, "config.json"), "w", encoding="utf-8") as file:
        json.dump(CONFIG, file)
    if w:
        save_file({n: t.contiguous().clone() for n, t in w.items()}, os.path.join(at, "model.safetensors"))
    return at


CASES = [orders, layouts_of_their_own, without_proof, another_shape_or_dtype, halves_that_are_the_same,
         blocks_by_hand, edited]
with coordinator() as folder:
    path = save(None, "model")
    checkpoint = random_weights()
    save_file(checkpoint, path + "/model.safetensors")
    with Context(role="trainer", timeout=20) as trainer, Context(role="engine", timeout=20) as one, \
            Context(role="engine", rank=1, timeout=20) as two:
        engines = [one, two]
        failed = try_all(CASES)
sys.exit(failed)
