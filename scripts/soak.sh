#!/bin/sh
# soak.sh: the tests of `make check` with DRAY_TEST_SCALE times the random cases (default 20), plain
# and under the sanitizers, where check leaves the slow ones out. A test may take two hours, as some
# do with so many cases under a sanitizer. Arguments go to ctest: scripts/soak.sh -R ^queue_
# Without any, the frameworks follow with all that they have (tests/frameworks), then libFuzzer looks for more
# (tests/fuzz/long.sh), and the planted faults run last, each against the suites that it names (tests/mutants).
set -eu
cd "$(dirname "$0")/.."
scripts/deps.sh soak
export DRAY_TEST_SCALE="${DRAY_TEST_SCALE:-20}"
DRAY_TEST_PYTHON=$(scripts/venv.sh)
export DRAY_TEST_PYTHON
for preset in release asan tsan; do
    printf '\n== %s, %s times the cases\n' "$preset" "$DRAY_TEST_SCALE"
    DRAY_SOAK=1 scripts/suite.sh "$preset" --timeout 7200 "$@"
done
if [ $# = 0 ]; then
    printf '\n== frameworks\n'
    tests/frameworks/run.py --soak
    printf '\n== libFuzzer\n'
    tests/fuzz/long.sh
    printf '\n== planted faults\n'
    unset DRAY_TEST_SCALE
    tests/mutants/run.py
fi
