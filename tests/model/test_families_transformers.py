"""Every family that dray lists against transformers: names and shapes of the full layout that dray makes of a
config.json are those of the checkpoint that transformers' own class writes of the same file, tied and not tied. Classes
that this transformers has not got are named and left out."""

import ctypes as c
import os
import random
import sys
import tempfile
import time

os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
except ImportError as missing:
    print("skipped:", missing)
    sys.exit(77)

import dray

SEED = int(os.environ.get("DRAY_TEST_SEED", time.time()))
rng = random.Random(SEED)
print("seed", SEED)


def n(low, high, step=1):
    return rng.randrange(low, high) * step


def core(layers=(1, 4)):
    kv = n(1, 4)
    heads = kv * n(1, 4)
    return dict(vocab_size=n(10, 90), hidden_size=heads * n(1, 5, 2), intermediate_size=n(4, 40),
                num_hidden_layers=n(*layers), num_attention_heads=heads, num_key_value_heads=kv, head_dim=n(1, 6, 2),
                pad_token_id=None, bos_token_id=None, eos_token_id=None)


def experts(key="num_experts"):
    return {key: n(2, 6), "num_experts_per_tok": 1, "moe_intermediate_size": n(1, 12)}


def biased(**more):
    return dict(core(), attention_bias=rng.random() < 0.5, **more)


def linear(**more):
    values = n(1, 4)
    sizes = dict(core((2, 6)), attention_bias=rng.random() < 0.5, linear_num_key_heads=values,
                 linear_num_value_heads=values * n(1, 3), linear_key_head_dim=n(1, 9), linear_value_head_dim=n(1, 9),
                 linear_conv_kernel_dim=n(2, 6), **more)
    sizes["layer_types"] = ["linear_attention" if rng.random() < 0.6 else "full_attention"
                            for _ in range(sizes["num_hidden_layers"])]
    return sizes


def latent(**more):
    sizes = dict(core(), q_lora_rank=n(3, 9), kv_lora_rank=n(1, 9), qk_nope_head_dim=n(1, 5, 2), v_head_dim=n(1, 9),
                 qk_rope_head_dim=n(1, 5, 2), n_group=1, topk_group=1, n_shared_experts=n(1, 3),
                 **experts("n_routed_experts"), **more)
    sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    del sizes["head_dim"]
    sizes["mlp_layer_types"] = [rng.choice(["dense", "sparse"]) for _ in range(sizes["num_hidden_layers"])]
    return sizes


SHARED = {"shared_expert_intermediate_size": 7}
FAMILIES = {
    "mistral": core,
    "gemma3_text": biased,
    "minimax_m2": lambda: dict(core(), num_local_experts=n(2, 6), num_experts_per_tok=1),
    "gpt_oss": lambda: biased(num_local_experts=n(2, 6), num_experts_per_tok=1),
    "qwen3_next": lambda: linear(decoder_sparse_step=n(1, 3), mlp_only_layers=[n(0, 4)], **SHARED, **experts()),
    "qwen3_5_text": linear,
    "qwen3_5_moe_text": lambda: linear(**SHARED, **experts()),
    "deepseek_v32": lambda: latent(index_n_heads=n(1, 4), index_head_dim=n(3, 9, 2)),
    "glm_moe_dsa": lambda: latent(index_n_heads=n(1, 4), index_head_dim=n(3, 9, 2)),
    "glm4_moe_lite": latent,
}


def theirs(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    state = revert_weight_conversion(model, model.state_dict())
    return sorted((name, list(tensor.shape)) for name, tensor in state.items())


def mine(folder):
    config, handle = dray.ModelConfig(), c.c_void_p()
    dray.call(dray.lib.dray_model_config_load, folder.encode(), c.byref(config))
    dray.call(dray.lib.dray_layout_full, c.byref(config), 0, 1, c.byref(handle))
    layout = dray.Layout(handle)  # has the names
    tensors = layout.tensors()
    aliases = {t.name.decode(): tensors[t.alias_of].name.decode() for t in tensors if t.alias_of >= 0}
    return sorted((t.name.decode(), list(t.shape)[:t.ndim]) for t in tensors), aliases


for family, sizes in FAMILIES.items():
    if family not in CONFIG_MAPPING:
        print("left out:", family, "is not in transformers", transformers.__version__)
        continue
    for tied in (False, True):
        config = CONFIG_MAPPING[family](**sizes(), tie_word_embeddings=tied)
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            got, aliases = mine(folder)
        want = theirs(config)
        assert got == want, (family, config, [x for x in got if x not in want], [x for x in want if x not in got])
        assert aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {}), (family, aliases)
print(len(FAMILIES), "families")
