#!/bin/bash
# The tests of samples on several hosts once more, over UCX. Skipped where UCX is missing.
set -eu
if ! "$DRAY_PROGRAM" doctor --json | grep -q '"name":"UCX","found":true'; then
    echo 'no UCX here' >&2
    exit 77
fi
export DRAY_TRANSPORT=ucx
export DRAY_TRUSTED_NETWORKS=127.0.0.0/8
exec "$DRAY_BUILD_DIR/queue_test_hosts"
