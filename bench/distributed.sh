#!/bin/bash
# Updates between hosts: a trainer and four engines in network namespaces on one bridge, each with a
# link of its own (tc tbf), measured against iperf3 over the same link in the same run: one engine,
# then four that join at once; encrypted and, as a trusted network, plain; then without shaping.
#   bench/distributed.sh [MBIT] [LAYERS]        as root; DRAY_PROGRAM: build/release/dray
set -euo pipefail
mbit=${1:-2000} layers=${2:-6}
dray=${DRAY_PROGRAM:-build/release/dray}
prefix=drayb$$
names=(t e0 e1 e2 e3)

cleanup()
{
    for name in "${names[@]}"; do
        ip netns del "$prefix$name" 2>/dev/null || true
    done
    ip link del "$prefix" 2>/dev/null || true
}
trap cleanup EXIT

shape() # namespace
{
    ip netns exec "$1" tc qdisc replace dev eth0 root tbf rate "${mbit}mbit" burst 256kb latency 50ms
}

ip link add "$prefix" type bridge
ip link set "$prefix" up
for i in "${!names[@]}"; do
    ns=$prefix${names[i]}
    ip netns add "$ns"
    ip link add "$prefix.$i" type veth peer name eth0 netns "$ns"
    ip link set "$prefix.$i" master "$prefix" up
    ip -n "$ns" addr add "10.213.7.$((i + 1))/24" dev eth0
    ip -n "$ns" link set eth0 up
    ip -n "$ns" link set lo up
    shape "$ns"
    tc qdisc replace dev "$prefix.$i" root tbf rate "${mbit}mbit" burst 256kb latency 50ms
done

bench() # arguments
{
    "$dray" bench weights --model qwen2.5-0.5b --layers "$layers" --from "full@${prefix}t" \
        --mode distributed --repeat 3 "$@"
}
one=$prefix'e0'
four=$prefix'e0,'$prefix'e1,'$prefix'e2,'$prefix'e3'
echo "== links of $mbit Mbit/s, TLS: one engine, four that join at once"
bench --to "engine:tp=1@$one"
bench --to "engine:tp=1@$four" --engines 4
export DRAY_TRUSTED_NETWORKS=10.213.7.0/24
echo '== the same, a trusted network'
bench --to "engine:tp=1@$one"
bench --to "engine:tp=1@$four" --engines 4
for i in "${!names[@]}"; do
    ip netns exec "$prefix${names[i]}" tc qdisc del dev eth0 root
    tc qdisc del dev "$prefix.$i" root
done
echo '== not shaped: trusted, then TLS'
bench --to "engine:tp=1@$one"
unset DRAY_TRUSTED_NETWORKS
bench --to "engine:tp=1@$one"
