"""Reads the updates of engines from a run's timeline (trace.json): how long each engine pauses for a new version, how
much of the pause is the local copy, whether the version was prefetched, and how many engines pause at the same time.
tests/run/test_rolling.py uses this file, too."""
import collections
import json

Update = collections.namedtuple("Update", "engine version drained out back pause copy cpu queued fetched inside")
Update.__doc__ = """An update of an engine to a version. Times are seconds of the machine's monotonic clock.

drained     the time from which the engine began no samples ("last samples"); None when it takes the version at once
out, back   the beginning and the end of its work on the update
pause       the seconds in which it generates nothing, without the waits for its turn and for the version
copy        the seconds of the copy from the staging into the engine's memory
cpu         the thread's CPU seconds in the pause without the copy
queued      the seconds in the pause without the copy in which the thread waited for a core
fetched     the time at which the version's prefetch ended; None without a prefetch
inside      the names of the spans within the pause"""
WAITS = {"wait for a turn", "wait for prefetch", "wait for weights"}
TAKING = {"wait for weights", "update weights", "swap weights", "copy weights"}


def spans_of(folder):
    """Returns {(process's label, thread): [(begin, end, name, kind, args)]}, ordered by time."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    labels = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found = collections.defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            begin, end = e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6
            found[labels[e["pid"]], e["tid"]].append((begin, end, e["name"], e["cat"], e["args"]))
    return {key: sorted(spans, key=lambda s: s[:2]) for key, spans in found.items()}


def prefetches(threads):
    """Returns {(engine, version): the end of its prefetch}."""
    ends = {}
    for (label, _), spans in threads.items():
        for _, end, name, _, args in spans:
            if name == "prefetch weights":
                key = label, args["step"]
                ends[key] = max(end, ends.get(key, end))
    return ends


def pauses(spans):
    """Returns (version, spans) for each version: the spans of the thread from the first "take weights" of that version
    to the last."""
    of = collections.defaultdict(list)
    for at, (_, _, name, _, args) in enumerate(spans):
        if name == "take weights":
            of[args["step"]].append(at)
    return [(version, spans[pieces[0]:pieces[-1] + 1]) for version, pieces in of.items()]


def updates(folder, role="engine"):
    """Returns the updates of rank 0 of each instance of the role, ordered by time."""
    threads, found = spans_of(folder), []
    fetched = prefetches(threads)
    for (label, _), spans in threads.items():
        if label.split(" ")[0].split(".")[0] != role or not label.endswith(" 0"):
            continue
        last = {args["step"]: begin for begin, _, name, _, args in spans if name == "last samples"}
        for version, parts in pauses(spans):
            pause = parts[-1][1] - parts[0][0] - sum(to - since for since, to, name, *_ in parts if name in WAITS)
            taking = [part for part in parts if part[2] in TAKING]
            copy = sum(to - since for since, to, name, *_ in parts if name == "copy weights")
            rest = [args for _, _, name, _, args in parts if name not in WAITS | {"copy weights"}]
            cpu, queued = (sum(args.get(key, 0) for args in rest) / 1e9 for key in ("cpu_ns", "queued_ns"))
            found.append(Update(label, version, last.get(version), taking[0][0], taking[-1][1], pause, copy, cpu, queued,
                                fetched.get((label, version)), {name for _, _, name, *_ in parts}))
    return sorted(found, key=lambda u: u.out)


def out_at_once(found):
    """Returns the largest number of engines that are out at the same time."""
    events = sorted([(u.drained or u.out, 1) for u in found] + [(u.back, -1) for u in found])
    most = now = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most
