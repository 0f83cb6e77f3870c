#!/bin/sh
# bench.sh [--json] [--strict] [--quick]: runs every benchmark of the release build. The exit status
# says whether a target was missed only with --strict; a benchmark that cannot run always fails.
set -eu
cd "$(dirname "$0")/.."
status=0
for program in build/release/bench/bench_*; do
    [ -x "$program" ] || continue
    code=0
    "$program" "$@" || code=$?
    if [ $code -gt 1 ]; then
        echo "$program ended with $code" >&2
    fi
    [ $code = 0 ] || status=1
    case " $* " in
    *' --json '*) ;;
    *) echo ;;
    esac
done
exit $status
