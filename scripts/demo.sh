#!/bin/sh
# demo.sh: runs the example job in a fresh folder under runs/. Arguments go to `dray run`.
set -eu
cd "$(dirname "$0")/.."
out=runs/demo
n=2
while [ -e "$out" ]; do
    out=runs/demo-$n
    n=$((n + 1))
done
mkdir -p runs
echo "build/release/dray run examples/reverse.yaml --out $out $*"
exec build/release/dray run examples/reverse.yaml --out "$out" "$@"
