#!/bin/bash
# peers: bench/gpu.sh runs dray and today's flows, counts dray from dray_publisher_publish, and its figures become the
# tables of README.md and docs/gpu.md, and the picture. Programs that print known figures stand for those that
# need GPUs (test_peers_python.py runs the flows in PyTorch, on the CPU).
set -eu
command -v python3 >/dev/null || exit 77
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/bin" "$work/docs"
fail() {
    echo "$*"
    cat "$work"/err "$work"/out 2>/dev/null
    exit 1
}
printf '#!/bin/sh\necho "GPU 0: NVIDIA H200 (UUID: a)"\necho "GPU 1: NVIDIA H200 (UUID: b)"\n' \
    >"$work/bin/nvidia-smi"
cat >"$work/dray" <<'S2'
#!/bin/sh
case "$*" in
*'--verify off'*) value=0.150 ;;
*) value=0.180 ;;
esac
echo "$*" >>"${0%/*}/dray.log"
echo "${DRAY_DATA_RATE:-any} $*" >>"${0%/*}/rates.log"
case "$*" in
'bench compare'*)
    echo '{"name": "tensor, direct, sharded", "value": 0.030, "limit": 0.020, "limit_by": "link in",' \
        '"pause_seconds": 0.025, "report": {"peak_extra_bytes": 67000000}}'
    exit
    ;;
esac
echo "{\"value\": $value, \"limit\": 0.150, \"engine_seconds\": 0.160, \"pause_seconds\": 0.002," \
    '"report": {"bytes": 16400000000, "exchanged_bytes": 16400000000, "spare_bytes": 16400000000,' \
    '"spare_waste_bytes": 1000000, "delta_bytes": 15000000, "delta_covered_bytes": 1000000000}}'
S2
# M2N refuses whatever is no matrix.
cat >"$work/m2n" <<'S2'
#!/bin/sh
case " $* " in *' -m '*) ;; *) exit 1 ;; esac
echo '{"median_seconds": 0.25, "matrices_only": true}'
S2
cat >"$work/flows.py" <<'S2'
import sys
print('{"median_seconds": %s}' % (0.4 if "packed" in sys.argv else 0.5))
S2
chmod +x "$work"/bin/* "$work/dray" "$work/m2n"
export PATH=$work/bin:$PATH
unset CUDA_VISIBLE_DEVICES
run() {
    "$DRAY_SOURCE_DIR/bench/gpu.sh" -d "$work/dray" -p "$work/flows.py" -m "$work/m2n" -n 3 \
        -o "$work/found.json" "$@" >"$work/out" 2>"$work/err" || fail "gpu.sh $* ended with $?"
}
run
grep -qE '^32B apart +150 +180 +1.200 +1.15 +160 +250 +500 +400 +1.4x  missed' "$work/out" || fail "32B apart"
grep -qE '^32B co-located TP2 .* 500 +500 +2.8x' "$work/out" || fail "co-located"
grep -q 'costs 20.0 % of an update' "$work/out" || fail "verification"
grep -qF '32B apart, delta 1 %: 1.50 % of the bytes that deltas stand for, pause 2.00 ms' "$work/out" || fail "deltas"
[ "$(grep -c '^1000000000 ' "$work/rates.log")" = 2 ] || fail "rows over links of 1 GB/s"
! grep -vq -- '--repeat 3' "$work/dray.log" || fail "other repeats than the flows'"
cp "$DRAY_SOURCE_DIR/README.md" "$work/"
cp "$DRAY_SOURCE_DIR/docs/gpu.md" "$work/docs/"
for _ in 1 2; do
    python3 "$DRAY_SOURCE_DIR/bench/gpu_tables.py" "$work/found.json" --write --root "$work"
done
row='| Qwen2.5-32B, from one GPU to another | 150 ms | 180 ms | 250 ms | 400 ms |'
grep -qF "$row" "$work/README.md" || fail "README.md has no such row"
[ "$(grep -cF '| 32B apart | 150 | 180 | 1.20 | 160 | 250 | 500 | 400 |  |' "$work/docs/gpu.md")" = 1 ] ||
    fail "docs/gpu.md does not have the row once"
grep -qF '| tensor, direct, sharded | 30.0 | 1.50 x link in | 25.0 | 67 MB |' "$work/docs/gpu.md" ||
    fail "docs/gpu.md has not every way"
grep -qF 'class="m2n"/><text' "$work/docs/updates.svg" || fail "no bar of M2N"
run -m "$work/nothing" -p none -r '^32B apart$'
grep -q 'NCCL M2N is left out' "$work/err" || fail "nothing said of M2N"
grep -qE '^32B apart +150 +180 +1.200 +1.15 +160 +missed' "$work/out" || fail "without flows"
