#!/bin/sh
# check.sh: everything that must hold before a change lands. Packages, the release build with
# -Werror, all tests, lint, the C tests under ASan+UBSan and TSan. Without the oracles (pip could
# not get them) the Python tests are left out with a line that says so; with CI=true that fails.
set -eu
cd "$(dirname "$0")/.."
begun=$(date +%s)
summary=build/check-summary.txt
log=build/check-phase.log

# phase NAME COMMAND...: what it prints stays on the screen; its closing count goes to the summary.
phase()
{
    name=$1
    shift
    printf '\n== %s\n' "$name"
    from=$(date +%s)
    status=0
    { "$@" 2>&1 || echo "$?" >$log.status; } | tee $log
    if [ -e $log.status ]; then
        status=$(cat $log.status)
        rm -f $log.status
    fi
    took=$(($(date +%s) - from))
    count=$(grep -E '^[0-9]+% tests passed' $log || true)
    skipped=$(grep -c '\*\*\*Skipped' $log || true)
    if [ "$skipped" != 0 ]; then
        count="$count; $skipped skipped"
    fi
    printf '%-24s %4d s  %s\n' "$name" "$took" "${count:-done}" >>$summary
    if [ "$status" != 0 ]; then
        printf '\nmake check: failed in: %s\n' "$name" >&2
        exit 1
    fi
}

scripts/deps.sh check
mkdir -p build
rm -f $log.status
: >$summary

printf '\n== oracles\n'
note=
if DRAY_TEST_PYTHON=$(scripts/venv.sh); then
    export DRAY_TEST_PYTHON
    "$DRAY_TEST_PYTHON" --version
else
    unset DRAY_TEST_PYTHON
    note='The Python tests were left out: their oracles (PyTorch, transformers) could not be installed.'
    echo "$note"
    if [ "${CI:-}" = true ]; then
        echo 'make check: failed in: oracles (an error because CI=true)' >&2
        exit 1
    fi
fi

rm -rf build/release/threads
phase 'release' scripts/suite.sh release
phase 'lint' scripts/lint.sh
phase 'address and undefined' scripts/suite.sh asan
export THREADS_SEEN=build/release/threads
phase 'thread' scripts/suite.sh tsan

printf '\n== all of it, in %d s\n' $(($(date +%s) - begun))
cat $summary
[ -z "$note" ] || echo "$note"
# The last line counts: the closing line of ctest for the release build.
grep '^release ' $summary | sed 's/^release *[0-9]* s  //'
