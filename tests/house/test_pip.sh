# `pip install ./python` gives a package that works, and leaves no file in the tree.
set -u
python=${DRAY_TEST_PYTHON:-}
if [ -z "$python" ] || ! work=$(mktemp -d); then
    echo 'skipped: no DRAY_TEST_PYTHON'
    exit 77
fi
trap 'rm -rf "$work"' EXIT
git clone -q "$DRAY_SOURCE_DIR" "$work/top" || exit 77
cd "$work/top" || exit 1
if ! "$python" -m pip install -qq --retries 2 --target "$work/site" ./python >"$work/log" 2>&1; then
    cat "$work/log"
    grep -qiE 'connection|could not find a version|temporary failure' "$work/log" && [ "${CI:-}" != true ] && exit 77
    exit 1
fi
left=$(git status --porcelain --ignored)
[ -z "$left" ] || { echo "left in the tree: $left"; exit 1; }
cd "$work" || exit 1
said=$(PYTHONPATH=$work/site "$python" -c 'import dray; print(dray.__file__, dray.version())')
case $said in
"$work/site/dray/__init__.py "[0-9]*) ;;
*) echo "found: $said"; exit 1 ;;
esac
