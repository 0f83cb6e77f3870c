"""config.json and the full layout against transformers: for random configurations of every family
the names and shapes of the tensors are those of the checkpoint that transformers writes (and, without
experts, their order), and the values that the configuration gives are transformers'. Both
generations of config.json. The tensors of multi-token prediction, which transformers leaves out,
against the names in the authors' checkpoints."""

import ctypes as c
import json
import os
import tempfile

from begin import needs, rng, scale as SCALE

os.environ["HF_HUB_OFFLINE"] = "1"
with needs:
    import torch
    from transformers import (AutoModelForCausalLM, AutoModelForTokenClassification, DeepseekV3Config, Glm4MoeConfig, LlamaConfig,
                              MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig)
    from transformers.core_model_loading import revert_weight_conversion

import dray

DTYPES = {"float32": 2, "bfloat16": 3, "float16": 4}


def random_config():
    kv = rng.choice([1, 2, 3, 4])
    heads = kv * rng.randrange(1, 5)
    dtype = rng.choice(list(DTYPES))
    sizes = dict(vocab_size=rng.randrange(10, 90), intermediate_size=rng.randrange(4, 40),
                 num_hidden_layers=rng.randrange(1, 4), num_attention_heads=heads,
                 hidden_size=heads * 2 * rng.randrange(1, 5), num_key_value_heads=kv,
                 tie_word_embeddings=rng.random() < 0.5, rms_norm_eps=rng.choice([1e-5, 1e-6]),
                 max_position_embeddings=rng.choice([128, 4096]), dtype=dtype,
                 rope_parameters={"rope_type": "default",
                                  "rope_theta": rng.choice([1e4, 5e5, 1e6])})
    kind = rng.choice([LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig, MixtralConfig,
                       DeepseekV3Config, Glm4MoeConfig])
    if kind not in (Qwen2Config, MixtralConfig, DeepseekV3Config):
        sizes["attention_bias"] = rng.random() < 0.5
    if kind not in (Qwen2Config, DeepseekV3Config) and rng.random() < 0.5:
        sizes["head_dim"] = 2 * rng.randrange(1, 6)
    if kind is LlamaConfig:
        sizes["mlp_bias"] = rng.random() < 0.5
    experts, expert = rng.randrange(1, 13), rng.randrange(1, 12)
    if kind is Qwen3MoeConfig:
        sizes.update(num_experts=experts, moe_intermediate_size=expert, num_experts_per_tok=1,
                     decoder_sparse_step=rng.choice([1, 1, 2, 3]),
                     mlp_only_layers=[i for i in range(4) if rng.random() < 0.3])
    if kind is MixtralConfig:
        sizes.update(num_local_experts=experts, num_experts_per_tok=1)
    if kind in (DeepseekV3Config, Glm4MoeConfig):
        sizes.update(n_routed_experts=experts, moe_intermediate_size=expert, num_experts_per_tok=1,
                     n_shared_experts=rng.randrange(1, 3), num_nextn_predict_layers=rng.randrange(3),
                     first_k_dense_replace=rng.randrange(sizes["num_hidden_layers"] + 1))
    if kind is Glm4MoeConfig:
        sizes.update(use_qk_norm=rng.random() < 0.5)
    if kind is DeepseekV3Config:
        sizes.update(q_lora_rank=rng.choice([None, 3, 8]), kv_lora_rank=rng.randrange(1, 9),
                     qk_nope_head_dim=2 * rng.randrange(1, 5), v_head_dim=rng.randrange(1, 9),
                     qk_rope_head_dim=2 * rng.randrange(1, 5))
    if kind is not Glm4MoeConfig and rng.random() < 0.25:  # which has no such model
        sizes.update(architectures=[kind.__name__[:-6] + "ForTokenClassification"],
                     num_labels=rng.choice([1, 2, 5]))
    return kind(**sizes), dtype


# model.layers.61 of deepseek-ai/DeepSeek-V3 and model.layers.92 of zai-org/GLM-4.5, beside what any
# layer with experts has.
MTP = {"embed_tokens.weight": lambda c: [c.vocab_size, c.hidden_size],
       "enorm.weight": lambda c: [c.hidden_size], "hnorm.weight": lambda c: [c.hidden_size],
       "eh_proj.weight": lambda c: [c.hidden_size, 2 * c.hidden_size],
       "shared_head.norm.weight": lambda c: [c.hidden_size],
       "shared_head.head.weight": lambda c: [c.vocab_size, c.hidden_size]}


def expected(config):
    """Name and shape of the checkpoint's tensors, MTP layers included."""
    scores = config.architectures == [type(config).__name__[:-6] + "ForTokenClassification"]
    mtp = 0 if scores else getattr(config, "num_nextn_predict_layers", 0)
    layers = config.num_hidden_layers
    config = type(config)(**{**config.to_dict(), "num_hidden_layers": layers + mtp})
    with torch.device("meta"):
        model = (AutoModelForTokenClassification if scores else AutoModelForCausalLM).from_config(config)
    state = revert_weight_conversion(model, model.state_dict())
    tensors = [(n, list(t.shape)) for n, t in state.items()]
    for i in range(layers, layers + mtp):
        tensors += [(f"model.layers.{i}.{n}", shape(config)) for n, shape in MTP.items()]
    return tensors


def as_version_4(path):
    """The same configuration as transformers 4 wrote it."""
    with open(path) as f:
        config = json.load(f)
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = None
    with open(path, "w") as f:
        json.dump(config, f)


def load(path):
    config = dray.ModelConfig()
    dray.call(dray.lib.dray_model_config_load, path.encode(), c.byref(config))
    return config


def compare(config, dtype, theirs, mine):
    assert mine.family.decode() == theirs.model_type
    latent = isinstance(theirs, DeepseekV3Config)
    assert mine.kv_heads == (theirs.num_attention_heads if latent else theirs.num_key_value_heads)
    for ours, name in (("layers", "num_hidden_layers"), ("heads", "num_attention_heads"),
                       ("vocab_size", "vocab_size"),
                       ("hidden_size", "hidden_size"), ("intermediate_size", "intermediate_size"),
                       ("max_positions", "max_position_embeddings"),
                       ("rms_norm_eps", "rms_norm_eps")):
        assert getattr(mine, ours) == getattr(theirs, name), name
    assert mine.rope_theta == theirs.rope_parameters["rope_theta"]
    assert mine.dtype == DTYPES[dtype] and bool(mine.tied) == theirs.tie_word_embeddings
    handle = c.c_void_p()
    dray.call(dray.lib.dray_layout_full, c.byref(mine), 0, 1, c.byref(handle))
    layout = dray.Layout(handle)
    want = expected(theirs)
    got = [(t.name.decode(), list(t.shape)[:t.ndim]) for t in layout.tensors()]
    if mine.experts:
        want.sort()
        got.sort()
    assert got == want, (config, [x for x in zip(got, want) if x[0] != x[1]][:3])
    for t in layout.tensors():
        buffer = t.name.endswith(b"e_score_correction_bias")
        assert t.dtype == (DTYPES["float32"] if buffer else mine.dtype), t.name


CASES = 40 * SCALE
for i in range(CASES):
    config, dtype = random_config()
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        mine = load(folder)
        compare(config, dtype, config, mine)
        as_version_4(os.path.join(folder, "config.json"))
        again = load(os.path.join(folder, "config.json"))
        assert bytes(again) == bytes(mine), i
print(f"ok {CASES} configurations, written as transformers 5 and 4 do")
