"""The demo's model, as transformers has it, and the log-probs of what it was given."""
import json

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from text import BEGIN, END, PAD


def make_model(job):
    """From scratch; the same on all ranks, for the seed is the job's."""
    m = job["model"]
    config = Qwen2Config(
        vocab_size=259, hidden_size=m["hidden_size"], intermediate_size=m["intermediate_size"],
        num_hidden_layers=m["layers"], num_attention_heads=m["heads"], num_key_value_heads=m["kv_heads"],
        max_position_embeddings=m["max_positions"], rms_norm_eps=m["rms_norm_eps"],
        rope_theta=m["rope_theta"], tie_word_embeddings=True, pad_token_id=PAD, bos_token_id=BEGIN,
        eos_token_id=END)
    config._attn_implementation = "eager"
    model = Qwen2ForCausalLM(config)
    torch.manual_seed(job["seed"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 2:
                parameter.normal_(0, m["embedding_std"] if "embed" in name else m["weight_std"])
    return model


def config_json(model):
    return json.dumps(dict(model.config.to_dict(), architectures=["Qwen2ForCausalLM"], torch_dtype="float32"))


def pad_left(rows):
    """(tokens, mask) of rows of tokens, as long as the longest."""
    longest = max(map(len, rows))
    tokens = torch.tensor([[PAD] * (longest - len(row)) + list(row) for row in rows])
    return tokens, (tokens != PAD).long()


def log_probs(model, prompts, responses, temperature=1.0):
    """(log-probs of the responses' tokens, which of them are some), both of (rows, longest)."""
    longest = max(map(len, responses))
    tokens, mask = pad_left(prompts)
    filled = torch.tensor([list(r) + [PAD] * (longest - len(r)) for r in responses])
    there = torch.arange(longest) < torch.tensor([len(r) for r in responses])[:, None]
    whole, mask = torch.cat([tokens, filled], 1), torch.cat([mask, there.long()], 1)
    logits = model(input_ids=whole, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    logits = logits[:, tokens.shape[1] - 1:-1] / temperature
    return logits.log_softmax(-1).gather(-1, filled[..., None])[..., 0], there
