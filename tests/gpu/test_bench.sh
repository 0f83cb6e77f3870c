#!/bin/bash
# gpu: dray bench weights --memory cuda on the fake driver: whole updates between processes with
# every element checked by a copy that knows nothing of plans. Casts and FP8 pushed by the source's
# GPU, cells that two sources share gathered, engines side by side, weights offloaded.
set -eu
[ -r "${DRAY_FAKE_CUDA:-}" ] || exit 77
work=$(mktemp -d)
state=$(mktemp /dev/shm/fake-cuda-XXXXXX)
trap 'rm -rf "$work" "$state"' EXIT
export DRAY_CUDA_LIBRARY=$DRAY_FAKE_CUDA DRAY_NVRTC_LIBRARY=$DRAY_FAKE_CUDA FAKE_CUDA_STATE=$state \
    FAKE_CUDA_DEVICES=4 XDG_CACHE_HOME=$work
unset CUDA_VISIBLE_DEVICES
cat >"$work/config.json" <<'J'
{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256,
 "intermediate_size": 384, "moe_intermediate_size": 384, "num_hidden_layers": 1,
 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 512,
 "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
 "rope_theta": 10000, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": true}
J
run() {
    timeout 100 "$DRAY_PROGRAM" bench weights --memory cuda --model "$work/config.json" --quick \
        --json "$@" >"$work/out" 2>"$work/err" || { echo "$*"; cat "$work/out" "$work/err"; exit 1; }
    grep -q "\"source\":\"${source:-publishers}\"" "$work/out"
}
run --from fsdp:2@0-1 --to engine:tp=2@0-1
grep -q '"engine_seconds":' "$work/out"
run --from fsdp:2@0-1 --to engine:tp=2@0-1 --verify off
run --from fsdp:2@0-1 --to engine:tp=2@2-3 --changed 100
grep -q '"delta_bytes":[1-9]' "$work/out"
# Answers of many slices: what is quantised for them is no larger than without deltas.
sed -i 's/"moe_intermediate_size": 384/"moe_intermediate_size": 2560/' "$work/config.json"
DRAY_TRUSTED_NETWORKS=127.0.0.0/8 DRAY_DATA_ADDRESS=127.0.0.1 DRAY_NCCL_LIBRARY='' \
    run --mode distributed --from fsdp:1@0 --to engine:tp=1,quant=fp8-block@1@~elsewhere --changed 100
sed -i 's/"moe_intermediate_size": 2560/"moe_intermediate_size": 384/' "$work/config.json"
run --from fsdp:2@0-1 --to engine:tp=1@0-1 --engines 2
run --from fsdp:2,dtype=f32@0-1 --to engine:tp=2@2-3
run --from fsdp:2@0-1 --to engine:tp=2,ep=2,quant=fp8-block@2-3
run --from fsdp:4@0-3 --to engine:tp=2,ep=2,quant=fp8-block@0,2 --strategy direct,bucket
run --from fsdp:2@0-1 --to engine:tp=2@0-1 --source pinned
run --from fsdp:2@0-1 --to engine:tp=1@0-1 --engines 2 --source pinned
commit() {
    run --from fsdp:2@0-1 --to engine:tp=2@0-1 "$@"
    grep -q '"prefetch_seconds":' "$work/out"
}
source=staging commit --prefetch device
source=staging commit --prefetch device --changed 100
grep -q '"prefetch_delta_bytes":[1-9]' "$work/out"
source=staging commit --prefetch pinned
source=staging commit --prefetch pinned --changed 100 # from this host: whole
source=staging commit --prefetch device --decode 1 --ctas 2 --copy-engines
grep -q '"slowdown":' "$work/out"
source=staging commit --prefetch device --decode 1 --within 300
grep -q '"p99_slowdown":' "$work/out"
grep -q 'step beside the prefetch, p99' "$work/out"
python3 - "$work/out" <<'P' # it was spread over the time
import json, sys
seconds = json.loads(open(sys.argv[1]).readline())["prefetch_seconds"]
assert seconds > 0.1, seconds
P
DRAY_NCCL_LIBRARY=$DRAY_FAKE_NCCL DRAY_TRUSTED_NETWORKS=127.0.0.0/8 DRAY_DATA_ADDRESS=127.0.0.1 \
    run --from fsdp:2@0-1 --to engine:tp=2@2-3@~other --mode distributed
grep -q '"network":' "$work/out"
# All ways at once, between hosts, load_weights included.
DRAY_NCCL_LIBRARY=$DRAY_FAKE_NCCL DRAY_TRUSTED_NETWORKS=127.0.0.0/8 DRAY_DATA_ADDRESS=127.0.0.1 \
    timeout 100 "$DRAY_PROGRAM" bench compare --memory cuda --model "$work/config.json" --quick \
    --from fsdp:2@0-1 --to engine:tp=2@2-3 --mode distributed >"$work/out" 2>"$work/err" ||
    { cat "$work/out" "$work/err"; exit 1; }
[ "$(grep -c '^distributed ' "$work/out")" = 4 ]
grep -q '^distributed *load_weights' "$work/out"
! "$DRAY_PROGRAM" bench compare --memory cuda --from fsdp:2@0-1@~a >"$work/out" 2>&1
! "$DRAY_PROGRAM" bench compare --from fsdp:2@0-1 >"$work/out" 2>&1
run --from megatron:tp=2,ep=2,etp=1,dp=2@0-1 --to engine:tp=2,ep=2@0-1
! "$DRAY_PROGRAM" bench weights --memory cuda --model "$work/config.json" --from fsdp:2@0@1 \
    --to engine:tp=2 >"$work/out" 2>&1
! "$DRAY_PROGRAM" bench weights --memory cuda --model "$work/config.json" --from fsdp:2@x-1 \
    --to engine:tp=2 >"$work/out" 2>&1
! "$DRAY_PROGRAM" bench weights --model "$work/config.json" --from fsdp:2 --to engine:tp=2 \
    --source pinned >"$work/out" 2>&1
