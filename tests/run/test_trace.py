"""dray trace, and the arrows of trace.json. A stall of a second of each cause is planted in processes that record spans
through the library: each appears under its cause, and busy, transfer and waits are all of the time. Then runs: every
event of trace.json passes a check of its fields, of nesting and of flows, the critical path of a step has no holes, and
who is waited for is who was made slow."""
import ctypes
import subprocess

from timelines import *

CAUSE_NUMBERS = {"samples": 1, "weights": 2, "readers": 3, "ranks": 4, "admission": 5, "capacity": 6, "tool": 7,
                 "restart": 8, "controller": 9, "lease": 10}
STALL = 1.0


def trace(folder, *options):
    done = subprocess.run([PROGRAM, "trace", str(folder), "--json", *options], capture_output=True, text=True,
                          timeout=PATIENCE)
    check(done.returncode == 0, f"trace {folder}: {done.stderr}")
    found = {}
    for line in done.stdout.splitlines():
        event = json.loads(line)
        found.setdefault(event["event"], []).append(event)
    return found


def record_stall(library, folder, cause):
    dray = ctypes.CDLL(library)
    path = f"{folder}/trace/{cause}-0-1.spans".encode()
    assert dray.dray_trace_open(path, f"{cause} 0".encode(), None) == 0
    dray.dray_trace_enter(0, b"loop", ctypes.c_int64(-1))
    time.sleep(0.1)
    dray.dray_trace_wait(CAUSE_NUMBERS[cause], b"planted", ctypes.c_int64(-1))
    time.sleep(STALL)
    dray.dray_trace_leave()
    dray.dray_trace_enter(2, b"move", ctypes.c_int64(-1))
    time.sleep(0.1)
    dray.dray_trace_leave()
    dray.dray_trace_leave()
    assert dray.dray_trace_open(None, None, None) == 0


def planted_stalls():
    library = os.environ.get("DRAY_LIBRARY", "")
    if not os.path.exists(library):
        print("DRAY_LIBRARY is not there")
        sys.exit(77)
    folder = work / "planted"
    (folder / "trace").mkdir(parents=True)
    children = []
    for cause in CAUSE_NUMBERS:
        pid = os.fork()
        if not pid:
            try:
                record_stall(library, folder, cause)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(pid)
    for pid in children:
        check(os.waitpid(pid, 0)[1] == 0, "a child that records failed")
    found = trace(folder, "--bubbles", "10")
    check({p["role"] for p in found["process"]} == set(CAUSE_NUMBERS), f"planted: {found['process']}")
    for p in found["process"]:
        waited = p["wait"]
        check(set(waited) == {p["role"]}, f"planted: {p['role']} waits for {waited}")
        check(STALL <= waited[p["role"]] < STALL + 0.5, f"planted: {p['role']}: {waited}")
        check(p["busy"] >= 0.1 and p["transfer"] >= 0.1, f"planted: {p}")
        check(abs(p["told"] / p["seconds"] - 1) <= 0.02, f"planted: {p['told']} s of {p['seconds']} s are told")
    check({b["cause"] for b in found["bubble"]} == set(CAUSE_NUMBERS), f"planted: bubbles {found['bubble']}")


def record_turns(library, folder, label, spans):
    """One span behind the other: (kind, cause or 0, name, step, seconds or a function that takes them)."""
    dray = ctypes.CDLL(library)
    assert dray.dray_trace_open(f"{folder}/trace/{label}-0-1.spans".encode(), f"{label} 0".encode(), None) == 0
    for kind, cause, name, step, seconds in spans:
        if cause:
            dray.dray_trace_wait(cause, name, ctypes.c_int64(step))
        else:
            dray.dray_trace_enter(kind, name, ctypes.c_int64(step))
        seconds() if callable(seconds) else time.sleep(seconds)
        dray.dray_trace_leave()
    assert dray.dray_trace_open(None, None, None) == 0


def reached(path):
    while not path.exists():
        time.sleep(0.005)


def plant(folder, tracks):
    """Records the spans of {label: spans} at once, each by a process of its own."""
    (folder / "trace").mkdir(parents=True, exist_ok=True)
    children = []
    for label, spans in tracks.items():
        pid = os.fork()
        if not pid:
            try:
                record_turns(os.environ["DRAY_LIBRARY"], folder, label, spans)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(pid)
    for pid in children:
        check(os.waitpid(pid, 0)[1] == 0, "a child that records failed")


def waits_for_a_turn():
    """Two roles that have done nothing yet and wait for a turn on what they share: neither has kept the other waiting,
    nor has one that began later, and the critical path ends."""
    folder = work / "turns"
    lease = CAUSE_NUMBERS["lease"]
    plant(folder, {"first": [(0, 0, b"publish", 0, 0.05)]})
    plant(folder, {"other": [(1, lease, b"turn", -1, 0.7)],
                   "one": [(1, lease, b"turn", -1, 0.3), (0, 0, b"publish", 1, 0.05)]})
    plant(folder, {"later": [(0, 0, b"loop", -1, 0.05)]})  # begins when the waits are over
    found = trace(folder, "--bubbles", "10")
    check([s["step"] for s in found["step"]] == [1], f"turns: {found['step']}")
    path = found["step"][0]["path"]
    check(path[-1]["process"] == "one 0" and path[-1]["what"] == "publish", f"turns: {path}")
    check({b["by"] for b in found["bubble"]} <= {None, "first 0"}, f"turns: {found['bubble']}")


def waits_for_readers():
    """A trainer that waits for an engine in Python, and both wait nearly all of the time: their waits are listed all the
    same, and the reader is named; a grader's are not, and not those of one that works."""
    folder = work / "readers"
    waits, read = work / "trainer-waits", work / "engine-read"

    def await_the_reader():
        waits.touch()
        reached(read)

    def read_while_the_trainer_waits():
        reached(waits)
        time.sleep(0.02)
        read.touch()

    readers, samples = CAUSE_NUMBERS["readers"], CAUSE_NUMBERS["samples"]
    plant(folder, {"trainer": [(0, 0, b"publish", 1, 0.01), (1, readers, b"wait for readers", 1, await_the_reader),
                               (1, samples, b"queue claim", -1, 0.5)],
                   "engine": [(2, 0, b"weights update", 1, read_while_the_trainer_waits),
                              (1, samples, b"queue claim", -1, 0.4)],
                   "grader": [(1, samples, b"queue claim", -1, 0.6)],
                   "worker": [(0, 0, b"evaluate", -1, 0.5)]})
    found = trace(folder)
    check({b["process"] for b in found["bubble"]} == {"trainer 0", "engine 0"}, f"readers: {found['bubble']}")
    check([b["by"] for b in found["bubble"] if b["cause"] == "readers"] == ["engine 0"], f"readers: {found['bubble']}")


# ---- trace.json ------------------------------------------------------------------------------------

FIELDS = {"M": {"name": str, "args": dict}, "X": {"name": str, "cat": str, "dur": (int, float), "args": dict},
          "s": {"name": str, "cat": str, "id": int}, "f": {"name": str, "cat": str, "id": int, "bp": str}}


def check_events(name, folder):
    """Fields and types of the trace-event format; complete events of a thread are one behind the other or within one
    another; each flow begins once and ends once, later, within a span of its thread."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    begins, ends, threads = {}, {}, {}
    for e in events:
        check(e["ph"] in FIELDS, f"{name}: an event of kind {e['ph']}")
        for key, kind in (FIELDS[e["ph"]] | {"pid": int, "tid": int, "ts": (int, float)}).items():
            check(isinstance(e.get(key), kind), f"{name}: {key} of {e}")
        check(e["ts"] >= 0 and e.get("dur", 0) >= 0, f"{name}: before its begin: {e}")
        if e["ph"] == "X":
            threads.setdefault((e["pid"], e["tid"]), []).append(e)
        elif e["ph"] in "sf":
            side = begins if e["ph"] == "s" else ends
            check(e["id"] not in side, f"{name}: flow {e['id']} twice")
            side[e["id"]] = e
    for spans in threads.values():
        spans.sort(key=lambda e: (e["ts"], -e["dur"]))
        stack = []
        for e in spans:
            begin, end = round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)
            while stack and stack[-1] <= begin:
                stack.pop()
            check(not stack or end <= stack[-1], f"{name}: {e} is neither within a span nor behind it")
            stack.append(end)

    def around(e):
        return [s for s in threads.get((e["pid"], e["tid"]), []) if s["ts"] <= e["ts"] <= s["ts"] + s["dur"]]

    made, trained = ({(e["pid"], e["tid"], e["ts"]) for spans in threads.values() for e in spans
                      if e["name"] == "queue commit" and e["args"].get("task") == task
                      and e["args"].get("partition", "").startswith("step-")} for task in ("rollout", "actor"))
    for what, commits, side in (("made", made, begins), ("trained", trained, ends)):
        at = {(e["pid"], e["tid"], e["ts"]) for e in side.values()}
        check(at == commits, f"{name}: of {len(commits)} commits of samples that were {what} {len(at)} have arrows")
    check(begins.keys() == ends.keys() and begins, f"{name}: {len(begins)} flows begin, {len(ends)} end")
    for number, e in begins.items():
        check(e["ts"] < ends[number]["ts"], f"{name}: flow {number} ends before it begins")
        check(any(s["name"] == "queue commit" and s["args"]["task"] == "rollout" for s in around(e)),
              f"{name}: flow {number} begins in {around(e)}")
        check(any(s["name"] == "queue commit" and s["args"]["task"] == "actor" for s in around(ends[number])),
              f"{name}: flow {number} ends in {around(ends[number])}")


CLOCK = ("clock.enabled=true", "clock.token_seconds=0.004", "clock.train_seconds=0.001", "clock.tokens=4", "steps=5",
         "roles.engine.ranks=1", "eval.every=0", "checkpoint.every=1000")


def runs():
    for name, settings in (("sync", ("clock.token_seconds=0.02",)), ("async", ("schedule=async", "rollout.batching=continuous",
                                                    "roles.engine.instances=2", "roles.trainer.ranks=2"))):
        folder = work / name
        done = run(folder, *words(CLOCK + settings))
        check(done.returncode == 0, f"{name}: {done.stderr}")
        check_events(name, folder)
        found = trace(folder)
        for p in found["process"]:
            check(abs(p["told"] / p["seconds"] - 1) <= 0.02, f"{name}: {p['process']}: {p['told']} of {p['seconds']} s")
        check([s["step"] for s in found["step"]] == [1, 2, 3, 4, 5], f"{name}: {[s['step'] for s in found['step']]}")
        for s in found["step"]:
            path = s["path"]
            holes = [b["at"] - a["at"] - a["seconds"] for a, b in zip(path, path[1:])]
            check(max(map(abs, holes), default=0) < 1e-6, f"{name}: step {s['step']}: holes in its path: {holes}")
            check(abs(sum(link["seconds"] for link in path) - s["seconds"]) < 1e-6, f"{name}: step {s['step']}: {s}")
        check(abs(sum(p["share"] for p in found["critical_path"]) - 1) < 1e-6, f"{name}: shares of the path")
        one = trace(folder, "--from", "3", "--to", "4")
        check([s["step"] for s in one["step"]] == [3, 4], f"{name}: --from, --to: {one['step']}")
    # Rollout takes far longer than training: it is what a step of sync waits for, and whom the trainer waits for. A
    # machine that stops a process for a moment lengthens one wait, so that what engines do is judged over all of them.
    found = trace(work / "sync", "--from", "2")
    longest = found["critical_path"][0]
    check((longest["process"], longest["what"]) == ("engine 0", "rollout"), f"sync: {longest}")
    # Nobody ends the wait at the run's end: it is for samples of no step.
    trainers = [b for b in found["bubble"] if b["process"] == "trainer 0" and b["partition"]]
    check(trainers and all(b["by"] == "engine 0" for b in trainers), f"sync: the trainer waits: {trainers}")
    rolling = sum(b["seconds"] for b in trainers if b["doing"] == "rollout")
    check(rolling > 0.5 * sum(b["seconds"] for b in trainers), f"sync: the trainer waits: {trainers}")


def killed():
    """A stall that the run itself has: an engine that died, and a tool that takes its time."""
    done = run(work / "killed", *words(CLOCK + ("roles.engine.ranks=2",)), fault="engine:0:generated:3:kill")
    check(done.returncode == 0, f"killed: {done.stderr}")
    engines = [p for p in trace(work / "killed")["process"] if p["role"] == "engine"]
    check(len(engines) == 2, f"killed: {engines}")
    for engine in engines:
        check(engine["starts"] == 2 and engine["wait"].get("restart", 0) > 0, f"killed: {engine}")
        check(abs(engine["told"] / engine["seconds"] - 1) <= 0.02, f"killed: {engine}")
    slow = "read line; sleep 1; echo 1; while read line; do echo 1; done"
    done = run(work / "tool", *words(CLOCK + ("steps=2", "reward.rule=command", f"reward.command={slow}")))
    check(done.returncode == 0, f"tool: {done.stderr}")
    desk = next(p for p in trace(work / "tool")["process"] if p["role"] == "desk")
    check(1 <= desk["wait"].get("tool", 0) < 2, f"tool: {desk}")


planted_stalls()
waits_for_a_turn()
waits_for_readers()
runs()
killed()
finish()
