#!/bin/sh
# suite.sh PRESET [ctest argument...]: builds a preset and runs its tests, those of DRAY_TEST_PYTHON
# too. Under a sanitizer only the C tests run: the others would test Python. THREADS_SEEN: where a
# plain run of all tests wrote down which of them start threads (tests/house/threads_seen.c); under
# tsan the others are neither built nor run.
set -eu
cd "$(dirname "$0")/.."
preset=$1
shift
jobs=${JOBS:-$(nproc)}
run=
targets=
python=
case $preset in
asan)
    # OpenBLAS keeps its threads' buffers on purpose. Calls of __tls_get_addr are left alone: gcc 12's
    # runtime takes dynamic TLS that begins 16 bytes into a page for that of glibc 2.19, reads its
    # size where none is, and its leak checker dies of it. Tests preload a library (tests/house/fork_locks.c).
    export ASAN_OPTIONS="verify_asan_link_order=0:intercept_tls_get_addr=0:detect_stack_use_after_return=1:strict_string_checks=1:${ASAN_OPTIONS:-}"
    export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
    set -- -L '^c$' "$@"
    ;;
tsan)
    # gcc's thread sanitizer cannot map its shadow where addresses are random over 32 bits.
    if setarch "$(uname -m)" -R true 2>/dev/null; then
        run="setarch $(uname -m) -R"
    fi
    TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:atexit_sleep_ms=5:die_after_fork=0:${TSAN_OPTIONS:-}"
    export TSAN_OPTIONS="suppressions='$PWD/tests/tsan.supp':$TSAN_OPTIONS"
    seen=$(ls "${THREADS_SEEN:-/nowhere}" 2>/dev/null || true) # program@test
    if [ -n "$seen" ]; then
        targets="dray dray_program fake_cuda fake_nccl $(echo "$seen" | sed 's/@.*//' | sort -u)"
        set -- -R "^($(echo "$seen" | sed 's/.*@//' | paste -sd '|'))\$" "$@"
    fi
    set -- -L '^c$' "$@"
    ;;
*)
    python=${DRAY_TEST_PYTHON:-}
    ;;
esac
# Labels to leave out.
without=none
[ "${DRAY_SOAK:-0}" = 1 ] || without=soak
[ "$preset" != asan ] && [ "$preset" != tsan ] || without="$without|plain"
cmake --preset "$preset" -DDRAY_WERROR=ON -DDRAY_TEST_PYTHON="$python" >/dev/null
# shellcheck disable=SC2086 # a list
cmake --build --preset "$preset" -j"$jobs" ${targets:+--target $targets}
# Twice as many tests as there are cores: many wait, for others or for time to pass.
exec $run ctest --preset "$preset" -j$((2 * jobs)) -LE "^($without)\$" "$@"
