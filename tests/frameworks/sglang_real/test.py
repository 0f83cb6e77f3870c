"""SGLang's WeightUpdater with load_format "dray.integrations.sglang.load", found by its entry point, behind SGLang's own
routes and sessions, and a trainer of two ranks (FSDP2, gloo): the parameters and buffers of random tiny models differ
before each of the versions from what SGLang makes of the checkpoint by itself, in FlattenedTensorBuckets, and not behind
it; an engine is killed, and another one joins."""
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import dray

HERE = pathlib.Path(__file__).resolve().parent
WORK = pathlib.Path(os.environ["DRAY_WORK"])
SGLANG = "sglang==0.5.23"  # it asks for CUDA's packages, too, and is put in without them
SIZES = dict(vocab_size=199, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0)
MODELS = {
    "qwen2": dict(architectures=["Qwen2ForCausalLM"], intermediate_size=256, **SIZES),
    "qwen3_moe": dict(architectures=["Qwen3MoeForCausalLM"], intermediate_size=256, moe_intermediate_size=64, head_dim=32,
                      num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1, norm_topk_prob=True, **SIZES),
}
# (name, model type, ranks of the engine, dtype of the trainer, whether in place); the engine's dtype is bfloat16
CASES = [("qwen2", "qwen2", 1, "float32", True), ("qwen3_moe", "qwen3_moe", 2, "bfloat16", True),
         ("loader", "qwen3_moe", 1, "bfloat16", False)]
VERSIONS = 5


def case(name, model_type, tp, dtype, in_place, port):
    folder = WORK / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "torch_dtype": dtype, **MODELS[model_type]}))
    ranks = [subprocess.Popen([sys.executable, HERE / "trainer.py", folder, str(tp), str(VERSIONS), dtype,
                               str(int(in_place))], stdout=subprocess.PIPE if rank == 0 else None, text=True,
                              env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                                   "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank)})
             for rank in (0, 1)]
    try:
        said = ranks[0].communicate()[0]
        print(said, flush=True)
        if ranks[0].returncode or ranks[1].wait(60):
            sys.exit(f"{name}: a rank of the trainer failed")
    finally:
        for each in ranks:
            each.kill()
    return json.loads([line for line in said.splitlines() if line.startswith('{"versions"')][-1])


def main():
    if importlib.util.find_spec("sglang") is None:
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", SGLANG], check=True)
    seen = []
    with dray.serve():
        for number, of in enumerate(CASES):
            came = case(*of, 29751 + number)
            assert came["versions"] == VERSIONS
            assert came["left"] == ({} if of[-1] else {"": "in_place is False"}), came["left"]
            seen.append(f"{of[1]} at TP{of[2]} {'in place' if of[-1] else 'by load_weights'}: {VERSIONS} versions, last "
                        f"{came['seconds'][-1] * 1e3:.1f} ms")
    print("; ".join(seen))


main()
