"""stream: false, the classical baseline: a task begins a step when all of its samples are there. That
changes when things happen, and no bit of what comes out."""
from jobs import *

WHOLE = ("--set", "stream=false")
streamed, whole = work / "streamed", work / "whole"
check(run(streamed).returncode == 0, "streamed")
done = run(whole, *WHOLE)
check(done.returncode == 0, f"stream: false: {done.stderr}")
check_same_run(streamed, whole, "stream: false")

events = json.loads((whole / "trace.json").read_text())
spans = [e for e in (events["traceEvents"] if isinstance(events, dict) else events)
         if e.get("ph") == "X" and e.get("args", {}).get("step", 0) > 0]
ORDER = (("rollout", "reward"), ("rollout", "reference"), ("rollout", "old_log_prob"),
         ("reward", "advantage"), ("advantage", "actor"))
for step in range(1, 7):
    for before, behind in ORDER:
        ends = [e["ts"] + e["dur"] for e in spans if e["name"] == before and e["args"]["step"] == step]
        begins = [e["ts"] for e in spans if e["name"] == behind and e["args"]["step"] == step]
        check(ends and begins and max(ends) <= min(begins),
              f"step {step}: {behind} began before {before} had ended")

for number, fault in enumerate(("desk:0:rewarded:3:kill", "engine:0:generated:3:kill")):
    folder = work / f"killed-{number}"
    done = run(folder, *WHOLE, fault=fault)
    check(done.returncode == 0 and "anew" in done.stdout, f"{fault}: {done.stderr}")
    check_same_run(streamed, folder, fault)

done = run(work / "refused", *WHOLE, "--set", "schedule=one_step_async")
check(done.returncode == 2 and "stream: expected true with schedule one_step_async" in done.stderr,
      f"stream: false with one_step_async: {done.stderr}")
finish()
