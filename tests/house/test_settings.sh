# docs/run.md says of every setting what the program's table says, and --json names the same ones.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$DRAY_SOURCE_DIR/docs/run.md" "$work/run.md"
"$DRAY_SOURCE_DIR/scripts/settings.sh" "$DRAY_PROGRAM" "$work/run.md"
diff "$DRAY_SOURCE_DIR/docs/run.md" "$work/run.md" || {
    echo 'docs/run.md is not as the table of settings: scripts/settings.sh build/release/dray docs/run.md'
    exit 1
}
"$DRAY_PROGRAM" run --settings | sed -n 's/^| `\([^`]*\)` |.*/\1/p' >"$work/keys"
"$DRAY_PROGRAM" run --settings --json | sed 's/^{"key":"\([^"]*\)".*}$/\1/' >"$work/json"
diff "$work/keys" "$work/json"
count=$(wc -l <"$work/keys")
echo "$count settings"
[ "$count" -gt 50 ]
