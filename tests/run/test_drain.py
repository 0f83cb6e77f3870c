"""A drain that waits for the longest response (verl #6090): with update: in_flight an engine takes new weights
while a response goes on that is far longer than the others, and a run that is stopped does not wait for it. An engine
whose update waits for its responses (update: boundary) leaves when it is asked to."""
from jobs import *

TOKEN, LONGEST = 5e-3, 300
JOB = words((
    "schedule=async", "staleness=2", "rollout.batching=continuous", "update=in_flight", "clock.enabled=true",
    "clock.tokens=4", "clock.variation=0.3", "clock.tail=100", "clock.tail_share=0.1",
    f"clock.token_seconds={TOKEN}", "clock.train_seconds=2e-3", f"rollout.max_new_tokens={LONGEST}",
    "model.max_positions=512", "rollout.micro_batch=16", "checkpoint.every=100", "eval.every=0",
    "roles.engine.ranks=1"))


def seen(process):
    """The moment of each event."""
    for line in process.stdout:
        yield time.monotonic(), json.loads(line)


folder = work / "long"
process = start(folder, *JOB, json_lines=True)
made, had = {}, {}
for now, event in seen(process):
    if event["event"] == "step":
        made[event["step"]] = now
    if event["event"] == "engine_update":
        had[event["version"]] = now
process.communicate(timeout=PATIENCE)
check(process.returncode == 0, f"status {process.returncode}")
lengths = [row["response_length_mean"] * 16 for row in rows(folder)[1:]]
check(max(lengths) > LONGEST, f"no response was long: {lengths}")
late = {version: round(had[version] - made[version], 3) for version in had if version in made}
check(len(late) > 2 and max(late.values()) < TOKEN * LONGEST / 3, f"an update waited: {late}")

# The step that is under way is made; what else is under way then is left, and nobody waits for it.
folder = work / "stopped"
process = start(folder, *JOB, "--set", "steps=1000", json_lines=True)
last, warnings = None, []
for now, event in seen(process):
    if event["event"] == "warning":
        warnings.append(event["message"])
    if event["event"] == "step" and event["step"] == 3:
        process.send_signal(signal.SIGINT)
    if event["event"] == "step":
        last = now
out, err = process.communicate(timeout=PATIENCE)
took = time.monotonic() - last
check(not warnings, f"stopped: {warnings}")
check(process.returncode == 130 and took < TOKEN * LONGEST, f"stopped {took:.2f} s after the last step: {err}")
check_nothing_left(folder)

# New weights have come and wait for the responses that are under way, which fill all slots, as SIGTERM comes.
# What the engine had begun then is begun anew: newer weights do not go on with it.
folder, record = work / "asked", work / "asked.record"
os.environ["DRAY_RECORD"] = str(record)
process = start(folder, *JOB, "--set", "steps=1000", "--set", "update=boundary", "--set", "rollout.micro_batch=2",
                json_lines=True)
asked = []
for _, event in seen(process):
    if event["event"] != "step" or event["step"] < 3 or len(asked) == 4:
        continue
    time.sleep(0.03 * len(asked))
    engines = [pid for pid, line in processes_of(folder) if line.endswith("role engine")]
    for pid in engines:
        os.kill(pid, signal.SIGTERM)
    patience = time.monotonic() + PATIENCE / 8
    while any(state_of(pid) not in ("", "Z") for pid in engines) and time.monotonic() < patience:
        time.sleep(0.01)
    left = [pid for pid in engines if state_of(pid) not in ("", "Z")]
    check(engines and not left, f"step {event['step']}: asked to leave, {left} of {engines} did not")
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    asked.append(engines)
    if left or len(asked) == 4:
        process.send_signal(signal.SIGINT)
out, err = process.communicate(timeout=PATIENCE)
trained = [row for line in map(json.loads, record.read_text().splitlines()) if line["task"] == "actor"
           for row in line["rows"]]
mixed = [(slot, oldest, newest) for slot, _, _, oldest, newest in trained if oldest != newest]
check(trained and not mixed, f"of {len(trained)} samples {mixed} are of two versions")
check(process.returncode == 130 and len(asked) > 1, f"asked to leave {asked}: status {process.returncode}: {err}")
check_nothing_left(folder)
finish()
