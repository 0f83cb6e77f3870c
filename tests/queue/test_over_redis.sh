#!/bin/bash
# The queue's own tests once more, with a real redis-server holding the bytes: its keys are seen from
# outside while they run, and none is left afterwards.
set -u
command -v redis-server >/dev/null && command -v redis-cli >/dev/null || {
    echo 'skipped: redis-server and redis-cli are needed'
    exit 77
}
folder=$(mktemp -d)
redis-server --port 0 --unixsocket "$folder/socket" --dir "$folder" --save '' --loglevel warning \
    >/dev/null &
server=$!
trap 'kill $server 2>/dev/null; wait $server 2>/dev/null; rm -rf "$folder"' EXIT
ask()
{
    redis-cli -s "$folder/socket" "$@" 2>/dev/null
}
for _ in $(seq 400); do
    [ "$(ask ping)" = PONG ] && break
    sleep 0.02
done
export DRAY_QUEUE_BACKEND="redis:unix:$folder/socket"
failed=0
for name in test_queue test_next test_partial test_policies test_lost test_loss test_death test_refusals \
    test_cursor test_versions test_task test_peers test_histories test_gsm8k; do
    ask config resetstat >/dev/null
    "$DRAY_BUILD_DIR/queue_$name" >"$folder/log" 2>&1
    status=$?
    if [ $status -eq 77 ]; then
        echo "$name: skipped"
        continue
    fi
    written=$(ask info commandstats | sed -n 's/^cmdstat_set:calls=\([0-9]*\).*/\1/p')
    left=$(ask dbsize)
    echo "$name: status $status, ${written:-0} keys written, $left left"
    if [ $status -ne 0 ] || [ "${written:-0}" -eq 0 ] || [ "$left" != 0 ]; then
        grep -v '  OK ' "$folder/log" | tail -n 20
        failed=1
    fi
    ask flushall >/dev/null
done
exit $failed
