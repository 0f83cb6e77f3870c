"""Every family that dray lists against transformers: names and shapes of the full layout that dray makes of a
config.json are those of the checkpoint that transformers' own class writes of the same file, tied and not tied. Classes
that this transformers has not got are named and left out."""

import ctypes as c
import math
import os
import tempfile

from begin import needs, rng

os.environ["HF_HUB_OFFLINE"] = "1"
with needs:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import dray


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


def vision(**more):
    heads = n(1, 4)
    return dict(depth=n(1, 4), hidden_size=heads * n(1, 4, 4), intermediate_size=n(4, 20), num_heads=heads,
                out_hidden_size=n(2, 9), patch_size=n(2, 5), temporal_patch_size=n(1, 4), spatial_merge_size=n(1, 3),
                in_channels=n(1, 4), **more)


def qwen_vl(text, **more):
    sizes = dict(text, rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 1]})
    return dict(text_config=sizes, vision_config=vision(**more))


def tower():
    heads = n(1, 4)
    return dict(hidden_size=heads * n(1, 4, 4), intermediate_size=n(4, 20), num_hidden_layers=n(1, 4),
                num_attention_heads=heads, num_channels=n(1, 4), patch_size=4)


def llama4():
    sizes = dict(core(), intermediate_size_mlp=n(4, 40), num_local_experts=n(2, 6))
    return dict(sizes, moe_layers=[i for i in range(sizes["num_hidden_layers"]) if rng.random() < 0.5])


def llama4_vision():
    sizes = dict(tower(), image_size=n(1, 4, 4), projector_input_dim=n(2, 9), vision_output_dim=n(2, 9))
    return dict(sizes, intermediate_size=sizes["hidden_size"] * 4, projector_output_dim=n(2, 9))


def mistral3():
    patches = dict(tower(), model_type="pixtral", image_size=8, head_dim=n(1, 4, 4))
    return dict(text_config=dict(core(), model_type="mistral"), vision_config=patches, spatial_merge_size=n(1, 3),
                multimodal_projector_bias=rng.random() < 0.5)


def nemotron():
    kinds = [rng.choice(["linear_attention", "full_attention", "mlp", "moe"]) for _ in range(n(1, 8))]
    sizes = dict(core(), layers_block_type=kinds, mamba_num_heads=4, mamba_head_dim=n(1, 9, 2), n_groups=2,
                 ssm_state_size=n(1, 9), conv_kernel=n(2, 6), use_conv_bias=rng.random() < 0.5,
                 moe_shared_expert_intermediate_size=n(1, 9), **experts("n_routed_experts"))
    del sizes["num_hidden_layers"]
    return sizes


def without(sizes, key):
    return {k: v for k, v in sizes.items() if k != key}


def deepseek_v4():
    groups, layers = n(1, 3), n(1, 5)
    sizes = dict(core((layers, layers + 1)), num_attention_heads=groups * n(1, 4), num_key_value_heads=1, q_lora_rank=n(3, 9),
                 o_groups=groups, o_lora_rank=n(1, 9), index_n_heads=n(1, 4), index_head_dim=n(3, 9, 2), hc_mult=n(1, 5),
                 n_shared_experts=1, compress_rates={"compressed_sparse_attention": n(1, 9), "heavily_compressed_attention": n(9, 20)},
                 layer_types=[rng.choice(["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"])
                              for _ in range(layers)],
                 mlp_layer_types=[rng.choice(["hash_moe", "moe"]) for _ in range(layers)], **experts("n_routed_experts"))
    return without(sizes, "intermediate_size")


def deepstack():
    return dict(deepstack_visual_indexes=[0] * n(0, 3), num_position_embeddings=n(1, 9))


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
    "deepseek_v4": deepseek_v4,
    "glm_moe_dsa": lambda: latent(index_n_heads=n(1, 4), index_head_dim=n(3, 9, 2)),
    "glm4_moe_lite": latent,
    "llama4_text": llama4,
    "nemotron_h": nemotron,
    "qwen2_5_vl": lambda: qwen_vl(without(core(), "head_dim")),
    "qwen3_vl": lambda: qwen_vl(biased(), **deepstack()),
    "qwen3_5": lambda: qwen_vl(linear(), num_position_embeddings=n(1, 9)),
    "qwen3_5_moe": lambda: qwen_vl(linear(**SHARED, **experts()), num_position_embeddings=n(1, 9)),
    "mistral3": mistral3,
    "llama4": lambda: dict(text_config=llama4(), vision_config=llama4_vision()),
}


def theirs(config):
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    state = revert_weight_conversion(model, model.state_dict())
    return sorted((name, [*tensor.shape[:3], math.prod(tensor.shape[3:])][:tensor.ndim])  # four dimensions at most
                  for name, tensor in state.items())


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
        head = [name for name, _ in want if name.endswith("lm_head.weight") or name == "head.weight"]
        embedding = [name for name, _ in want if name.endswith(("embed_tokens.weight", "embeddings.weight"))]
        assert aliases == (dict(zip(head, embedding)) if tied else {}), (family, aliases)
print(len(FAMILIES), "families")
