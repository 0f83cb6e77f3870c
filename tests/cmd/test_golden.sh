# Golden tests of the command line: every *.golden file here is a transcript, run in a fresh folder.
#   $ command       run by bash, with `dray` first in PATH
#   > line          expected on stdout;  ! line: on stderr; * stands for anything within the line,
#                   a line of only ... for any lines
#   = status        expected exit status; without it 0
# A command without > or ! lines may print nothing there.
set -u
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
PATH=$(dirname "$DRAY_PROGRAM"):$PATH
export PATH
unset DRAY_ADDRESS DRAY_LOG ARGP_HELP_FMT
export LC_ALL=C
failures=0
count=0

# matches EXPECTED ACTUAL: two files of lines.
matches()
{
    local expected actual i=0 j=0 any=0 pattern
    mapfile -t expected <"$1"
    mapfile -t actual <"$2"
    while [ $i -lt ${#expected[@]} ]; do
        if [ "${expected[i]}" = ... ]; then
            any=1
            i=$((i + 1))
            continue
        fi
        pattern=${expected[i]}
        pattern=${pattern//\\/\\\\}
        pattern=${pattern//\[/\\[}
        pattern=${pattern//\?/\\?}
        while :; do
            [ $j -lt ${#actual[@]} ] || return 1
            # shellcheck disable=SC2053 # a pattern
            if [[ ${actual[j]} == $pattern ]]; then
                break
            fi
            [ $any = 1 ] || return 1
            j=$((j + 1))
        done
        any=0
        i=$((i + 1))
        j=$((j + 1))
    done
    [ $any = 1 ] || [ $j = ${#actual[@]} ]
}

check()
{
    [ -n "$command" ] || return 0
    count=$((count + 1))
    (cd "$folder" && timeout 60 bash -c "$command") >"$work/out" 2>"$work/err" </dev/null
    local got=$? wrong=
    [ "$got" = "$status" ] || wrong="exit status $got, expected $status"
    matches "$work/want.out" "$work/out" || wrong="$wrong; stdout differs"
    matches "$work/want.err" "$work/err" || wrong="$wrong; stderr differs"
    [ -z "$wrong" ] && return
    failures=$((failures + 1))
    printf '%s: $ %s\n  %s\n' "$file" "$command" "${wrong#; }"
    diff "$work/want.out" "$work/out" | sed 's/^/  stdout /'
    diff "$work/want.err" "$work/err" | sed 's/^/  stderr /'
}

begin()
{
    command=$1
    status=0
    : >"$work/want.out"
    : >"$work/want.err"
}

for path in "$DRAY_SOURCE_DIR"/tests/cmd/*.golden; do
    file=$(basename "$path")
    folder=$work/${file%.golden}
    mkdir "$folder"
    begin ''
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in
        '$ '*)
            check
            begin "${line#'$ '}"
            ;;
        '>'*)
            line=${line#>}
            echo "${line# }" >>"$work/want.out"
            ;;
        '!'*)
            line=${line#!}
            echo "${line# }" >>"$work/want.err"
            ;;
        '= '*) status=${line#= } ;;
        '' | '#'*) ;;
        *)
            echo "$file: what is '$line'?"
            failures=$((failures + 1))
            ;;
        esac
    done <"$path"
    check
done
echo "$count commands, $failures failed"
[ $count -gt 0 ] && [ $failures = 0 ]
