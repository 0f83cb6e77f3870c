#!/bin/sh
# bench.sh [--json] [--strict] [--quick]: every benchmark of the release build: the parts of `dray
# bench`, the programs of bench/, and that of Python where there is numpy. The exit status says
# whether a target was missed only with --strict; a benchmark that cannot run always fails.
set -eu
cd "$(dirname "$0")/.."
status=0
measure()
{
    code=0
    "$@" || code=$?
    if [ $code -gt 1 ]; then
        echo "$1 ended with $code" >&2
    fi
    [ $code = 0 ] || status=1
    case " $* " in
    *' --json '*) ;;
    *) echo ;;
    esac
}
measure build/release/dray bench plan "$@"
measure build/release/dray bench queue --suite targets "$@"
measure build/release/dray bench weights --suite targets "$@"
for program in build/release/bench/bench_*; do
    [ ! -x "$program" ] || measure "$program" "$@"
done
python=${DRAY_TEST_PYTHON:-build/venv/bin/python}
[ -x "$python" ] || python=python3
if command -v "$python" >/dev/null; then
    measure "$python" bench/queue_python.py "$@"
    measure "$python" bench/clock.py "$@"
    measure "$python" bench/scale.py "$@"
    measure "$python" bench/loop.py "$@"
else
    echo 'bench/queue_python.py, clock.py, scale.py and loop.py are left out: no python3' >&2
fi
exit $status
