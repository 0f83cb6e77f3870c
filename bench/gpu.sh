#!/bin/bash
# The targets of weights on GPUs, each with its limit measured in the same run, and beside them today's
# flows on the same machine:
#
#   bench/gpu.sh [-d DRAY] [-p PEER_FLOWS.PY] [-o OUT.json] [-r ROWS] [-n REPEATS]
#
# DRAY: the program (build/release/dray). PEER_FLOWS.PY: the flows, in PyTorch and NCCL; none: their
# columns stay empty. OUT.json: all figures. ROWS: those whose name has this (grep -E).
# The GPUs are those that $CUDA_VISIBLE_DEVICES lets through: 8 for the targets as they are written,
# 2 or 4 for the same shapes on fewer. Ten minutes on 8; little host memory. 77: no GPUs.
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
dray=$here/build/release/dray flows='' out='' rows=. repeats=5
while getopts d:p:o:r:n: option; do
    case $option in
    d) dray=$OPTARG ;;
    p) flows=$OPTARG ;;
    o) out=$OPTARG ;;
    r) rows=$OPTARG ;;
    n) repeats=$OPTARG ;;
    *) exit 2 ;;
    esac
done
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
[ -n "${CUDA_VISIBLE_DEVICES:-}" ] && gpus=$(echo "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c .)
if [ "$gpus" -lt 2 ]; then
    echo "bench/gpu.sh: 2 GPUs or more are needed, $gpus are there" >&2
    exit 77
fi
half=$((gpus / 2)) quarter=$((gpus / 4))
all="0-$((gpus - 1))" low="0-$((half - 1))" high="$half-$((gpus - 1))"
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
    timeout 90 "$dray" bench weights --memory cuda --repeat "$repeats" --json "$@" \
        >"$work/row.json" 2>"$work/row.err"
    local rc=$?
    python3 - "$name" "$target" "$against" $rc "$work" "$((SECONDS - begin))" >>"$found" <<'P'
import json, sys
name, target, against, rc, work, took = sys.argv[1:]
row = {"row": name, "target": float(target), "against": against, "took_seconds": int(took)}
lines = [json.loads(l) for l in open(work + "/row.json") if l.startswith("{")]
if rc == "0" and lines:
    row["bench"] = lines[-1]
else:
    row["error"] = open(work + "/row.err").read().strip()[-400:] or "status " + rc
print(json.dumps(row))
P
}

# flow NAME ARGUMENTS...: a flow of the frameworks, median of three after a warm-up.
flow() {
    local name=$1
    shift
    [ -n "$flows" ] || return 0
    echo "$name" | grep -qE "$rows" || return 0
    timeout 120 python3 "$flows" "$@" >"$work/flow.txt" 2>&1
    python3 - "$name" "$*" "$work/flow.txt" >>"$found" <<'P'
import json, re, sys
name, arguments, path = sys.argv[1:]
text = open(path).read()
m = re.search(r"median=([0-9.]+)ms", text)
row = {"flow": name, "arguments": arguments}
row.update({"ms": float(m.group(1))} if m else {"error": text[-400:]})
print(json.dumps(row))
P
}

m32=qwen2.5-32b m30=qwen3-30b-a3b
row "32B apart" 1.15 limit --model $m32 --from "fsdp:$half@$low" --to "engine:tp=$half@$high"
row "32B apart, not verified" 0 limit --verify off --model $m32 --from "fsdp:$half@$low" \
    --to "engine:tp=$half@$high"
row "30B-A3B apart" 1.2 limit --model $m30 --from "fsdp:$half@$low" --to "engine:tp=$half@$high"
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
beside="--prefetch device --decode 4 --model $m32 --layers 24 --from fsdp:$half@$low --to engine:tp=$half@$high"
row "commit, prefetched beside decoding by copy engines" 0 limit --copy-engines --ctas 16 $beside
row "commit, prefetched beside decoding by 16 thread blocks" 0 limit --ctas 16 $beside
row "commit, prefetched beside decoding by all thread blocks" 0 limit $beside
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
    row "72B co-located TP2xDP$half" 0 limit --repeat 3 --model qwen2.5-72b \
        --from "fsdp:$gpus@$all" --to "engine:tp=2@$all" --engines "$half"
else
    row "72B, 60 layers, co-located TP$gpus" 0 limit --repeat 3 --model qwen2.5-72b --layers 60 \
        --from "fsdp:$gpus@$all" --to "engine:tp=$gpus@$all"
fi
# As if the engines were on another host, over the same links: what NCCL makes of them.
DRAY_TRUSTED_NETWORKS=127.0.0.0/8 DRAY_DATA_ADDRESS=127.0.0.1 \
    row "32B apart, on another host, over NCCL" 0 limit --model $m32 --mode distributed \
    --bucket 1073741824 \
    --from "fsdp:$half@$low" --to "engine:tp=$half@$high@~elsewhere"
flow "32B apart" distributed 32b 512
flow "32B co-located" colocated 32b 512
flow "30B-A3B apart" distributed 30b-a3b 512
flow "30B-A3B co-located" colocated 30b-a3b 512

python3 - "$found" "$gpus" "$out" <<'P'
import json, sys
found, gpus, out = sys.argv[1:]
lines = [json.loads(l) for l in open(found)]
rows, flows = [l for l in lines if "row" in l], {l["flow"]: l for l in lines if "flow" in l}
times = {r["row"]: r["bench"]["value"] for r in rows if "bench" in r}
print("%-56s %8s %8s %7s %7s %9s %8s %7s" % ("work, %s GPUs" % gpus, "limit ms", "dray ms", "ratio",
      "target", "+ publish", "flow ms", "faster"))
for r in rows:
    if "bench" not in r:
        print("%-56s %s" % (r["row"], r["error"][:100]))
        continue
    b = r["bench"]
    limit = b["limit"] if r["against"] == "limit" else times.get(r["against"], 0)
    ratio = b["value"] / limit if limit else 0
    flow = next((f["ms"] for n, f in flows.items() if r["row"].startswith(n) and "ms" in f
                 and ("DP" not in r["row"]) and "," not in r["row"]), None)
    r.update(limit_ms=limit * 1e3, ms=b["value"] * 1e3, ratio=ratio, flow_ms=flow,
             met=r["target"] == 0 or 0 < ratio <= r["target"])
    print("%-56s %8.2f %8.2f %7.3f %7s %9.2f %8s %7s%s" % (
        r["row"], limit * 1e3, b["value"] * 1e3, ratio, r["target"] or "-",
        b.get("seconds_with_publish", 0) * 1e3, "%.0f" % flow if flow else "-",
        "%.1fx" % (flow / (b["value"] * 1e3)) if flow else "-", "" if r["met"] else "  missed"))
a, b = times.get("32B apart"), times.get("32B apart, not verified")
if a and b:
    print("verification: %.1f %% of the update (target 5 %%)" % (100 * (a / b - 1)))
for r in rows:
    d = r.get("bench", {}).get("decoding")
    if d and d["steps"]:
        print("%s: steps of %.2f ms took %.2f ms (+%.0f %%), prefetch %.1f ms" % (
            r["row"][8:], d["step_before_seconds"] * 1e3, d["step_seconds"] * 1e3,
            100 * (d["slowdown"] - 1), r["bench"]["prefetch_seconds"] * 1e3))
for n, f in flows.items():
    if "error" in f:
        print("flow %s: %s" % (n, f["error"][-100:]))
if out:
    json.dump({"gpus": int(gpus), "rows": rows, "flows": list(flows.values())}, open(out, "w"),
              indent=1)
P
