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
for folder in base store trace model plan memory net mover control queue weights group engine run; do
    above="$above$folder|"
    report "src/$folder/ includes a folder below it (it may: ${above%|}):" \
        "$(grep -rnE --include='*.[ch]' '^#include "' "src/$folder" 2>/dev/null |
            grep -vE "#include \"(${above%|})/" || true)"
done

# The same of folders within folders; what a + joins may include each other.
above=
for folders in \
    model/layout model/families model/safetensors model/trainers model/engine model \
    mover/kernels mover/cuda mover \
    weights weights/registry weights/delta weights/server weights/checkpoint weights/publish \
    weights/transfer+weights/program+weights/placements+weights/sources weights/update \
    queue queue/storage queue/table+queue/journal queue/server queue/client cmd cmd/doctor cmd/predict cmd/study \
    cmd/queue; do
    above="$above$(echo "$folders" | tr + '|')|"
    for folder in $(echo "$folders" | tr + ' '); do
        report "src/$folder/ includes a folder beside it that stands below it:" \
            "$(grep -nE '^#include "' "src/$folder"/*.[ch] |
                grep -E "#include \"${folder%%/*}/" | grep -vE "#include \"(${above%|})/[a-z_0-9]+\.h" || true)"
    done
done
for folder in $(find src/model src/mover src/weights src/queue src/cmd -mindepth 1 -type d); do
    echo "${above}" | grep -qF "${folder#src/}|" || report 'A folder that the list above does not have:' "$folder"
done

# A folder is something that one can take in: at most 20 files of C in each, and 800 lines in each file.
# run is older than that, and larger.
report 'A folder has more than 20 .c files:' \
    "$(find src -name '*.c' | sed 's|/[^/]*$||' | sort | uniq -c |
        awk '$1 > 20 && $2 !~ /^src\/run$/')"

# One header of a folder, the main one, opens with what lives there: "/* src/base/: ...".
for folder in $(find src -name '*.h' | sed 's|/[^/]*$||' | sort -u); do
    [ "$(head -qn1 "$folder"/*.h | grep -cF "/* $folder/: ")" = 1 ] ||
        report 'Of a folder one header does not open with what lives there ("/* FOLDER/: ..."):' "$folder"
done

# The program uses public headers, its own helpers, run's entry points (run/run.h and the like) where
# it starts runs, of base only the nearest words and members of JSON, and of the queue the table of
# policies; benchmarks of GPUs speak to the driver.
report 'src/cmd/ or a benchmark of dray bench includes more than public headers, bench/, cmd/, run/, base/words.h, base/json.h, queue/policies.h:' \
    "$(grep -nE '^#include "' src/cmd/*.[ch] src/cmd/*/*.[ch] bench/rows.[ch] bench/*/*.[ch] |
        grep -vE '"(bench|cmd|run)/|"base/(words|json).h"|"queue/policies.h"' |
        grep -vE 'bench_gpu[a-z_]*.c:.*"(memory/(cuda_library|region)|base/error).h"' || true)"
report 'A public header includes a private one:' "$(grep -nE '^#include "' include/dray/*.h || true)"

library='src/base src/trace src/model src/plan src/memory src/net src/mover src/control src/queue src/weights
    src/group src/engine'
# shellcheck disable=SC2086 # a list
report 'A library folder prints or ends the process:' \
    "$(grep -rnE '(^|[^a-z_A-Z.>])(exit|_exit|_Exit|abort|printf|vprintf|fprintf|perror|puts|assert) *\(' \
        $library 2>/dev/null | grep -vE '^[^:]*:[0-9]+: *(\*|/\*)|snprintf' || true)"

# A schedule is one line of a table (src/run/job/schedule.h, WORD("sync", DRAY__SCHEDULE_SYNC)): who wants to know
# what it says asks there, and compares neither names nor numbers of lines.
words=$(sed -nE 's/^ *WORD\("([a-z_]+)", *(DRAY__[A-Z_]+)\).*/\1 \2/p' src/run/job/schedule.h)
[ -n "$words" ] || report 'No schedule is found:' src/run/job/schedule.h
names=$(echo "$words" | cut -d' ' -f1 | paste -sd'|' -)
lines=$(echo "$words" | cut -d' ' -f2 | paste -sd'|' -)
report 'A file knows a schedule:' \
    "$(grep -rnE "\"($names)\"|\<($lines)\>|[>.]schedule *(==|!=)" --include='*.[ch]' src include |
        grep -v '^src/run/job/schedule\.[ch]:' || true)"

files=$(git ls-files 2>/dev/null || find . -type f -not -path './build/*' -not -path './.git/*')
home=$(printf '%s' "${HOME:-/nonexistent}" | sed 's/[.[\*^$/]/\\&/g')
if [ "$home" = / ] || [ -z "$home" ]; then
    home=/nonexistent
fi
report 'A file has a path of this machine in it:' \
    "$(echo "$files" | tr '\n' '\0' | xargs -0 grep -nIE \
        "(^|[^A-Za-z0-9_.])($PWD|$home|/home/[a-z]+|/Users/[a-z]+)/" 2>/dev/null || true)"
report 'A file is longer than 800 lines:' \
    "$(echo "$files" | grep -E '^(src|include|bench|tests)/.*\.[ch]$' | tr '\n' '\0' | xargs -0 wc -l |
        awk '$2 != "total" && $1 > 800' || true)"
report 'Work left for later in the code:' \
    "$(git grep -nE '\b(TODO|FIXME|XXX)\b' -- 'src/*' 'include/*' 'bench/*' 'examples/*' 2>/dev/null ||
        true)"
[ $bad = 0 ] && echo 'the layers hold'
exit $bad
