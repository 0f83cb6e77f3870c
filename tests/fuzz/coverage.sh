#!/bin/sh
# coverage.sh [BUILD [CORPUS]]: how many lines of each reader the fuzz targets reach, with their seeds,
# tests/fuzz/corpus and what libFuzzer found (CORPUS/x of target x). BUILD: a folder for a build of its
# own, with clang (llvm-profdata and llvm-cov of the same version must be there).
set -eu
cd "$(dirname "$0")/../.."
build=${1:-build/coverage}
corpus=${2:-build/corpus}
version=${CLANG:-14}
flags='-O1 -g -fprofile-instr-generate -fcoverage-mapping'
CC=clang-$version CXX=clang++-$version cmake -G Ninja -B "$build" -DCMAKE_BUILD_TYPE=Debug \
    -DDRAY_BENCH=OFF -DCMAKE_C_FLAGS="$flags" -DCMAKE_EXE_LINKER_FLAGS=-fprofile-instr-generate >/dev/null
targets=$(ls tests/fuzz/fuzz_*.c | sed 's,.*/,,; s,\.c$,,')
# shellcheck disable=SC2086 # a list
cmake --build "$build" --target $targets >/dev/null
objects=
for target in $targets; do
    objects="$objects -object $build/$target"
    DRAY_SOURCE_DIR=$PWD LLVM_PROFILE_FILE="$build/$target-%p.profraw" "$build/$target" 2>/dev/null
    if [ -d "$corpus/${target#fuzz_}" ]; then
        LLVM_PROFILE_FILE="$build/$target-%p.profraw" "$build/$target" "$corpus/${target#fuzz_}" \
            2>/dev/null
    fi
done
"llvm-profdata-$version" merge -sparse "$build"/fuzz_*.profraw -o "$build/all.profdata"
rm -f "$build"/fuzz_*.profraw
files='src/base/network.c src/base/tls.c src/base/wire.c src/control/address.c src/control/barrier.c
    src/control/channel.c src/control/connection.c src/control/context.c src/control/coverage.c
    src/control/frame.c src/control/registry_*.c src/control/reports.c src/control/session.c
    src/control/sums.c src/control/token.c src/memory/handle.c src/model/config.c
    src/model/layout_pack.c src/model/safetensors_read.c src/queue/backend_redis.c src/queue/claims.c
    src/queue/collect.c src/queue/commits.c src/queue/controller.c src/queue/cursor.c
    src/queue/decode.c src/queue/homes.c src/queue/insert.c src/queue/keeper.c src/queue/loss.c
    src/queue/partitions.c src/queue/place.c src/queue/puts.c src/queue/record.c
    src/queue/redis_link.c src/queue/releases.c src/queue/replay.c src/queue/rounds.c
    src/queue/schema.c src/queue/segment.c src/queue/steps.c src/queue/stores.c src/queue/versions.c
    src/queue/waiters.c src/run/data_jsonl.c src/run/job.c src/run/settings_read.c src/run/settings_write.c src/run/tree.c
    src/trace/merge.c src/trace/spans.c src/weights/cells.c src/weights/delta_wire.c
    src/weights/lane_remote.c src/weights/manifest.c src/weights/offer.c src/weights/overlay.c
    src/weights/peer.c src/weights/pull.c src/weights/remote_*.c'
# shellcheck disable=SC2086 # lists
"llvm-cov-$version" export -summary-only -instr-profile "$build/all.profdata" ${objects# -object} |
    python3 -c '
import json, os, sys
files = json.load(sys.stdin)["data"][0]["files"]
lines = {os.path.relpath(file["filename"]): file["summary"]["lines"] for file in files}
for name in sys.argv[1:]:
    if name in lines:
        print("%-34s %5d of %5d lines %6.1f %%" % (name, lines[name]["covered"],
                                                   lines[name]["count"], lines[name]["percent"]))
' $files
