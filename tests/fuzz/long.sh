#!/bin/sh
# long.sh [TARGET...]: runs libFuzzer for each target (all of tests/fuzz) for $DRAY_FUZZ_SECONDS (60),
# as many at a time as $JOBS says. Inputs that reach something new gather in build/corpus/TARGET; one
# that fails stays in build/fuzz, and this then fails, too.
set -eu
cd "$(dirname "$0")/../.."
seconds=${DRAY_FUZZ_SECONDS:-60}
targets=${*:-$(ls tests/fuzz/fuzz_*.c | sed 's,.*/fuzz_,,; s,\.c$,,')}
CC=clang-14 CXX=clang++-14 cmake -G Ninja -B build/fuzz -DDRAY_FUZZ=ON -DDRAY_BENCH=OFF \
    -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
# shellcheck disable=SC2046,SC2086 # lists
cmake --build build/fuzz -j"${JOBS:-$(nproc)}" --target $(printf 'fuzz_%s libfuzzer_%s ' \
    $(for target in $targets; do echo "$target" "$target"; done))
TMPDIR=$(mktemp -d /dev/shm/dray-XXXXXX 2>/dev/null || mktemp -d) # libFuzzer leaves files behind
trap 'rm -rf "$TMPDIR"' EXIT
export DRAY_SOURCE_DIR="$PWD" TMPDIR seconds
# shellcheck disable=SC2016 # the inner shell's
printf '%s\n' $targets | xargs -P "${JOBS:-$(nproc)}" -I{} sh -euc '
    mkdir -p build/corpus/{}
    build/fuzz/fuzz_{} --seeds build/corpus/{} 2>/dev/null
    found=tests/fuzz/corpus/{}
    [ -d "$found" ] || found=
    log=build/fuzz/{}.log
    if ! build/fuzz/libfuzzer_{} -max_total_time="$seconds" -timeout=60 -rss_limit_mb=4096 \
        -print_final_stats=1 -artifact_prefix=build/fuzz/{}- build/corpus/{} $found >"$log" 2>&1; then
        tail -n 40 "$log"
        exit 255
    fi
    executed=$(sed -n "s/^stat::number_of_executed_units: *//p" "$log")
    reached=$(sed -n "s/.*DONE *cov: \([0-9]*\).*/\1/p" "$log")
    echo "{}: $executed inputs, $reached edges"'
