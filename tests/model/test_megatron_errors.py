"""Megatron sizes and names that do not fit: every refusal names the numbers that do not divide, and
they do not; shapes say what was expected and found; a name that the model does not have is no
entry, whatever it looks like; and what is refused changes nothing."""

import ctypes as c
import re

from begin import needs, rng, scale as SCALE

with needs:
    import numpy  # noqa: F401

import dray
import reshard


def spec_of(**sizes):
    return dray.MegatronSpec(size=c.sizeof(dray.MegatronSpec), kind=1, **sizes)


def refusal(function, *args):
    """What the call said; None: it did not refuse."""
    try:
        function(*args)
    except dray.DrayError as error:
        return str(error)
    return None


def build(config, spec):
    return dray.model_layout(dray.lib.dray_layout_megatron, config, c.byref(spec))


def add(layout, config, spec, name, shape, dtype=7, vp=0, offset=0):
    dray.call(dray.lib.dray_layout_add_megatron, layout.handle, c.byref(config), c.byref(spec), vp,
              name.encode(), dtype, len(shape), dray.i64s(shape), 0, c.c_uint64(offset))


FORMS = [  # what is said, and whether it is true
    (r"(\d+) is not divisible by [a-z ]+(\d+)$", lambda a, b: b == 0 or a % b),
    (r"num_key_value_heads (\d+) is neither divisible by tp (\d+) nor a divisor of it",
     lambda a, b: a % b and b % a),
    (r"vpp (\d+) needs pp above 1", lambda v: v > 1),
    (r"ep (\d+), but \w+ has no experts", lambda e: e > 1),
    (r"(\d+) layers in the first and (\d+) in the last of (\d+) stages, of (\d+) layers",
     lambda f, l, p, n: f + l > n or (f > 0) + (l > 0) > p),
    (r"cannot be given together", lambda: True),
    (r"(?:tp|ep|etp|pp) rank (\d+) of (\d+)", lambda r, n: r >= n),
    (r"= (\d+) is not divisible by etp \d+ x ep \d+ = (\d+)", lambda a, b: a % b),
    (r"rank (\d+) of (\d+)", lambda r, n: r >= n),
]


def check_sentence(text, what):
    for form, holds in FORMS:
        match = re.search(form, text)
        if match:
            assert holds(*map(int, match.groups())), (text, what)
            return
    raise AssertionError(f"unexpected: {text} ({what})")


def random_sizes():
    refused = 0
    for _ in range(3000 * SCALE):
        config = reshard.random_config(rng)
        sizes = {n: rng.choice([0, 1, 1, 1, 2, 3, 4, 5]) for n in
                 ("tp", "cp", "ep", "etp", "dp", "pp", "vpp")}
        sizes.update(experts=rng.randrange(3), vocab_multiple=rng.choice([0, 1, 7]))
        if rng.random() < 0.3:
            sizes.update(first_stage_layers=rng.randrange(4), last_stage_layers=rng.randrange(4))
        if rng.random() < 0.2:
            sizes.update(embedding_in_split=rng.randrange(2), loss_in_split=rng.randrange(2))
        for name in ("tp", "ep", "etp", "pp"):
            sizes[name + "_rank"] = rng.choice([0, 0, 0, 1])
        spec, what = spec_of(**sizes), (config.family, sizes)
        text = refusal(build, config, spec)
        if text:
            refused += 1
            check_sentence(text, what)
        text = refusal(dray.call, dray.lib.dray_megatron_place, c.byref(spec), rng.randrange(40),
                       None)
        if text:
            check_sentence(text, what)
    assert refused > 500


def one_model():
    return dray.ModelConfig(
        family=b"deepseek_v3", vocab_size=20, hidden_size=8, intermediate_size=12, layers=4,
        heads=4, kv_heads=4, head_dim=6, dtype=7, experts=4, moe_intermediate_size=4,
        shared_experts=1, first_k_dense=1, q_lora_rank=8, kv_lora_rank=6, qk_nope_head_dim=4,
        qk_rope_head_dim=2, v_head_dim=4, mtp_layers=1)


def names_and_shapes():
    config, spec = one_model(), spec_of(tp=2, ep=2, etp=1, dp=2, pp=2, ep_rank=1, tp_rank=1)
    layout = dray.Layout()
    layout.add_region(1 << 16)
    layer = "decoder.layers.1."
    before = dray.packed(layout)
    for name, shape, says in (
            (layer + "self_attention.linear_q_up_proj.weight", [24, 8],
             "expected local shape [12, 8], found [24, 8]"),
            (layer + "self_attention.linear_proj.weight", [8], "expected local shape [8, 8]"),
            (layer + "self_attention.linear_q_down_proj.weight", [5, 8],
             "expected local shape [8, 8], found [5, 8]"),
            (layer + "mlp.experts.linear_fc2.weight2", [8, 4],
             "4 experts over ep 2 are 2 a rank"),
            (layer + "mlp.linear_fc1.weight", [12, 8], "layer 1 of the model, with experts"),
            ("decoder.layers.0.mlp.router.weight", [4, 8], "layer 0 of the model, dense"),
            (layer + "self_attention.linear_qkv.weight", [12, 8], "has no parameter"),
            ("decoder.layers.2.pre_mlp_layernorm.weight", [8], "stage 0 of 2 has 2 layers"),
            ("decoder.layers.02.pre_mlp_layernorm.weight", [8], "expected a layer's number"),
            ("decoder.layers.x", [8], "expected a layer's number"),
            ("mtp.layers.1.enorm.weight", [8], "has 1 layers"),
            ("embedding.word_embeddings.weight", [10, 8], "expected local shape [128, 8]"),
            ("", [8], "has no parameter")):
        text = refusal(add, layout, config, spec, name, shape)
        assert text and says in text, (name, text)
        assert dray.packed(layout) == before
    text = refusal(add, layout, config, spec, layer + "mlp.router.expert_bias", [4])
    assert text and "expected F32" in text and "found I64" in text, text
    text = refusal(add, layout, config, spec, layer + "pre_mlp_layernorm.weight", [8], 7, 1)
    assert text and "chunk 1 of 1" in text, text
    text = refusal(add, layout, config, spec, layer + "mlp.experts.linear_fc1.weight0", [8, 8], 7,
                   0, (1 << 16) - 8)
    assert text and "outside region" in text, text
    assert dray.packed(layout) == before  # gate and up both gone again
    add(layout, config, spec, layer + "mlp.router.expert_bias", [4], 2)
    config.mtp_layers, config.labels = 0, 1
    text = refusal(add, layout, config, spec, "embedding.word_embeddings.weight", [10, 8])
    assert text and "expected a language model, found one that scores 1 labels" in text, text


def down_projections():
    """The same tensor duplicated and cut by rows."""
    config = one_model()
    for rank in (0, 1):
        spec = spec_of(tp=2, etp=1, tp_rank=rank)
        for rows, start in ((8, 0), (4, 4 * rank)):
            layout = dray.Layout()
            layout.add_region(1 << 12)
            add(layout, config, spec, "decoder.layers.3.self_attention.linear_q_down_proj.weight",
                [rows, 8])
            (tensor, _, at, extent, _, _), = layout.blocks()
            assert layout.tensor(tensor).name == b"model.layers.3.self_attn.q_a_proj.weight"
            assert (at, extent) == ([start, 0], [rows, 8])


def other_names():
    """Norms that one module fuses and another keeps are the same tensors."""
    config, spec = one_model(), spec_of()
    pairs = (("self_attention.q_layernorm.weight", [8], "self_attn.q_a_layernorm.weight"),
             ("self_attention.kv_layernorm.weight", [6], "self_attn.kv_a_layernorm.weight"),
             ("pre_mlp_layernorm.weight", [8], "post_attention_layernorm.weight"))
    for name, shape, tensor in pairs:
        layout = dray.Layout()
        layout.add_region(1 << 12)
        add(layout, config, spec, "module.decoder.layers.0." + name, shape)
        assert layout.tensor(0).name.decode() == "model.layers.0." + tensor
    layout = dray.Layout()
    layout.add_region(1 << 12)
    add(layout, config, spec, "mtp.layers.0.mtp_model_layer.mlp.router.weight", [4, 8])
    assert layout.tensor(0).name == b"model.layers.4.mlp.gate.weight"


def random_names():
    """Altered names of real parameters: no entry, or the shape is wrong, or it is right after
    all."""
    config, spec = one_model(), spec_of()
    real = [p.name.decode() for p in reshard.megatron_parameters(config, spec)]
    for _ in range(3000 * SCALE):
        name = list(rng.choice(real))
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(name))
            name[at:at + rng.randrange(3)] = rng.choice(["", ".", "0", "9999999999999", "layers.",
                                                         "*", "x", "module."])
            name = name or ["x"]
        layout = dray.Layout()
        layout.add_region(1 << 12)
        refusal(add, layout, config, spec, "".join(name), [rng.randrange(9), rng.randrange(9)])


random_sizes()
names_and_shapes()
down_projections()
other_names()
random_names()
print("ok")
