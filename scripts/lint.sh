#!/bin/sh
# lint.sh: formatting, clang-tidy and cppcheck over the C code; needs build/release configured.
# `lint.sh fix` formats instead. clang tools of one version, 14, because their results differ.
set -eu
cd "$(dirname "$0")/.."
jobs=${JOBS:-$(nproc)}

tool()
{
    command -v "$1-14" 2>/dev/null && return
    if "$1" --version 2>/dev/null | grep -q 'version 14\.'; then
        echo "$1"
        return
    fi
    echo "$1 14 is not here: scripts/deps.sh check installs it" >&2
    return 1
}

format=$(tool clang-format)
files=$(git ls-files '*.c' '*.h')
if [ "${1:-}" = fix ]; then
    echo "$files" | xargs "$format" -i
    exit 0
fi

echo 'clang-format'
echo "$files" | xargs "$format" --dry-run -Werror
count=$(echo "$files" | wc -l)

echo 'clang-tidy'
tidy=$(tool clang-tidy)
sources=$(git ls-files 'src/*.c' 'bench/*.c')
if ! echo "$sources" | xargs -P"$jobs" -n4 "$tidy" --quiet -p build/release >build/tidy.log 2>&1; then
    grep -vE '^[0-9]+ warnings? generated|^Suppressed|^Use -' build/tidy.log
    exit 1
fi

echo 'cppcheck'
# Wrong in version 2.10: it takes `.count` of an initializer for a variable of that name, and a
# pointer that the same condition tests for one that may be null (in job_load.c; in file.c, whose
# each_run writes to a region where it reads from none: said of region.c, and not in every run).
cppcheck --quiet --std=c11 --language=c --enable=warning,portability --inline-suppr \
    --suppress=missingIncludeSystem --suppress=unknownEvaluationOrder \
    --suppress=nullPointer:src/run/job/job_load.c --suppress=ctunullpointer:src/memory/region.c \
    --error-exitcode=1 --template=gcc -j"$jobs" \
    -D_GNU_SOURCE -Iinclude -Isrc -I. -Ibench --include=scripts/cppcheck.h src bench

echo "$count files are clean"
