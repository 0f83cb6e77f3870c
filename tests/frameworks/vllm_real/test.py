"""vLLM for the CPU with backend "dray", found by its entry point, and a trainer of two ranks (FSDP2, gloo): greedy tokens
of random tiny models differ before each of the versions, and are transformers' own behind it (of DeepSeek-V3 shapes
vLLM's own with the checkpoint); an engine is killed, and another one joins. A draft model has a trainer of its own."""
import json
import os
import pathlib
import sys

import dray

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from warm import Warm

# As engine.py and trainer.py begin.
MODULES = ("torch", "transformers", "vllm", "vllm.entrypoints.llm", "vllm.distributed.weight_transfer", "vllm.model_executor.model_loader.reload",
           "vllm._custom_ops", "vllm.plugins", "vllm.v1.worker.cpu_worker", "torch.distributed.fsdp", "transformers.models.qwen2.modeling_qwen2",
           "transformers.models.qwen3_moe.modeling_qwen3_moe", "transformers.models.deepseek_v3.modeling_deepseek_v3")
SETTINGS = dict(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING", VLLM_CPU_KVCACHE_SPACE="1", OMP_NUM_THREADS="1")
WORK = pathlib.Path(os.environ["DRAY_WORK"])
SIZES = dict(vocab_size=199, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0)
MODELS = {
    "qwen2": dict(architectures=["Qwen2ForCausalLM"], intermediate_size=256, **SIZES),
    "qwen2-tied": dict(architectures=["Qwen2ForCausalLM"], intermediate_size=256, **{**SIZES, "tie_word_embeddings": True}),
    "qwen3_moe": dict(architectures=["Qwen3MoeForCausalLM"], intermediate_size=256, moe_intermediate_size=64, head_dim=32,
                      num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1, norm_topk_prob=True, **SIZES),
    # vLLM's kernels of latent attention know these ranks and sizes of heads alone.
    "deepseek_v3": dict(architectures=["DeepseekV3ForCausalLM"], intermediate_size=256, moe_intermediate_size=64,
                        kv_lora_rank=512, q_lora_rank=64, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
                        n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
                        n_group=1, topk_group=1, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True,
                        routed_scaling_factor=1.0, moe_layer_freq=1, num_nextn_predict_layers=0,
                        **{**SIZES, "num_key_value_heads": 4}),
}
# (model type, whether parameters lie as load_weights fills them, whether there is a draft model, versions)
CASES = [("qwen2", 0, 0, 5), ("qwen2", 1, 0, 5), ("qwen2", 1, 1, 2), ("qwen2", 0, 1, 2), ("qwen2-tied", 0, 0, 2), ("qwen2-tied", 1, 0, 2),
         ("qwen3_moe", 0, 0, 5), ("deepseek_v3", 0, 0, 5)]


def case(warm, model_type, plain, draft, versions, port):
    folder = WORK / f"{model_type}-{plain}-{draft}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type.partition("-")[0], "torch_dtype": "float32", **MODELS[model_type]}))
    ranks = [warm.start(HERE / "trainer.py", model_type, folder, plain, draft, versions, out=folder / f"said{rank}", RANK=str(rank),
                        WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), **SETTINGS) for rank in (0, 1)]
    try:
        ended = warm.wait(ranks[0])
        said = (folder / "said0").read_text()
        print(said, flush=True)
        if ended or warm.wait(ranks[1]):
            sys.exit(f"{model_type}, plain {plain}, draft {draft}: a rank of the trainer failed")
    finally:
        for each in ranks:
            warm.kill(each)
    return json.loads([line for line in said.splitlines() if line.startswith('{"model"')][-1])


def main():
    seen, warm = [], Warm(MODULES, **SETTINGS)
    with dray.serve():
        for number, (model_type, plain, draft, versions) in enumerate(CASES):
            came = case(warm, model_type, plain, draft, versions, 29611 + number)
            assert came["versions"] == versions
            in_place = "" not in came["left"]
            assert in_place == bool(plain), came["left"]
            seen.append(f"{model_type}{' and its draft' if draft else ''} {'in place' if in_place else 'by load_weights'}: {versions} versions, last "
                        f"{came['seconds'][-1] * 1e3:.1f} ms")
    print("; ".join(seen))


main()
