"""rolling, from the timeline of the clock job: at most max(1, floor(E (1 - T / R))) of E engines are out for an update
at once, and never all of them; and what an engine does while it is out is a copy within the machine, as the version
was fetched before. T and R, samples a second that are trained and that all engines can make, are what the job's sleeps
say. How long a pause is, is `bench/clock.py --suite rolling`'s to say."""
import collections
import math
import sys

from jobs import *

SOURCE = pathlib.Path(os.environ["DRAY_SOURCE_DIR"])
sys.path.insert(0, str(SOURCE / "bench"))
import pauses  # noqa: E402

STEPS, WARM = 12, 3
TRAIN, TOKENS, BATCH, MICRO = 2.5e-3, 8, 32, 8
# Weights whose copy takes so long that engines that did not wait for each other would be seen together.
SETTINGS = (f"steps={STEPS}", f"clock.train_seconds={TRAIN}", "schedule=rolling", "model.hidden_size=256",
            "model.intermediate_size=1024", "model.layers=2", "eval.prompts=1", "checkpoint.every=1000")


def most_out(engines, token_seconds):
    trained, made = 1 / TRAIN, engines * MICRO / (TOKENS * token_seconds)
    return max(1, math.floor(engines * (1 - min(1, trained / made))))


def check_rows_of(name, folder, engines):
    """Of the timeline: each instance is a process of its own, with a line for what it does and one for its prefetches,
    also where all have the same device, and what one line has never overlaps."""
    trace = json.loads((folder / "trace.json").read_text())["traceEvents"]
    said = collections.defaultdict(list)
    for event in trace:
        if event["ph"] == "M":
            said[event["name"], event["args"].get("name") or event["args"]["labels"]].append((event["pid"], event["tid"]))
    ours = [said["process_name", f"engine.{n} 0"] for n in range(engines)]
    check(all(len(one) == 1 for one in ours) and len({one[0] for one in ours}) == engines, f"{name}: processes {ours}")
    for n, [(pid, _)] in enumerate(ours):
        check(said["thread_name", f"engine.{n}-0"] == [(pid, 1)], f"{name}: engine.{n}: {dict(said)}")
        check((pid, 2) in said["thread_name", "prefetch"], f"{name}: engine.{n}: {dict(said)}")
    kernel = [pids for (what, _), pids in said.items() if what == "process_labels"]
    check(all(len(pids) == 1 for pids in kernel), f"{name}: two rows of one process: {dict(said)}")
    for (label, thread), spans in pauses.spans_of(folder).items():
        one_by_one = all(after[0] >= before[1] - 1e-9 for before, after in zip(spans, spans[1:]))
        check(one_by_one or thread > 1, f"{name}: spans of {label} overlap")


def look(name, engines, token_seconds, *settings):
    folder = work / name
    line = [PROGRAM, "run", str(SOURCE / "examples/clock.yaml"), "--out", str(folder)]
    for setting in (*SETTINGS, f"roles.engine.instances={engines}", f"clock.token_seconds={token_seconds}", *settings):
        line += ["--set", setting]
    done = subprocess.run(line, cwd=work, capture_output=True, text=True, timeout=PATIENCE)
    check_nothing_left(folder)
    check(done.returncode == 0, f"{name}: {done.stderr}")
    check_rows_of(name, folder, engines)
    # The last version is made when nothing is left to generate: an engine that evaluates it waits for it.
    found = [u for u in pauses.updates(folder) if WARM <= u.version < STEPS]
    taken = collections.Counter(u.engine for u in found)
    check(len(taken) == engines and taken.total() >= STEPS, f"{name}: too few updates: {taken}")
    for update in found:
        check("swap weights" in update.inside and update.copy > 0, f"{name}: no copy of what was prefetched: {update}")
        check(not update.inside & {"update weights", "wait for prefetch"} and update.fetched is not None and
              update.fetched <= update.out, f"{name}: the fetch lies within the pause: {update}")
    most, bound = pauses.out_at_once(found), most_out(engines, token_seconds)
    check(0 < most <= bound < engines, f"{name}: {most} of {engines} engines are out at once, expected {bound} at most")
    return found


def drain():
    """Engines that begin no new samples until those under way are finished have their turn from there on. Where a machine
    is so busy that versions come when all samples are made, these take longer."""
    for seconds in (5e-3, 4e-2, 3e-1):
        found = look(f"drained, {seconds:g}", 2, seconds, "rollout.batching=continuous", "rollout.micro_batch=4",
                     "clock.variation=1")
        if any(update.drained for update in found):
            return
    check(False, "no engine finished its samples for an update")


# Samples under way go on while others wait for the version that fresh_share asks for, and which may need them: what an
# engine does right after such a wait is not to go on with rows.
settings = ("rollout.batching=continuous", "schedule=rolling", "fresh_share=0.5", "steps=6", "seed=0",
            "rollout.micro_batch=4", "rollout.max_new_tokens=24", "clock.enabled=true", "clock.tokens=8", "clock.variation=0.5",
            "clock.token_seconds=2e-3", "clock.train_seconds=4e-3", "clock.log_prob_seconds=4e-3",
            "roles.engine.instances=2", "roles.engine.ranks=1")
*_, done = beside_each_other(
    (look, "two", 2, 5e-3, "roles.engine.devices=cpu:0"), (look, "three", 3, 1e-3),
    (drain,), (run, work / "share", *words(settings)))
check(done.returncode == 0, f"a share of the newest version: {done.stderr}")
took = [row["step_seconds"] for row in rows(work / "share")[1:]]
slower = 8 if "asan" in PROGRAM or "tsan" in PROGRAM else 1
check(max(took) < 4 * slower, f"a share of the newest version: {took}")
after = collections.Counter(then[2] for (_, thread), spans in pauses.spans_of(work / "share").items() if thread == 1
                            for one, then in zip(spans, spans[1:]) if one[2] == "wait for weights: fresh share")
check(after and "rollout" not in after, f"after waits for the newest version: {dict(after)}")

finish()
