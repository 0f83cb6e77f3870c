"""How long it takes to record vLLM's models of full size, and how much memory: fullsize.py 30b|235b."""
import json
import os
import resource
import sys
import tempfile
import time

sys.modules["torchvision"] = None
import vllm_engine  # noqa: E402
from dray.weights import record, tensors  # noqa: E402

COMMON = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
          "head_dim": 128, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
          "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
          "tie_word_embeddings": False, "torch_dtype": "bfloat16", "decoder_sparse_step": 1,
          "mlp_only_layers": [], "attention_bias": False, "norm_topk_prob": True}
MODELS = {"30b": (4, dict(COMMON, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
                          num_hidden_layers=48, num_attention_heads=32), 10),
          "235b": (8, dict(COMMON, hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536,
                           num_hidden_layers=94, num_attention_heads=64), 20)}

name = sys.argv[1]
tp, config, most = MODELS[name]
ranks = vllm_engine.Ranks(tp, tp - 1)
with tempfile.TemporaryDirectory() as folder:
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)
    listed = tensors(folder)
    model, config = ranks.model(folder)
begun, cpu = time.monotonic(), time.process_time()
with vllm_engine.around(config):
    recorded = record(model.load_weights, listed)
seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
print(f"{name} at TP{tp}: {len(listed)} tensors, {sum(len(p.parts) for p in recorded._found.values())} blocks "
      f"in {len(recorded.in_place)} parameters, {len(recorded.by_loader)} by the loader, "
      f"{seconds:.1f} s ({cpu:.1f} s of CPU), {peak:.2f} GB resident at most")
sys.exit(cpu > most or peak > 1.5 or bool(recorded.by_loader))
