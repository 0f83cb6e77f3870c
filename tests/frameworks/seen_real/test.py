"""What others' tools read of a run: Perfetto's own classes the protobuf form of the timeline, TensorBoard's reader its event
files, and Weights & Biases' reader its offline run: the same spans, flows and numbers as trace.json and metrics.jsonl."""
import collections
import glob
import json
import os
import pathlib
import struct
import subprocess
import sys

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

ROOT, WORK = pathlib.Path(os.environ["DRAY_SOURCE_DIR"]), pathlib.Path(os.environ["DRAY_WORK"])
PROGRAM = os.environ.get("DRAY_PROGRAM") or next(
    (str(path) for path in (pathlib.Path(sys.prefix) / "bin/dray", ROOT / "build/release/dray") if path.exists()), "")
if not PROGRAM:
    print("no program dray")
    sys.exit(77)
RUN = WORK / "run"


def dray(*words):
    subprocess.run([PROGRAM, *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def of_json():
    """({(process, thread, name, begin, end): how often}, flows) of trace.json."""
    events = json.loads((RUN / "trace.json").read_text())["traceEvents"]
    labels = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans = collections.Counter((labels[e["pid"]], e["tid"], e["name"], round(e["ts"] * 1000), round(e["dur"] * 1000))
                                for e in events if e["ph"] == "X")
    return spans, sum(e["ph"] == "s" for e in events)


def of_protobuf(path):
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    processes, threads, names, categories = {}, {}, {}, {}
    spans, begun, last, starts, ends = collections.Counter(), {}, {}, set(), set()
    origin = min(p.timestamp for p in trace.packet if p.HasField("track_event"))
    for packet in trace.packet:
        for name in packet.interned_data.event_names:
            names[name.iid] = name.name
        for category in packet.interned_data.event_categories:
            categories[category.iid] = category.name
        track = packet.track_descriptor
        if packet.HasField("track_descriptor") and track.HasField("process"):
            processes[track.uuid] = (track.process.process_name, track.process.pid)
        elif packet.HasField("track_descriptor"):
            threads[track.uuid] = (processes[track.parent_uuid][0], track.thread.tid % 1000)
            assert track.thread.pid == processes[track.parent_uuid][1], track
        if not packet.HasField("track_event"):
            continue
        event = packet.track_event
        assert packet.timestamp >= last.get(event.track_uuid, 0), "events of a track are not in their order"
        last[event.track_uuid] = packet.timestamp
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            assert event.track_uuid not in begun and set(event.category_iids) <= set(categories), event
            begun[event.track_uuid] = (names[event.name_iid], packet.timestamp)
            starts |= set(event.flow_ids)
            ends |= set(event.terminating_flow_ids)
        else:
            assert event.type == TrackEvent.TYPE_SLICE_END, event
            name, begin = begun.pop(event.track_uuid)
            spans[(*threads[event.track_uuid], name, begin - origin, packet.timestamp - begin)] += 1
    assert not begun and starts == ends, (begun, starts ^ ends)
    return spans, len(starts)


def of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    seen = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    seen.Reload()
    out = {}
    for tag in seen.Tags()["tensors"]:
        for event in seen.Tensors(tag):
            out[tag, event.step] = event.tensor_proto.float_val[0] if event.tensor_proto.float_val else None
    for tag in seen.Tags()["scalars"]:
        for event in seen.Scalars(tag):
            out[tag, event.step] = event.value
    return out


def records(path):
    """Of a file in LevelDB's log format (its doc/log_format.md), behind a head of 7 bytes: blocks of 32 KiB, in each records of
    checksum, length, kind (1 whole, 2 first, 3 middle, 4 last)."""
    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B", data[:7]
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def of_wandb(folder):
    from wandb.proto import wandb_internal_pb2
    out = {}
    for data in records(pathlib.Path(glob.glob(f"{folder}/wandb/offline-run-*/*.wandb")[0])):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item}
        step = record.history.step.num if record.history.HasField("step") else items.get("_step")
        for key, value in items.items():
            out[key, step] = value
    return out


def numbers(row, prefix=""):
    for key, value in row.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and prefix + key != "step":
            yield prefix + key, value


dray("run", ROOT / "examples/clock.yaml", "--out", RUN, "--set", "steps=6")
dray("trace", RUN, "--perfetto", WORK / "trace.pftrace")
mine, theirs = of_json(), of_protobuf(WORK / "trace.pftrace")
# Times of trace.json are in microseconds with three digits: exact. Both count from the first span.
assert mine == theirs, [(mine[0] - theirs[0]).most_common(3), (theirs[0] - mine[0]).most_common(3), mine[1], theirs[1]]

subprocess.run([sys.executable, "-m", "dray.metrics", str(RUN), "--tensorboard", "--wandb", "--project", "test"], check=True,
               env=dict(os.environ, WANDB_SILENT="true"))
rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
wanted = {(key, row["step"]): value for row in rows for key, value in numbers(row)}
for name, seen in (("TensorBoard", of_tensorboard(RUN / "tensorboard")), ("Weights & Biases", of_wandb(RUN))):
    for key, value in wanted.items():
        assert key in seen, f"{name} has no {key}"
        assert abs(seen[key] - value) <= 1e-6 * max(abs(value), 1e-30), f"{name}: {key}: {seen[key]}, expected {value}"
print(f"{sum(mine[0].values())} spans and {mine[1]} flows as Perfetto reads them, {len(wanted)} numbers of {len(rows)} rows in both sinks")
