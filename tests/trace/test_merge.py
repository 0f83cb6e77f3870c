"""The merged trace, read as Perfetto reads it: every event has the fields that the trace-event format
requires, every span of every process and thread is there once, with its times."""

import ctypes
import json
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import threading

KINDS = {0: "busy", 1: "wait", 2: "transfer"}


def library():
    path = os.environ.get("DRAY_LIBRARY")
    if not path or not os.path.exists(path):
        print("no DRAY_LIBRARY")
        sys.exit(77)
    dray = ctypes.CDLL(path)
    dray.dray_trace_span.argtypes = [ctypes.c_int, ctypes.c_char_p] + 3 * [ctypes.c_int64]
    dray.dray_trace_span.restype = None
    dray.dray_trace_now.restype = ctypes.c_int64
    return dray


def record(dray, spans, together):
    """together: threads that follow each other would share a line of the timeline."""
    for kind, name, begin, end, step in spans:
        dray.dray_trace_span(kind, name, begin, end, step)
    together.wait()


def process(dray, path, label, threads, kill):
    """A child that records its threads' spans, flushes, and ends or is killed."""
    pid = os.fork()
    if pid:
        return pid
    try:
        assert dray.dray_trace_open(path.encode(), label.encode(), None) == 0
        together = threading.Barrier(len(threads))
        workers = [threading.Thread(target=record, args=(dray, spans, together)) for spans in threads]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert dray.dray_trace_flush(None) == 0
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        assert dray.dray_trace_open(None, None, None) == 0
        os._exit(0)
    except BaseException as error:
        print(error, file=sys.stderr)
        os._exit(1)


CLOCK_AT, CLOCK = 1984, (7 * 10**9, 1000)  # added, and by how much that may be wrong


def make_names(rng):
    names = ["forward", "größe", 'with "quotes"', "back\\slash", "new\nline", "tab\t\x01", "日本"]
    names += ["name %d" % rng.randrange(1000) for _ in range(5)]
    # Interned for the life of the process, as the header asks.
    return [ctypes.c_char_p(name.encode()) for name in names]


def make_spans(rng, names, now):
    spans = []
    for _ in range(rng.randrange(1, 300)):
        begin = now + rng.randrange(10**10)
        end = begin + rng.randrange(10**7)
        spans.append((rng.randrange(3), rng.choice(names), begin, end, rng.choice([-1, 0, 7, 10**12])))
    return spans


def check_event(event):
    assert isinstance(event["ph"], str) and event["ph"] in "XM", event
    assert isinstance(event["pid"], int) and isinstance(event["tid"], int), event
    assert isinstance(event["name"], str), event
    assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0, event
    assert isinstance(event["args"], dict), event
    if event["ph"] == "X":
        assert isinstance(event["dur"], (int, float)) and event["dur"] >= 0, event
        assert event["cat"] in KINDS.values(), event
    else:
        assert event["name"] in ("process_name", "process_labels", "thread_name", "clock"), event


def main():
    dray = library()
    seed = int(os.environ.get("DRAY_TEST_SEED", random.randrange(2**32)))
    print("seed", seed)
    rng = random.Random(seed)
    folder = tempfile.mkdtemp(prefix="dray-test-")
    try:
        names = make_names(rng)
        now = dray.dray_trace_now()
        expected, children = {}, []
        for i in range(4):
            label = "task %d ü" % i
            threads = [make_spans(rng, names, now) for _ in range(rng.randrange(1, 4))]
            expected[label] = threads
            path = os.path.join(folder, "%d.spans" % i)
            children.append((process(dray, path, label, threads, kill=i == 1), i == 1))
        for pid, killed in children:
            status = os.waitpid(pid, 0)[1]
            assert os.WIFSIGNALED(status) if killed else status == 0, status
        # One that was killed in the middle of its last write.
        data = open(os.path.join(folder, "1.spans"), "rb").read()
        open(os.path.join(folder, "1.spans"), "ab").write(data[-40:-7])
        # One of another host, whose clock is 7 s behind: the head of its file says so (src/trace/spans.h).
        with open(os.path.join(folder, "2.spans"), "r+b") as file:
            file.seek(CLOCK_AT)
            file.write(struct.pack("<qq", *CLOCK))
        expected["task 2 ü"] = [[(k, n, b + CLOCK[0], e + CLOCK[0], s) for k, n, b, e, s in spans]
                                for spans in expected["task 2 ü"]]
        merged = os.path.join(folder, "trace.json")
        error = ctypes.create_string_buffer(1024)
        assert dray.dray_trace_merge(folder.encode(), merged.encode(), error) == 0, error.raw
        assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
        check(json.load(open(merged, encoding="utf-8")), expected)
    finally:
        shutil.rmtree(folder)


def check(trace, expected):
    events = trace["traceEvents"]
    for event in events:
        check_event(event)
    origin = trace["otherData"]["origin_ns"]
    labels = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(labels.values()) == sorted(expected), labels
    clocks = {labels[e["pid"]]: e["args"] for e in events if e["name"] == "clock"}
    assert clocks == {"task 2 ü": {"added_ns": CLOCK[0], "error_ns": CLOCK[1]}}, clocks
    for pid, label in labels.items():
        rows = {}
        for event in events:
            if event["pid"] == pid and event["ph"] == "X":
                rows.setdefault(event["tid"], []).append(event)
        named = {e["tid"] for e in events if e["pid"] == pid and e["name"] == "thread_name"}
        assert named == set(rows), (named, set(rows))
        found = sorted(sorted(as_tuple(event, origin) for event in row) for row in rows.values())
        wanted = sorted(
            sorted((KINDS[k], n.value.decode(), b, e, s) for k, n, b, e, s in spans)
            for spans in expected[label]
        )
        assert found == wanted, label
    print(len(events), "events are right")


def as_tuple(event, origin):
    begin = origin + round(event["ts"] * 1000)
    end = begin + round(event["dur"] * 1000)
    return event["cat"], event["name"], begin, end, event["args"].get("step", -1)


main()
