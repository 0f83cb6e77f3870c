"""What `dray COMMAND --json` prints is one JSON object a line, read by Python's own parser."""
import json
import os
import subprocess
import sys


def lines(*arguments):
    done = subprocess.run([os.environ["DRAY_PROGRAM"], *arguments], capture_output=True, text=True,
                          check=True, timeout=60)
    return [json.loads(line) for line in done.stdout.splitlines()]


version, = lines("--version", "--json")
assert set(version) == {"name", "version"}, version

*checks, summary = lines("doctor", "--json")
assert summary["name"] == "summary" and summary["ok"] is True, summary
names = [check["name"] for check in checks]
assert len(set(names)) == len(names), names
for check in checks:
    assert isinstance(check["found"], bool) and isinstance(check["detail"], str), check
    assert ("unit" in check) == ("value" in check), check
    assert check["found"] or check["without"] or check["need"] == "required", check
rate = next(check for check in checks if check["name"] == "copy rate")
assert 1e7 < rate["value"] < 1e13, rate
cores = next(check for check in checks if check["name"] == "cores")
assert cores["value"] == len(os.sched_getaffinity(0)), cores

plan, = lines("plan", "--model", "qwen2.5-32b", "--from", "fsdp:4", "--to", "engine:tp=4", "--json")
assert plan["sources"] == plan["destinations"] == 4, plan
assert plan["bytes"] == sum(pair["bytes"] for pair in plan["pairs"]) == plan["links"]["host"]["bytes"], plan
assert 65.4e9 < plan["bytes"] == plan["source_bytes"] < 65.6e9, plan
received = [sum(pair["bytes"] for pair in plan["pairs"] if pair["to"] == to) for to in range(4)]
sent = [sum(pair["bytes"] for pair in plan["pairs"] if pair["from"] == of) for of in range(4)]
slowest = max(received + sent) / plan["links"]["host"]["assumed_bytes_per_s"]
assert abs(plan["predicted_seconds"] - slowest) < 1e-9, plan
one, = lines("plan", "--model", "qwen2.5-32b", "--from", "fsdp:4", "--to", "engine:tp=4", "--json",
             "--rank", "2", "--place", "network", "--rate", "network=10")
assert one["bytes"] == received[2] == one["links"]["network"]["bytes"], one
assert abs(one["predicted_seconds"] - one["bytes"] / 10e9) < 1e-9, one

# 32,763,876,352 parameters of two bytes, says the model's card; all go once but for the norms (two of
# 5,120 elements in each of 64 layers, and a last one), which each of the four ranks has whole.
plan, = lines("plan", "--model", "qwen2.5-32b", "--from", "fsdp:4", "--to", "engine:tp=4", "--json")
assert plan["bytes"] == 2 * 32_763_876_352 + 3 * 2 * 5120 * (2 * 64 + 1), plan
assert sum(pair["bytes"] for pair in plan["pairs"]) == plan["bytes"], plan

for program in sorted(os.listdir(os.path.join(os.environ["DRAY_BUILD_DIR"], "bench"))
                      if os.path.isdir(os.path.join(os.environ["DRAY_BUILD_DIR"], "bench")) else []):
    if program != "bench_limits":
        continue
    path = os.path.join(os.environ["DRAY_BUILD_DIR"], "bench", program)
    done = subprocess.run([path, "--json", "--quick"], capture_output=True, text=True, check=True,
                          timeout=120)
    for line in done.stdout.splitlines():
        row = json.loads(line)
        assert {"name", "value", "unit", "limit", "ratio", "target", "ok"} <= set(row), row
print("ok", file=sys.stderr)
