"""Runs whose roles share a device. Used by the tests beside it."""
import itertools

from jobs import *


def devices(**roles):
    return [word for role, where in roles.items() for word in ("--set", f"roles.{role}.devices={where}")]


# Phases that compute. The others (opening, the loop between two batches, ...) need no device.
WORK = {"warm up", "rollout", "eval", "old_log_prob", "actor", "optimiser", "reward", "score", "reference",
        "advantage"}


def busy_spans(folder):
    """What each role computed: (begin, end, name) in microseconds."""
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"].split()[0] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    spans = {}
    for e in events:
        if e["ph"] == "X" and e["cat"] == "busy" and e["name"] in WORK:
            spans.setdefault(names[e["pid"]], []).append((e["ts"], e["ts"] + e["dur"], e["name"]))
    return spans


def overlaps(folder, *roles):
    """Pairs of spans of two of the roles that were at the same time."""
    spans = busy_spans(folder)
    check(all(len(spans.get(role, [])) > 10 for role in roles), f"{folder}: {({r: len(s) for r, s in spans.items()})}")
    return [(a, one, b, other) for a, b in itertools.combinations(roles, 2)
            for one in spans.get(a, []) for other in spans.get(b, [])
            if min(one[1], other[1]) > max(one[0], other[0])]


def check_turns(folder, *roles):
    found = overlaps(folder, *roles)
    check(not found, f"{folder.name}: {len(found)} overlaps, such as {found[:2]}")
