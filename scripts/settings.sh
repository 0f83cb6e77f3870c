#!/bin/sh
# settings.sh PROGRAM PAGE: writes the table of settings, as `PROGRAM run --settings` prints it, into
# PAGE (docs/run.md) between its two marks. tests/house/test_settings.sh sees that it was done.
set -eu
page=$2
table=$(mktemp)
trap 'rm -f "$table" "$table.page"' EXIT
"$1" run --settings >"$table"
awk -v table="$table" '
    /^<!-- settings end/ { inside = 0 }
    !inside { print }
    /^<!-- settings:/ { inside = 1; marks++; while ((getline line <table) > 0) print line }
    END { exit marks != 1 }' "$page" >"$table.page"
cat "$table.page" >"$page"
