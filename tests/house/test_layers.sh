# The layers of docs/architecture.md hold: a folder includes only itself and what stands above it;
# the library neither prints nor ends the process; no file knows a path of one machine.
set -eu
cd "$DRAY_SOURCE_DIR"
bad=0
report()
{
    [ -z "$2" ] && return
    printf '%s\n%s\n\n' "$1" "$2"
    bad=1
}

above=
for folder in base trace model plan memory mover control weights queue group engine run; do
    above="$above$folder|"
    report "src/$folder/ includes a folder below it (it may: ${above%|}):" \
        "$(grep -nE '^#include "' "src/$folder"/*.[ch] 2>/dev/null |
            grep -vE "#include \"(${above%|})/" || true)"
done

# The program uses public headers, its own helpers, run's entry points (run/run.h and the like) where
# it starts runs, and of base only the nearest words; benchmarks of GPUs speak to the driver.
report 'src/cmd/ or what dray bench measures includes more than public headers, bench/, cmd/, run/, base/words.h:' \
    "$(grep -nE '^#include "' src/cmd/*.[ch] bench/rows.[ch] bench/*/*.[ch] |
        grep -vE '"(bench|cmd|run)/|"base/words.h"' |
        grep -vE 'bench_gpu[a-z_]*.c:.*"(memory/(cuda_library|region)|base/error).h"' || true)"
report 'A public header includes a private one:' "$(grep -nE '^#include "' include/dray/*.h || true)"

library='src/base src/trace src/model src/plan src/memory src/mover src/control src/weights src/queue
    src/group src/engine'
# shellcheck disable=SC2086 # a list
report 'A library folder prints or ends the process:' \
    "$(grep -rnE '(^|[^a-z_A-Z.>])(exit|_exit|_Exit|abort|printf|vprintf|fprintf|perror|puts|assert) *\(' \
        $library 2>/dev/null | grep -vE '^[^:]*:[0-9]+: *(\*|/\*)|snprintf' || true)"

# A schedule is one line of a table (src/run/schedule.h, WORD("sync", DRAY__SCHEDULE_SYNC)): who wants to know
# what it says asks there, and compares neither names nor numbers of lines.
words=$(sed -nE 's/^ *WORD\("([a-z_]+)", *(DRAY__[A-Z_]+)\).*/\1 \2/p' src/run/schedule.h)
[ -n "$words" ] || report 'No schedule is found:' src/run/schedule.h
names=$(echo "$words" | cut -d' ' -f1 | paste -sd'|' -)
lines=$(echo "$words" | cut -d' ' -f2 | paste -sd'|' -)
report 'A file knows a schedule:' \
    "$(grep -rnE "\"($names)\"|\<($lines)\>|[>.]schedule *(==|!=)" --include='*.[ch]' src include |
        grep -v '^src/run/schedule\.[ch]:' || true)"

files=$(git ls-files 2>/dev/null || find . -type f -not -path './build/*' -not -path './.git/*')
home=$(printf '%s' "${HOME:-/nonexistent}" | sed 's/[.[\*^$/]/\\&/g')
if [ "$home" = / ] || [ -z "$home" ]; then
    home=/nonexistent
fi
report 'A file has a path of this machine in it:' \
    "$(echo "$files" | tr '\n' '\0' | xargs -0 grep -nIE \
        "(^|[^A-Za-z0-9_.])($PWD|$home|/home/[a-z]+|/Users/[a-z]+)/" 2>/dev/null || true)"
report 'A file is much longer than 800 lines:' \
    "$(echo "$files" | grep -E '^(src|include|bench)/.*\.[ch]$' | tr '\n' '\0' | xargs -0 wc -l |
        awk '$2 != "total" && $1 > 950' || true)"
report 'Work left for later in the code:' \
    "$(git grep -nE '\b(TODO|FIXME|XXX)\b' -- 'src/*' 'include/*' 'bench/*' 'examples/*' 2>/dev/null ||
        true)"
[ $bad = 0 ] && echo 'the layers hold'
exit $bad
