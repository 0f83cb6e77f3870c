#!/bin/bash
# The targets of weights on GPUs, each with its limit measured in the same run, and beside them today's
# flows on the same GPUs (bench/peers):
#
#   bench/gpu.sh [-d DRAY] [-p PEERS] [-m M2N] [-o OUT.json] [-r ROWS] [-n REPEATS]
#
# DRAY: the program (build/release/dray). PEERS: the flows in PyTorch (bench/peers/flows.py); none: they are
# left out. M2N: the flow over NCCL M2N (build/peers/m2n, which bench/peers/build_m2n.sh builds); left out
# where it is not there. OUT.json: all figures, of which bench/gpu_tables.py makes the tables of README.md and
# docs/gpu.md. ROWS: those whose name has this (grep -E; a flow's name is that of its row, then its own).
# REPEATS: the median of so many is taken (5), of dray, of the limit, and of the flows.
# The GPUs are those that $CUDA_VISIBLE_DEVICES lets through: 8 for the targets as they are written,
# 2 or 4 for the same shapes on fewer. Ten minutes on 8; little host memory. 77: no GPUs.
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
dray=$here/build/release/dray flows=$here/bench/peers/flows.py m2n=$here/build/peers/m2n
out='' rows=. repeats=5
while getopts d:p:m:o:r:n: option; do
    case $option in
    d) dray=$OPTARG ;;
    p) flows=$OPTARG ;;
    m) m2n=$OPTARG ;;
    o) out=$OPTARG ;;
    r) rows=$OPTARG ;;
    n) repeats=$OPTARG ;;
    *) exit 2 ;;
    esac
done
[ "$flows" = none ] && flows=''
if [ ! -x "$m2n" ]; then
    echo "bench/gpu.sh: no $m2n: NCCL M2N is left out (bench/peers/build_m2n.sh builds it)" >&2
    m2n=''
fi
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
kind=$(nvidia-smi -L 2>/dev/null | sed -n '1s/^GPU [0-9]*: \(NVIDIA \)\{0,1\}\(.*\) (UUID.*/\2/p')
[ -n "${CUDA_VISIBLE_DEVICES:-}" ] && gpus=$(echo "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c .)
if [ "$gpus" -lt 2 ]; then
    echo "bench/gpu.sh: 2 GPUs or more are needed, $gpus are there" >&2
    exit 77
fi
half=$((gpus / 2)) quarter=$((gpus / 4))
all="0-$((gpus - 1))" low="0-$((half - 1))" high="$half-$((gpus - 1))"
begun=$SECONDS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
found=$work/found.jsonl
: >"$found"

# row NAME TARGET AGAINST ARGUMENTS...: AGAINST: limit, or the name of the row whose time is meant.
row() {
    local name=$1 target=$2 against=$3
    shift 3
    echo "$name" | grep -qE "$rows" || return 0
    local begin=$SECONDS
    timeout 120 "$dray" bench weights --memory cuda --repeat "$repeats" --json "$@" \
        >"$work/row.json" 2>"$work/row.err"
    local rc=$?
    python3 - "$name" "$target" "$against" $rc "$work" "$((SECONDS - begin))" >>"$found" <<'P'
import json, sys
name, target, against, rc, work, took = sys.argv[1:]
row = {"row": name, "target": float(target), "against": against, "took_seconds": int(took)}
lines = [json.loads(l) for l in open(work + "/row.json") if l.startswith("{")]
if rc == "0" and lines:
    row["bench"] = lines[0]  # behind it, what prefetches made of steps
else:
    row["error"] = open(work + "/row.err").read().strip()[-400:] or "status " + rc
print(json.dumps(row))
P
}

# flow ROW KIND COMMAND...: what a flow takes for the work of a row; it prints one JSON object.
flow() {
    local name=$1 kind=$2
    shift 2
    echo "$name, $kind" | grep -qE "$rows" || return 0
    timeout 150 "$@" >"$work/flow.json" 2>"$work/flow.err"
    python3 - "$name" "$kind" $? "$work" >>"$found" <<'P'
import json, sys
name, kind, rc, work = sys.argv[1:]
lines = [json.loads(l) for l in open(work + "/flow.json") if l.startswith("{")]
row = {"of": name, "flow": kind}
if rc == "0" and lines:
    row["bench"] = lines[-1]
else:
    row["error"] = open(work + "/flow.err").read().strip()[-400:] or "status " + rc
print(json.dumps(row))
P
}
in_pytorch() { # ROW KIND MODEL
    [ -z "$flows" ] ||
        flow "$1" "$2" python3 "$flows" --json --repeat "$repeats" --ranks "$gpus" "$2" "$3"
}
over_m2n() { # ROW MODEL; matrices alone where it refuses the rest
    [ -z "$m2n" ] || flow "$1" m2n bash -c '"$@" || exec "$1" -m "${@:2}"' m2n \
        "$m2n" -j -n "$repeats" "$2" "$half" "$half"
}

m32=qwen2.5-32b m30=qwen3-30b-a3b m4=qwen3-4b
row "32B apart" 1.15 limit --model $m32 --from "fsdp:$half@$low" --to "engine:tp=$half@$high"
row "32B apart, not verified" 0 limit --verify off --model $m32 --from "fsdp:$half@$low" \
    --to "engine:tp=$half@$high"
row "30B-A3B apart" 1.2 limit --model $m30 --from "fsdp:$half@$low" --to "engine:tp=$half@$high"
row "4B apart" 1.3 limit --model $m4 --from "fsdp:$half@$low" --to "engine:tp=$half@$high"
row "4B co-located TP$gpus" 0 limit --model $m4 --from "fsdp:$gpus@$all" --to "engine:tp=$gpus@$all"
row "32B co-located TP$gpus" 1.3 limit --model $m32 --from "fsdp:$gpus@$all" \
    --to "engine:tp=$gpus@$all"
row "32B co-located TP${half}xDP2" 1.3 limit --model $m32 --from "fsdp:$gpus@$all" \
    --to "engine:tp=$half@$all" --engines 2
[ $quarter -gt 0 ] && row "32B co-located TP${quarter}xDP4" 1.3 limit --model $m32 \
    --from "fsdp:$gpus@$all" --to "engine:tp=$quarter@$all" --engines 4
row "30B-A3B co-located TP$gpus" 1.3 limit --model $m30 --from "fsdp:$gpus@$all" \
    --to "engine:tp=$gpus@$all"
row "30B-A3B co-located TP${half}xDP2" 1.3 limit --model $m30 --from "fsdp:$gpus@$all" \
    --to "engine:tp=$half@$all" --engines 2
[ $quarter -gt 0 ] && row "30B-A3B co-located TP${quarter}xDP4" 1.3 limit --model $m30 \
    --from "fsdp:$gpus@$all" --to "engine:tp=$quarter@$all" --engines 4
row "32B apart, block FP8" 0.65 "32B apart" --model $m32 --from "fsdp:$half@$low" \
    --to "engine:tp=$half,quant=fp8-block@$high"
row "30B-A3B apart, block FP8, EP" 0.65 "30B-A3B apart" --model $m30 --from "fsdp:$half@$low" \
    --to "engine:tp=$half,ep=$half,quant=fp8-block@$high"
for format in fp8-deepgemm mxfp8 mxfp4 nvfp4 int4 int4-zero; do
    most=0.45
    case $format in *8 | fp8*) most=0.65 ;; esac
    row "32B apart, $format" $most "32B apart" --model $m32 --from "fsdp:$half@$low" \
        --to "engine:tp=$half,quant=$format@$high"
    row "30B-A3B apart, $format, EP" $most "30B-A3B apart" --model $m30 --from "fsdp:$half@$low" \
        --to "engine:tp=$half,ep=$half,quant=$format@$high"
done
row "32B apart, f32 FSDP1 to bf16" 1.3 limit --model $m32 --from "fsdp1:$half,dtype=f32@$low" \
    --to "engine:tp=$half@$high"
row "32B, 15 layers, offloaded in pinned memory" 1.15 limit --source pinned --model $m32 \
    --layers 15 --from "fsdp:$gpus@$all" --to "engine:tp=$gpus@$all"
row "32B, 15 layers, offloaded, TP${half}xDP2" 1.15 limit --source pinned --model $m32 \
    --layers 15 --from "fsdp:$gpus@$all" --to "engine:tp=$half@$all" --engines 2
row "32B, 15 layers, commit of what lies in spare GPU memory" 0 limit --prefetch device --model $m32 \
    --layers 15 --from "fsdp:$half@$low" --to "engine:tp=$half@$high"
row "32B, 15 layers, commit of what lies in pinned memory" 1.15 limit --prefetch pinned --model $m32 \
    --layers 15 --from "fsdp:$gpus@$all" --to "engine:tp=$gpus@$all"
row "commit by exchange, 32B TP4 (16.4 GB a GPU)" 0 limit --prefetch device --model $m32 --layers $((16 * half)) \
    --from "fsdp:$half@$low" --to "engine:tp=$half@$high"
# What a step of the optimizer changes: 1 % of the elements, by chance (random values: the most bytes).
row "32B apart, delta 1 %" 0 limit --changed 100 --model $m32 --from "fsdp:$half@$low" --to "engine:tp=$half@$high"
row "delta 1 %, 32B TP4, prefetched and exchanged" 0 limit --prefetch device --changed 100 --model $m32 \
    --layers $((16 * half)) --from "fsdp:$half@$low" --to "engine:tp=$half@$high"
beside="--prefetch device --decode 4 --model $m32 --layers 24 --from fsdp:$half@$low --to engine:tp=$half@$high"
row "commit, prefetched beside decoding by copy engines" 0 limit --copy-engines --ctas 16 $beside
row "commit, prefetched beside decoding by 16 thread blocks" 0 limit --ctas 16 $beside
row "commit, prefetched beside decoding by all thread blocks" 0 limit $beside
row "prefetch beside decoding, within 1 s" 0 limit --prefetch device --decode 4 --within 1000 \
    --model $m32 --layers $((16 * half)) --from "fsdp:$half@$low" --to "engine:tp=$half@$high"
# Eight ranks of Megatron-Core, on fewer GPUs several on each; then as many as there are GPUs.
row "Megatron TP4xPP2, 32B co-located" 0 limit --model $m32 --from "megatron:tp=4,pp=2@$all" \
    --to "engine:tp=$gpus@$all"
row "Megatron TP2xEP4, 30B-A3B to EP$gpus" 0 limit --model $m30 \
    --from "megatron:tp=2,ep=4,dp=4@$all" --to "engine:tp=$gpus,ep=$gpus@$all"
if [ "$gpus" -lt 8 ]; then
    row "Megatron TP${half}xPP2, 32B co-located" 0 limit --model $m32 \
        --from "megatron:tp=$half,pp=2@$all" --to "engine:tp=$gpus@$all"
    row "Megatron TP2xEP$half, 30B-A3B to EP$gpus" 0 limit --model $m30 \
        --from "megatron:tp=2,ep=$half,dp=$half@$all" --to "engine:tp=$gpus,ep=$gpus@$all"
fi
row "30B-A3B apart, EP$half" 1.2 limit --model $m30 --from "fsdp:$half@$low" \
    --to "engine:tp=$half,ep=$half@$high"
# What fills the GPUs: 145 GB of weights, and an engine's copy of them on every two GPUs.
if [ $quarter -gt 0 ]; then
    row "72B co-located TP2xDP$half" 1.2 limit --model qwen2.5-72b \
        --from "fsdp:$gpus@$all" --to "engine:tp=2@$all" --engines "$half"
else
    row "72B, 60 layers, co-located TP$gpus" 1.2 limit --model qwen2.5-72b --layers 60 \
        --from "fsdp:$gpus@$all" --to "engine:tp=$gpus@$all"
fi
# As if the engines were on another host, over the same links: what NCCL makes of them.
export DRAY_TRUSTED_NETWORKS=127.0.0.0/8 DRAY_DATA_ADDRESS=127.0.0.1
row "32B apart, on another host, over NCCL" 1.25 limit --model $m32 --mode distributed \
    --from "fsdp:$half@$low" --to "engine:tp=$half@$high@~elsewhere"
row "30B-A3B apart, on another host, over NCCL" 1.25 limit --model $m30 --mode distributed \
    --from "fsdp:$half@$low" --to "engine:tp=$half@$high@~elsewhere"
row "32B apart, block FP8, on another host, over NCCL" 0.65 "32B apart, on another host, over NCCL" --model $m32 \
    --mode distributed --from "fsdp:$half@$low" --to "engine:tp=$half,quant=fp8-block@$high@~elsewhere"
# A link of 1 GB/s from each trainer: the kernel paces its data server's connections, one to each of the engine's ranks.
nccl_library=${DRAY_NCCL_LIBRARY-unset}
export DRAY_DATA_RATE=$((1000000000 / half)) DRAY_NCCL_LIBRARY=
narrow="--mode distributed --model $m32 --layers $((4 * half)) --from fsdp:$half@$low --to engine:tp=$half@$high@~elsewhere"
row "32B, $((4 * half)) layers, over links of 1 GB/s" 0 limit $narrow
row "32B, $((4 * half)) layers, over links of 1 GB/s, delta 1 %" 0.1 "32B, $((4 * half)) layers, over links of 1 GB/s" \
    --changed 100 $narrow
unset DRAY_TRUSTED_NETWORKS DRAY_DATA_ADDRESS DRAY_DATA_RATE DRAY_NCCL_LIBRARY
[ "$nccl_library" = unset ] || export DRAY_NCCL_LIBRARY=$nccl_library
# Every way to bring one model to an engine (docs/weights.md has them in shared memory).
if echo "every way" | grep -qE "$rows"; then
    DRAY_TRUSTED_NETWORKS=127.0.0.0/8 DRAY_DATA_ADDRESS=127.0.0.1 timeout 400 "$dray" bench compare \
        --memory cuda --repeat "$repeats" --json --model $m4 --from "fsdp:$half@$low" \
        --to "engine:tp=$half@$high" >"$work/ways.json" 2>"$work/ways.err" ||
        echo "bench/gpu.sh: every way: $(tail -c 300 "$work/ways.err")" >&2
    python3 - "$work/ways.json" >>"$found" <<'P'
import json, sys
for line in open(sys.argv[1]):
    if line.startswith("{"):
        print(json.dumps({"way": json.loads(line)}))
P
fi
for of in 32B=$m32 30B-A3B=$m30 4B=$m4; do
    name=${of%%=*} model=${of#*=}
    in_pytorch "$name apart" broadcast $model
    in_pytorch "$name apart" packed $model
    over_m2n "$name apart" $model
    in_pytorch "$name co-located TP$gpus" ipc $model
    in_pytorch "$name co-located TP$gpus" server $model
done

python3 "$here/bench/gpu_tables.py" --found "$found" --gpus "$gpus" --kind "$kind" --repeats "$repeats" \
    --seconds $((SECONDS - begun)) ${out:+--out "$out"}
