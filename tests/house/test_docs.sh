# What README and docs/ tell people to type works. Blocks of three kinds are looked at:
#   ```sh         each line is run at the top of the repository (in a copy of links), and must succeed
#   ```sh long    not run here but in `make soak` (soak_docs.sh): make's targets, the presets and dray's
#   ```sh gpu     commands in it must exist; gpu: run where there is one
#   ```c          must compile as the body of a file
# Relative links must lead somewhere, the picture of updates be that of the table, and variables be described.
set -u
cd "$DRAY_SOURCE_DIR"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
bad=0
complain()
{
    echo "$*"
    bad=1
}

# The repository, but for its build: that is the one under test; runs and other files land in a copy.
top=$work/top
mkdir -p "$top/build" "$top/runs"
for entry in *; do
    case $entry in
    build | runs | studies) ;;
    *) ln -s "$PWD/$entry" "$top/$entry" ;;
    esac
done
ln -s "$DRAY_BUILD_DIR" "$top/build/release"
commands=$("$DRAY_PROGRAM" --help | sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p')

run_block()
{
    while IFS= read -r line; do
        [ -n "$line" ] || continue
        (cd "$top" && timeout 120 bash -c "$line") >"$work/out" 2>&1 </dev/null || {
            complain "$1: '$line' ended with $?"
            tail -n 5 "$work/out" | sed 's/^/    /'
        }
        ran=$((ran + 1))
    done <"$2"
}

look_at_block()
{
    while IFS= read -r line; do
        for target in $(echo "$line" | grep -oE '\bmake( [A-Z]+=[^ ]+)* [a-z]+' | sed 's/.* //'); do
            grep -q "^$target:" Makefile || complain "$1: no target '$target' in the Makefile"
        done
        for preset in $(echo "$line" | grep -oE -e '--preset [a-z]+' | sed 's/.* //'); do
            grep -q "\"name\": \"$preset\"" CMakePresets.json || complain "$1: no preset '$preset'"
        done
        for command in $(echo "$line" | grep -oE '\bdray [a-z]+' | sed 's/.* //'); do
            echo "$commands" | grep -qx "$command" || complain "$1: no command 'dray $command'"
        done
        looked=$((looked + 1))
    done <"$2"
}

ran=0
looked=0
compiled=0
for page in README.md CONTRIBUTING.md docs/*.md; do
    [ -e "$page" ] || continue
    awk -v to="$work/block" -v list="$work/list" '
        BEGIN { printf "" >list }
        /^```/ && !inside { inside = 1; kind = substr($0, 4); n++; file = to "." n
            printf "" >file; print file "\t" kind >list; next }
        /^```/ { inside = 0; close(file); next }
        inside { print >file }' "$page"
    while IFS='	' read -r file kind; do
        case $kind in
        sh) run_block "$page" "$file" ;;
        'sh long' | 'sh gpu') look_at_block "$page" "$file" ;;
        c)
            cc -std=c17 -D_GNU_SOURCE -Wall -Wextra -Werror -Iinclude -fsyntax-only -x c "$file" ||
                complain "$page: a block of C does not compile"
            compiled=$((compiled + 1))
            ;;
        esac
    done <"$work/list"
    for link in $(grep -oE '\]\([^)#]+' "$page" | sed 's/^](//' | grep -v '://'); do
        [ -e "$(dirname "$page")/$link" ] || complain "$page: '$link' leads nowhere"
    done
done
# Every variable that src/ names is in a table of docs/, but for those that dray sets for its own processes.
own='DRAY_(FAULT|GROUP_FD|LAUNCH|REDIS_|STEP|EPOCH)$'
for variable in $(grep -rhoE '"DRAY_[A-Z_]+"' src | tr -d '"' | grep -vE "^$own" | sort -u); do
    grep -qE "^\|.*\`$variable\`.*\|" docs/cli.md docs/roles.md docs/objects.md ||
        complain "docs/cli.md: no line for the variable $variable, which src/ reads"
done
# The README's picture shows the README's table.
if command -v python3 >/dev/null; then
    python3 scripts/bars.py README.md | cmp -s - docs/updates.svg ||
        complain 'docs/updates.svg is not what scripts/bars.py README.md makes'
fi
echo "$ran commands run, $looked looked at, $compiled pieces of C compiled"
[ $bad = 0 ] && [ $looked -gt 0 ]
