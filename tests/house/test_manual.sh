# The manual: mandoc finds nothing wrong, and every command of `dray --help` has a page that names
# every one of its options, and no others.
set -eu
cd "$DRAY_SOURCE_DIR/docs/man"
command -v mandoc >/dev/null || {
    echo 'mandoc is not here'
    exit 77
}
bad=0
complain()
{
    echo "$*"
    bad=1
}
for page in *.1; do
    mandoc -T lint -W warning "$page" || complain "$page: mandoc found something"
    grep -q '^\.Sh NAME' "$page" && grep -q '^\.Sh SYNOPSIS' "$page" || complain "$page: sections"
done

commands=$("$DRAY_PROGRAM" --help | sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p')
for command in $commands; do
    page=dray-$command.1
    [ -e "$page" ] || {
        complain "$command: no $page"
        continue
    }
    grep -q "^\.It Cm $command\$" dray.1 || complain "dray.1 does not list $command"
    # As a reader sees it: typographic dashes and hyphens made plain again.
    text=$(mandoc -T ascii "$page" | sed 's/.\x08//g')
    # Of commands with parts the parts' own options count, too.
    {
        "$DRAY_PROGRAM" help "$command"
        for part in $("$DRAY_PROGRAM" help "$command" | sed -n '/^Parts:/,/^$/s/^  \([a-z]*\) .*/\1/p'); do
            "$DRAY_PROGRAM" "$command" "$part" --help
        done
    } | grep -oE '(^|[ ,])--[a-z][a-z-]*' | tr -d ' ,' | sort -u |
        grep -vxE -e '--(help|usage)' >"${TMPDIR:-/tmp}/options.$$" || true
    while read -r option; do
        echo "$text" | grep -qE -e "(^|[^a-z-])$option([^a-z-]|\$)" || complain "$page: no $option"
    done <"${TMPDIR:-/tmp}/options.$$"
    for option in $(echo "$text" | grep -oE -e '(^|[^a-z-])--[a-z][a-z-]*' | grep -oE -e '--.*' |
        sort -u); do
        grep -qx -e "$option" "${TMPDIR:-/tmp}/options.$$" ||
            complain "$page: $option is no option of dray $command"
    done
    rm -f "${TMPDIR:-/tmp}/options.$$"
done
for page in dray-*.1; do
    command=${page#dray-}
    echo "$commands" | grep -qx "${command%.1}" || complain "$page: dray has no such command"
done
[ $bad = 0 ] && echo "$(ls ./*.1 | wc -l) pages are right"
exit $bad
