# dray serve and dray status: addresses, signals, stale sockets, wrong usage.
set -eu
work=$(mktemp -d)
pids=
cleanup()
{
    for pid in $pids; do
        kill -KILL "$pid" 2>/dev/null || true
    done
    rm -rf "$work"
}
trap cleanup EXIT
[ -x "$DRAY_PROGRAM" ] || exit 77
unset DRAY_ADDRESS
export XDG_RUNTIME_DIR="$work"
fail()
{
    echo "FAILED: $*" >&2
    cat "$work"/*.out "$work"/*.err 2>/dev/null >&2
    exit 1
}
# serve NAME ARGUMENTS...: starts one, and waits until it has said its last line of greeting.
serve()
{
    name=$1
    shift
    "$DRAY_PROGRAM" serve "$@" >"$work/$name.out" 2>"$work/$name.err" &
    pid=$!
    pids="$pids $pid"
    for _ in $(seq 1000); do
        grep -qE '^clients:|"listening"' "$work/$name.out" && return
        sleep 0.01
    done
    fail "$name did not start"
}

serve one
grep -qx "listening at unix:$work/dray.socket" "$work/one.out" || fail 'default address'
"$DRAY_PROGRAM" status >"$work/status.out" || fail 'status at the default address'
grep -q '^sessions:$' "$work/status.out" || fail 'no table of sessions'
grep -q 'dray status *tool' "$work/status.out" || fail 'status does not see itself'
status=0
"$DRAY_PROGRAM" serve >"$work/two.out" 2>"$work/two.err" || status=$?
[ $status = 1 ] && grep -q 'another server listens there' "$work/two.err" || fail 'a second server'
"$DRAY_PROGRAM" status >/dev/null || fail 'the second one hurt the first'
kill -KILL $pid
wait $pid || true
[ -S "$work/dray.socket" ] || fail 'a killed server cannot remove its socket'

serve three --listen "unix:$work/dray.socket" --listen tcp:127.0.0.1:0 --json
tcp=$(sed -n 's/.*"tcp": *"\([^"]*\)".*/\1/p' "$work/three.out")
[ -n "$tcp" ] || fail 'no TCP address'
[ -S "$work/dray.socket.keeper" ] || fail 'no keeper'
"$DRAY_PROGRAM" status --connect "$tcp" --json >"$work/status.out" || fail 'status over TCP'
grep -q '"sessions"' "$work/status.out" || fail 'status as JSON'
DRAY_ADDRESS=$tcp "$DRAY_PROGRAM" status >/dev/null || fail 'DRAY_ADDRESS'
status=0
DRAY_TOKEN_FILE=/dev/null "$DRAY_PROGRAM" status --connect "$tcp" 2>"$work/token.err" || status=$?
[ $status = 1 ] && grep -q 'token' "$work/token.err" || fail 'a wrong token'
kill -TERM $pid
wait $pid || fail 'SIGTERM is no failure'
[ -z "$(find "$work" -name '*.token')" ] || fail 'the token was left behind'
grep -q '"stopped"' "$work/three.out" || fail 'no last line'
[ -z "$(find "$work" -type s)" ] || fail 'sockets were left behind'
status=0
"$DRAY_PROGRAM" status 2>"$work/status.err" || status=$?
[ $status = 1 ] && grep -q 'nobody listens there' "$work/status.err" || fail 'status of nobody'

# One that cannot begin leaves the state of the killed one, whose members wait, to the next.
serve four --listen "unix:$work/again"
kill -KILL $pid
wait $pid || true
status=0
"$DRAY_PROGRAM" serve --listen "unix:$work/again" --journal /dev/null 2>"$work/again.err" || status=$?
[ $status = 1 ] && grep -q '/dev/null' "$work/again.err" || fail 'a folder that is none'
[ -f "$work/again.state" ] || fail 'a server that could not begin ended the sessions of the one before'
serve five --listen "unix:$work/again"
grep -q '^dray1\.0000000000000003\.' "$work/again.state" || fail 'the third one does not count itself'
kill -TERM $pid
wait $pid || fail 'SIGTERM is no failure'
status=0
"$DRAY_PROGRAM" serve --listen "unix:$work/again" --journal /dev/null 2>"$work/again.err" || status=$?
[ $status = 1 ] && [ ! -e "$work/again.state" ] || fail 'a state was left behind'

usage()
{
    status=0
    "$DRAY_PROGRAM" "$@" >"$work/usage.out" 2>"$work/usage.err" || status=$?
    [ $status = 2 ] || fail "$* ended with $status"
}
usage serve --listen nonsense
usage serve --listen unix:a --listen unix:b
usage serve word
usage serve --lisen unix:a
usage status word
status=0
"$DRAY_PROGRAM" serve --listen tcp:no-such-host.invalid:0 2>"$work/usage.err" || status=$?
[ $status = 1 ] && grep -q 'no-such-host' "$work/usage.err" || fail 'listening nowhere'
# Words in the environment that mean nothing: nobody should take them for what they look like.
for wrong in DRAY_TRUSTED_NETWORKS=nowhere DRAY_DATA_ENCRYPT=Always; do
    status=0
    env "$wrong" "$DRAY_PROGRAM" serve --listen "unix:$work/wrong" >"$work/usage.out" \
        2>"$work/usage.err" || status=$?
    [ $status = 2 ] && grep -q "${wrong#*=}" "$work/usage.err" || fail "serve with $wrong"
done
echo 'serve and status work'
