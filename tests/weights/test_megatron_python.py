"""Megatron-Core's parameters, cut by hand from random checkpoints as Megatron cuts them, published as they lie and
received whole, bit for bit; the list of engines meanwhile."""
import json
import os
import tempfile

from begin import coordinator, needs, seed

with needs:
    import torch
    from torch import nn

from served import refused
from dray.weights import Context, Engines, Publisher, Subscriber, megatron, megatron_parameters, tensors

CONFIG = {"model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "rms_norm_eps": 1e-6,
          "rope_theta": 10000, "tie_word_embeddings": False, "max_position_embeddings": 64}
HEAD, MULTIPLE = 8, 16


def chunk_of(values):
    """A module whose named_parameters() are these."""
    root = nn.Module()
    for name, value in values.items():
        at, (*path, last) = root, name.split(".")
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at._modules[part]
        at.register_parameter(last, nn.Parameter(value.clone().contiguous()))
    return root


def rows(value, rank, tp):
    return value.chunk(tp, 0)[rank]


def fused(w, layer, what, rank, tp):
    """linear_qkv: of each query group its queries, its key, its value; ranks have whole groups."""
    q, k, v = (w[f"model.layers.{layer}.self_attn.{x}_proj.{what}"] for x in "qkv")
    groups = CONFIG["num_key_value_heads"]
    q, k, v = (x.reshape(groups, -1, *x.shape[1:]) for x in (q, k, v))
    return rows(torch.cat([q, k, v], 1), rank, tp).reshape(-1, *q.shape[2:])


def cut(w, layers, first, last, rank, tp):
    """Of the layers, numbered from 0 within the chunk; first, last: of the model's chunks."""
    total = MULTIPLE * tp
    total *= -(-CONFIG["vocab_size"] // total)
    found = {}
    if first:
        padded = torch.zeros(total, CONFIG["hidden_size"])
        padded[:CONFIG["vocab_size"]] = w["model.embed_tokens.weight"]
        found["embedding.word_embeddings.weight"] = rows(padded, rank, tp)
    for at, layer in enumerate(layers):
        here, there = f"decoder.layers.{at}.", f"model.layers.{layer}."
        found[here + "self_attention.linear_qkv.weight"] = fused(w, layer, "weight", rank, tp)
        found[here + "self_attention.linear_qkv.bias"] = fused(w, layer, "bias", rank, tp)
        found[here + "self_attention.linear_qkv.layer_norm_weight"] = w[there + "input_layernorm.weight"]
        found[here + "self_attention.linear_proj.weight"] = w[there + "self_attn.o_proj.weight"].chunk(tp, 1)[rank]
        found[here + "mlp.linear_fc1.weight"] = torch.cat([rows(w[there + f"mlp.{x}_proj.weight"], rank, tp)
                                                           for x in ("gate", "up")])
        found[here + "mlp.linear_fc1.layer_norm_weight"] = w[there + "post_attention_layernorm.weight"]
        found[here + "mlp.linear_fc2.weight"] = w[there + "mlp.down_proj.weight"].chunk(tp, 1)[rank]
    if last:
        padded = torch.zeros(total, CONFIG["hidden_size"])
        padded[:CONFIG["vocab_size"]] = w["lm_head.weight"]
        found |= {"decoder.final_layernorm.weight": w["model.norm.weight"], "output_layer.weight": rows(padded, rank, tp)}
    return found


def until(engines, name, version):
    """The engine serves the version: it joined with it, left while its memory was written, or was updated."""
    seen = []
    while not seen or seen[-1] not in (("joined", version), ("updated", version)):
        seen += [(event, engine["version"]) for event, engine in engines.wait(10) if engine["group"] == name]
    assert version > 1 or seen == [("joined", 1)], seen


def check(context, path, tp, pp, vpp):
    """A trainer of tp x pp ranks in one process, each stage in vpp chunks, and an engine that wants whole tensors."""
    name = f"m{tp}{pp}{vpp}"
    w = {tensor: torch.randn(shape) for tensor, (shape, _) in tensors(path).items()}
    taken = {tensor: torch.zeros_like(value) for tensor, value in w.items()}
    sizes, publishers, models = {"tp": tp, "pp": pp, "vpp": vpp}, [], []
    per = CONFIG["num_hidden_layers"] // (pp * vpp)
    for rank in range(tp * pp):
        stage, chunks = rank // tp, []
        for chunk in range(vpp):
            at = chunk * pp + stage
            chunks.append(chunk_of(cut(w, range(at * per, (at + 1) * per), at == 0, at == pp * vpp - 1, rank % tp, tp)))
        told = megatron_parameters(path, rank=rank, vocab_multiple=MULTIPLE, **sizes)
        if vpp == 1:
            assert {n: tuple(p.shape) for n, p in chunks[0].named_parameters()} == {n: s for n, (s, _, _) in told.items()}
        models.append(chunks)
        publishers.append(Publisher(megatron(chunks, path, rank=rank, vocab_multiple=MULTIPLE, **sizes), name, rank,
                                    tp * pp, context=context))
    with Engines(context) as engines, Subscriber(taken, name, name, context=context) as subscriber:
        engines.poll()
        assert [(e["group"], e["serving"]) for e in engines if e["group"] == name] in ([], [(name, False)])
        for version in (1, 2):
            for publisher in publishers:
                publisher.publish(version)
            assert subscriber.update(min_version=version)["version"] == version
            assert all(torch.equal(taken[n], value) for n, value in w.items()), name
            until(engines, name, version)
            for publisher in publishers:
                publisher.wait()
            for chunks in models:  # the optimizer's step, and parameters that lie elsewhere
                for chunk in chunks:
                    for parameter in chunk.parameters():
                        parameter.data = parameter.data * 2
            w = {tensor: value * 2 for tensor, value in w.items()}
        refused(Exception, "GPU", publishers[0].wait_stream, 2, None)
        now, = [e for e in engines if e["group"] == name]
        assert now["serving"] and now["version"] == 2 and now["state"] == "whole" and now["world"] == 1
    for publisher in publishers:
        publisher.close()


def bad(context, path):
    """Another model's parameter, another shape, sizes that nobody has."""
    w = {tensor: torch.randn(shape) for tensor, (shape, _) in tensors(path).items()}
    there = cut(w, range(CONFIG["num_hidden_layers"]), True, True, 0, 1)
    whole = {"vocab_multiple": MULTIPLE}
    alien = chunk_of({**there, "decoder.layers.0.mlp.linear_fc3.weight": torch.zeros(2, 2)})
    refused(Exception, "linear_fc3", Publisher, megatron(alien, path, **whole), "bad", context=context)
    short = chunk_of({**there, "decoder.final_layernorm.weight": torch.zeros(31)})
    refused(Exception, "31", Publisher, megatron(short, path, **whole), "bad", context=context)
    refused(TypeError, "tpp", megatron, chunk_of(there), path, tpp=2)
    refused(ValueError, "experts", megatron, chunk_of(there), path, experts="loose")


print(f"DRAY_TEST_SEED={seed}", flush=True)
torch.manual_seed(seed)
with coordinator(), tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "config.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(CONFIG, file)
    with Context() as session:
        for tp, pp, vpp in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2)):
            check(session, path, tp, pp, vpp)
        bad(session, path)
