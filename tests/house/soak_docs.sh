# Every command of the `sh long` blocks of README and docs/ runs, in a fresh clone of what is committed, as a
# reader would type it: a page after the other, its blocks in one shell. `sh gpu` blocks run where there is a
# GPU. Servers stay in the background until the page's end. Names that stand for the reader's own (a host, a
# folder of the system) are replaced by ones of this test. Arguments: pages; all of them where there are none.
set -u
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset DRAY_ADDRESS DRAY_TOKEN_FILE DRAY_LIBRARY DRAY_PROGRAM DRAY_SOAK LD_PRELOAD
export XDG_RUNTIME_DIR=$work/run
mkdir -p -m 700 "$work/run" "$work/lib"
git clone -q "$DRAY_SOURCE_DIR" "$work/top" || exit 77
[ -z "${DRAY_TEST_PYTHON:-}" ] || PATH=$(dirname "$DRAY_TEST_PYTHON"):$PATH
export PATH=$work/site/bin:$PATH PYTHONPATH=$work/site # where `pip install .` of a page goes
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
cat >"$work/shell.sh" <<'END'
set -eu
servers=
stop() { for pid in $servers; do kill "$pid" 2>/dev/null || true; wait "$pid" 2>/dev/null || true; done; }
trap stop EXIT
# serve LINE: in the background; it has started when it has said something.
serve()
{
    case $1 in
    *'dray keeper'*) export DRAY_HOST=another ;; # this one has the coordinator's
    *) stop; servers= ;;                          # a page's next server takes the place of the last one
    esac
    said=$(mktemp)
    bash -c "exec $1" >"$said" 2>&1 &
    servers="$servers $!"
    for _ in $(seq 100); do
        [ ! -s "$said" ] || break
        kill -0 $! || { cat "$said"; return 1; }
        sleep 0.1
    done
    cat "$said"
    unset DRAY_HOST
}
END
page_script()
{
    cat "$work/shell.sh"
    awk -v gpus="$gpus" '
        /^```sh long$/ { inside = 1; next }
        /^```sh gpu$/ { inside = gpus > 0; next }
        /^```/ { inside = 0; next }
        inside' "$1" | sed -e "s#/var/lib/dray#$work/lib#g; s#/run/dray#$work/run/dray#g; s#head-node#localhost#g" \
        -e "s#^pip install \.#pip install --upgrade --target $work/site .#" \
        -e "s#unix:/tmp/dray-1000.socket#unix:$work/run/dray.socket#g" | while IFS= read -r line; do
        printf 'printf "+ %%s\\n" %q\n' "$line"
        case $line in
        *'dray serve'* | *'dray keeper'*) printf 'serve %q\n' "$line" ;;
        *) printf '%s\n' "$line" ;;
        esac
    done
}
bad=0
cd "$work/top"
[ $# -gt 0 ] || set -- README.md CONTRIBUTING.md docs/*.md
[ "$1" = README.md ] || make build >"$work/out" 2>&1 || { cat "$work/out"; exit 1; } # else that page does it
for page; do
    grep -qE '^```sh (long|gpu)$' "$page" || continue
    page_script "$page" >"$work/page.sh"
    begun=$SECONDS
    if bash "$work/page.sh" >"$work/out" 2>&1 </dev/null; then
        echo "$page: $(grep -c '^+ ' "$work/out") commands, $((SECONDS - begun)) s"
    else
        echo "$page: ended with $?"
        tail -n 30 "$work/out" | sed 's/^/    /'
        bad=1
    fi
done
[ "$gpus" -gt 0 ] || echo "not run, for want of a GPU: $(cat docs/*.md | awk '/^```sh gpu$/ { p = 1; next } /^```/ { p = 0 } p' | wc -l) commands"
exit $bad
