#!/bin/sh
# suite.sh PRESET [ctest argument...]: builds a preset and runs its tests, those of DRAY_TEST_PYTHON
# too. Under a sanitizer only the C tests run: the others would test Python.
set -eu
cd "$(dirname "$0")/.."
preset=$1
shift
jobs=${JOBS:-$(nproc)}
run=
python=
case $preset in
asan)
    # OpenBLAS keeps its threads' buffers on purpose.
    export ASAN_OPTIONS="detect_stack_use_after_return=1:strict_string_checks=1:${ASAN_OPTIONS:-}"
    export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
    set -- -L '^c$' "$@"
    ;;
tsan)
    # gcc's thread sanitizer cannot map its shadow where addresses are random over 32 bits.
    if setarch "$(uname -m)" -R true 2>/dev/null; then
        run="setarch $(uname -m) -R"
    fi
    TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:atexit_sleep_ms=50:die_after_fork=0:${TSAN_OPTIONS:-}"
    export TSAN_OPTIONS="suppressions='$PWD/tests/tsan.supp':$TSAN_OPTIONS"
    set -- -L '^c$' "$@"
    ;;
*)
    python=${DRAY_TEST_PYTHON:-}
    ;;
esac
[ "${DRAY_SOAK:-0}" = 1 ] || set -- -LE '^soak$' "$@"
cmake --preset "$preset" -DDRAY_WERROR=ON -DDRAY_TEST_PYTHON="$python" >/dev/null
cmake --build --preset "$preset" -j"$jobs"
exec $run ctest --preset "$preset" -j"$jobs" "$@"
