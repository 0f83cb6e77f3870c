#!/bin/bash
# The tests of updates between hosts once more, over UCX: with the same peers that die, stop and lie,
# the same ceilings, and links that are cut. Skipped where UCX is missing.
set -eu
if ! "$DRAY_PROGRAM" doctor --json | grep -q '"name":"UCX","found":true'; then
    echo 'no UCX here' >&2
    exit 77
fi
export DRAY_TRANSPORT=ucx
export DRAY_TRUSTED_NETWORKS=10.213.8.0/24 # of the namespaces whose link is cut
"$DRAY_BUILD_DIR/weights_test_distributed_links" & # both wait most of the time
links=$!
rc=0
"$DRAY_BUILD_DIR/weights_test_distributed" || rc=1
wait $links || [ $? = 77 ] || rc=1 # 77: not root
exit $rc
