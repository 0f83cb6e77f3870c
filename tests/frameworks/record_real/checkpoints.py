"""Tiny random checkpoints out of transformers' own classes: a configuration of each model type, made
small, and the tensors that its save_pretrained writes."""
import glob
import json
import os
import unittest.mock

import torch
import transformers
from safetensors.torch import load_file
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# What makes a configuration small, by the names that configurations have for it. Heads of keys and values
# are fewer than the ranks of TP4; the vocabulary is no multiple of what engines pad it to.
SMALL = {"hidden_size": 64, "n_embd": 64, "d_model": 64, "intermediate_size": 128, "n_inner": 128,
         "ffn_dim": 128, "ffn_hidden_size": 128, "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2,
         "n_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_key_value_heads": 2,
         "head_dim": 16, "vocab_size": 199, "max_position_embeddings": 128, "n_positions": 128,
         "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
         "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_layer_intermediate_size": 32,
         "shared_expert_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32,
         "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_group": 1, "topk_group": 1,
         "num_nextn_predict_layers": 0, "word_embed_proj_dim": 64, "sliding_window": 64,
         "first_k_dense_replace": 1, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1,
         "mamba_d_state": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "state_size": 16,
         "ssm_state_size": 16, "time_step_rank": 4, "mamba_dt_rank": 4, "linear_num_key_heads": 4,
         "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_head_dim": 16,
         "moe_topk": 2, "moe_k": 2, "expert_ffn_hidden_size": 32, "num_experts_per_token": 2,
         "shared_intermediate_size": 64, "n_shared_experts": 1, "layer_types": None,
         "num_shared_experts": 1, "dense_intermediate_size": 128, "embedding_size": 64,
         # Of what sees and hears.
         "depth": 2, "embed_dim": 64, "num_heads": 4, "out_hidden_size": 64, "image_size": 56, "projection_dim": 64,
         "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
         "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_source_positions": 32, "max_target_positions": 32,
         "num_mel_bins": 16, "mm_hidden_size": 64, "vision_hidden_size": 64, "audio_hidden_size": 64, "output_dim": 64,
         "num_position_embeddings": 16, "max_window_layers": 2, "conv_kernel_size": 5, "vision_output_dim": 64}

YARN = {"rope_type": "yarn", "type": "yarn", "rope_theta": 1e4, "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
MORE = {  # {model type: what its configuration needs else}
    "deepseek_v2": {"rope_parameters": YARN, "rope_scaling": YARN, "moe_layer_freq": 1, "n_group": 1,
                    "topk_group": 1},
    "deepseek_v3": {"topk_method": "noaux_tc", "moe_layer_freq": 1, "scoring_func": "sigmoid", "rope_parameters": YARN, "rope_scaling": YARN},
    "olmoe": {"num_key_value_heads": 4}, "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "gpt_oss": {"num_key_value_heads": 4}, "minimax_m2": {"rotary_dim": 8, "scoring_func": "sigmoid"}, "lfm2": {"block_dim": 64},
    "glm4_moe": {"head_dim": 16}, "hunyuan_v1_dense": {"head_dim": 16}, "hunyuan_v1_moe": {"head_dim": 16},
    "glm4_moe_lite": {"first_k_dense_replace": 1}, "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 32, "route_norm": True},
    "gptj": {"rotary_dim": 8}, "mamba2": {"num_heads": 8, "head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "mimo_v2_flash": {"layer_types": ["full_attention", "sliding_attention"]},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"]},
}

# What published config.json files say and transformers' classes do not write: engines read it.
PUBLISHED = {
    "gemma2": {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
    "qwen3_next": {"full_attention_interval": 2}, "hunyuan_v1_moe": {"moe_intermediate_size": [128, 128], "use_qk_norm": True,
                       "use_mixed_mlp_moe": True, "num_shared_expert": [1, 1]},
    "hunyuan_v1_dense": {"use_qk_norm": True}, "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": {"is_moe_layer": [False, True]},
    "bert": {"position_embedding_type": "absolute"}, "xlm-roberta": {"position_embedding_type": "absolute"},
    "mamba2": {"intermediate_size": 128, "rms_norm": True},
}


def small(kind, more):
    """The configuration of a class, made small, those within it, too; more: what it needs else."""
    plain = kind()
    known = {k: v for k, v in SMALL.items() if hasattr(plain, k) and
             not (k != "layer_types" and getattr(plain, k) is None and k.endswith("_id"))}
    known = {k: v for k, v in known.items() if k == "layer_types" or getattr(plain, k) is not None
             or k in ("num_key_value_heads", "n_inner", "q_lora_rank")}
    known = {k: v for k, v in known.items() if not isinstance(getattr(kind, k, None), property)}
    known.update({k: v for k, v in more.items() if k not in kind.sub_configs})
    for key in kind.sub_configs:
        if getattr(plain, key, None) is not None:
            known[key] = small(type(getattr(plain, key)), {**MORE.get(getattr(plain, key).model_type, {}), **more.get(key, {})})
    try:
        return kind(**known)
    except Exception:  # some make their list of layers' kinds out of their number
        known.pop("layer_types", None)
        return kind(**known)


def checkpoint(model_type, name, folder, seed):
    """Writes config.json of a class of transformers', and gives its name as it is written there and {name: tensor} of
    random numbers."""
    config = small(CONFIG_MAPPING[model_type], MORE.get(model_type, {}))
    kind = getattr(transformers, name)
    with torch.device("meta"):
        model = kind._from_config(config, dtype=torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    if count > 20e6:
        raise ValueError(f"{count} parameters: its configuration is not made small")
    model = model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for t in [*model.parameters(), *model.buffers()]:
            if t.is_floating_point():
                t.copy_(torch.randn(t.shape, generator=generator) * 0.5)
    with unittest.mock.patch("torch.distributed.is_initialized", lambda: False):  # else rank 0 writes alone
        model.save_pretrained(folder)
    tensors = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        tensors.update(load_file(path))
        os.unlink(path)
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as file:
        written = {**json.load(file), **PUBLISHED.get(model_type, {})}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(written, file)
    return written["architectures"][0], tensors


def architectures(tasks=("FOR_CAUSAL_LM_MAPPING",)):
    """(model type, name of its class) of transformers' lists of classes for these tasks, each class once."""
    found = {}
    for task in tasks:
        for t, names in getattr(modeling_auto, f"MODEL_{task}_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                if t in CONFIG_MAPPING and hasattr(transformers, name):
                    found.setdefault(name, t)
    return [(t, name) for name, t in found.items()]
