"""What the tests of a run's time share: its timeline, read as Perfetto reads it, and the rows beside it."""
from jobs import *

CAUSES = {"samples", "weights", "readers", "ranks", "admission", "capacity", "tool", "restart", "controller", "lease"}
JITTER = 0.02  # seconds between two readings of clocks, on a machine that does other things, too


def timelines(folder):
    """{(process, its label, thread): its spans in their order}, times in ns."""
    events = json.loads((folder / "trace.json").read_text())
    check(events["otherData"]["lost_spans"] == 0, f"{folder.name}: spans were lost")
    labels = {e["pid"]: e["args"]["name"] for e in events["traceEvents"] if e["name"] == "process_name"}
    found = {}
    for e in events["traceEvents"]:
        if e["ph"] == "X":
            begin, length = round(e["ts"] * 1000), round(e["dur"] * 1000)
            found.setdefault((e["pid"], labels[e["pid"]], e["tid"]), []).append(
                (begin, begin + length, e["cat"], e["name"], e["args"]))
    return {key: sorted(spans, key=lambda s: s[:2]) for key, spans in found.items()}


def check_thread(what, spans):
    for one, next in zip(spans, spans[1:]):
        check(next[0] >= one[1], f"{what}: {one} and {next} overlap")
    whole, told = spans[-1][1] - spans[0][0], sum(s[1] - s[0] for s in spans)
    check(whole - told <= 0.02 * whole + JITTER * 1e9, f"{what}: {told / whole:.4f} of its time is told")
    for begin, end, kind, name, args in spans:
        check(kind != "wait" or args.get("cause") in CAUSES, f"{what}: waits without a cause: {name} {args}")
        # The two clocks are not read at the same moment.
        check(args.get("cpu_ns", 0) <= end - begin + 2e7, f"{what}: CPU time of {end - begin} ns: {name} {args}")


def split(spans):
    """Threads that prefetch follow each other on one line, one for each version."""
    if spans[0][3] != "prefetch weights":
        return [spans]
    versions = sorted({s[4]["step"] for s in spans})
    return [[s for s in spans if s[4]["step"] == version] for version in versions]


def check_rows(name, made):
    for row in made:
        for role, time in row["time"].items():
            whole = time["busy"] + time["transfer"] + sum(time["wait"].values()) + time.get("starting", 0)
            wall = time["processes"] * row["step_seconds"]
            check(abs(whole - wall) <= 0.02 * wall + JITTER,
                  f"{name}: step {row['step']}: {role}: {whole} s of {wall} s: {time}")
            check(min(time["wait"].values(), default=0) >= 0, f"{name}: a wait of less than nothing: {time}")
            check(set(time["wait"]) <= CAUSES, f"{name}: causes: {time}")
    return made
