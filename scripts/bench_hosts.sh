#!/bin/sh
# bench_hosts.sh [RATE [OPTION...]]: dray bench weights between two network namespaces whose link is
# shaped to RATE (tc's words; default 2gbit), against iperf3 over the same link. As root. OPTIONs go to
# dray bench weights; without any: a 0.5B model, FSDP 2 to TP 2, three times.
set -eu
cd "$(dirname "$0")/.."
rate=${1:-2gbit}
[ $# = 0 ] || shift
if [ "$(id -u)" != 0 ]; then
    echo 'bench_hosts.sh: network namespaces need root' >&2
    exit 77
fi
a=dray-a-$$
b=dray-b-$$
clean()
{
    ip netns del "$a" 2>/dev/null || true
    ip netns del "$b" 2>/dev/null || true
}
trap clean EXIT
trap 'exit 130' INT TERM
ip netns add "$a"
ip netns add "$b"
ip link add name drv0 netns "$a" type veth peer name drv0 netns "$b"
number=1
for space in "$a" "$b"; do
    ip -n "$space" addr add 10.77.0.$number/24 dev drv0
    ip -n "$space" link set lo up
    ip -n "$space" link set drv0 up
    ip netns exec "$space" tc qdisc add dev drv0 root tbf rate "$rate" burst 1mb latency 50ms
    number=$((number + 1))
done
[ $# != 0 ] || set -- --model qwen2.5-0.5b --repeat 3
DRAY_TRUSTED_NETWORKS=${DRAY_TRUSTED_NETWORKS-10.77.0.0/24} \
    build/release/dray bench weights --from "fsdp:2@$a" --to "engine:tp=2@$b" --mode distributed "$@"
