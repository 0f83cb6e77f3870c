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
files='src/base/network.c src/base/tls.c src/base/fields.c src/base/wire.c src/control/address.c src/control/barrier.c
    src/control/channel.c src/control/connection.c src/control/context.c
    src/control/frame.c src/control/reports.c src/control/session.c src/control/token.c
    src/weights/registry/*.c src/weights/sums.c src/memory/handle.c src/model/families/config.c
    src/model/layout/layout_pack.c src/model/safetensors/safetensors_read.c src/queue/storage/backend_redis.c src/queue/table/claims.c
    src/queue/server/collect.c src/queue/table/commits.c src/queue/server/controller.c src/queue/table/cursor.c
    src/queue/messages.c src/queue/storage/keepers.c src/queue/client/insert.c src/queue/storage/keeper.c src/queue/table/loss.c
    src/queue/table/partitions.c src/queue/journal/place.c src/queue/table/puts.c src/queue/journal/record.c
    src/queue/storage/redis_link.c src/queue/releases.c src/queue/journal/replay.c src/queue/table/rounds.c
    src/queue/schema.c src/queue/storage/segment.c src/queue/server/steps.c src/queue/storage/stores.c src/queue/table/versions.c
    src/queue/server/waiters.c src/run/data/data_jsonl.c src/run/job/job_load.c src/run/job/settings_read.c src/run/job/settings_write.c src/run/job/tree.c
    src/trace/merge.c src/trace/spans.c src/net/cells.c src/weights/delta/delta_wire.c
    src/weights/sources/remote.c src/weights/checkpoint/manifest.c src/net/ucx.c src/weights/checkpoint/overlay.c
    src/net/peer.c src/weights/server/pull.c src/weights/sources/remote_*.c'
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
