"""config.json and the full layout against transformers: for random configurations of every family
the names, order and shapes of the tensors are those of the model that transformers builds, and the
values that the configuration gives are transformers'. Both generations of config.json."""

import ctypes as c
import json
import os
import random
import sys
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config
except ImportError as missing:
    print("skipped:", missing)
    sys.exit(77)

import dray

SEED = int(os.environ.get("DRAY_TEST_SEED", time.time()))
SCALE = int(os.environ.get("DRAY_TEST_SCALE", 1))
rng = random.Random(SEED)
print("seed", SEED)
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
    kind = rng.choice([LlamaConfig, Qwen2Config, Qwen3Config])
    if kind is not Qwen2Config:
        sizes["attention_bias"] = rng.random() < 0.5
        if rng.random() < 0.5:
            sizes["head_dim"] = 2 * rng.randrange(1, 6)
    if kind is LlamaConfig:
        sizes["mlp_bias"] = rng.random() < 0.5
    return kind(**sizes), dtype


def as_version_4(path):
    """The same configuration as transformers 4 wrote it."""
    with open(path) as f:
        config = json.load(f)
    config["torch_dtype"] = config.pop("dtype")
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
    for ours, name in (("layers", "num_hidden_layers"), ("heads", "num_attention_heads"),
                       ("kv_heads", "num_key_value_heads"), ("vocab_size", "vocab_size"),
                       ("hidden_size", "hidden_size"), ("intermediate_size", "intermediate_size"),
                       ("max_positions", "max_position_embeddings"),
                       ("rms_norm_eps", "rms_norm_eps")):
        assert getattr(mine, ours) == getattr(theirs, name), name
    assert mine.rope_theta == theirs.rope_parameters["rope_theta"]
    assert mine.dtype == DTYPES[dtype] and bool(mine.tied) == theirs.tie_word_embeddings
    handle = c.c_void_p()
    dray.call(dray.lib.dray_layout_full, c.byref(mine), 0, 1, c.byref(handle))
    layout = dray.Layout(handle)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    want = [(n, list(t.shape)) for n, t in model.state_dict().items()]
    got = [(t.name.decode(), list(t.shape)[:t.ndim]) for t in layout.tensors()]
    assert got == want, (config, [x for x in zip(got, want) if x[0] != x[1]][:3])


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
