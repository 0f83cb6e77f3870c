"""dray.Role.steps and roles of several ranks: two ranks of a trainer share what rank 0 claims, whole groups
to each, publish versions, commit provisionally, and save the queue's cursor; killed in a step and resumed,
each row is trained once. A step that the queue's end cuts gives its rows back."""
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

import numpy as np

from begin import needs

from python_fixture import coordinator, dray, refused, wrong

with needs:
    import torch

ROWS, GROUP = 12, 2
TRAINER = """
    import json, os, sys, torch, torch.distributed as dist
    import dray
    dist.init_process_group("gloo")
    model = torch.nn.Linear(2, 1)
    torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
    folder = sys.argv[1]

    def save(number, files):
        if role.rank == 0:
            versions = [v["version"] for v in json.loads(os.popen("$DRAY_PROGRAM status --json").read())["versions"]]
            tasks = [p["tasks"]["train"] for p in role.queue.status()["partitions"]]
            with open(f"{folder}/{number}.json", "w") as file:
                json.dump({"versions": versions, "taken": sum(t["taken"] for t in tasks)}, file)
            for name, data in files.items():
                with open(f"{folder}/{number}.{name}", "wb") as file:
                    file.write(data)
        dist.barrier()

    with dray.Role(timeout=20) as role:
        publisher = role.publisher(model)
        for step in role.steps(publisher, ["response"], rows=%d, micro=2, last=3, every=1, policy="group",
                               save=save):
            for batch in step:
                values, offsets = batch.ragged("response")
                assert (batch.groups[::2] == batch.groups[1::2]).all(), batch.groups
                print(json.dumps([step.number, batch.partition, batch.slots.tolist(), batch.weights.tolist(),
                                  values.tolist()]), flush=True)
                if os.environ.get("KILL") == f"{role.rank}:{step.number}":
                    os.kill(os.getpid(), 9)
            publisher.wait()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 1
            step.report(loss=float("nan"))
    print("ended", flush=True)
""" % ROWS


def start(folder, *, step=0, kill="", **more):
    """Both ranks, as a run would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = dict(os.environ, DRAY_QUEUE="steps", DRAY_TASK="train", DRAY_ROLE="trainer", DRAY_STEP=str(step),
                  WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, KILL=kill, OMP_NUM_THREADS="1",
                  PYTHONPATH=os.path.join(os.environ["DRAY_SOURCE_DIR"], "python"))
    shared.update(more)
    return [subprocess.Popen([sys.executable, "-c", textwrap.dedent(TRAINER), folder], text=True,
                             env=dict(shared, RANK=str(rank), DRAY_RANK=str(rank)), stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE) for rank in range(2)]


def finish(ranks, kill=False):
    """What they said of their batches, and how they ended."""
    said, codes = [], []
    for rank in ranks:
        out, errors = rank.communicate(timeout=90)
        codes.append(rank.returncode)
        said.append(out.splitlines())
        assert kill or rank.returncode == 0, errors
    return said, codes


def trained(said):
    """{step: slots} of all ranks together; padding does not count."""
    found = {}
    for lines in said:
        for line in lines:
            if line.startswith("["):
                step, partition, slots, weights, values = json.loads(line)
                assert partition == f"step-{step}", line
                found.setdefault(step, []).extend(s for s, w in zip(slots, weights) if w)
    return {step: sorted(slots) for step, slots in found.items()}


def roll_out(queue, step, rows=ROWS):
    name = f"step-{step}"
    queue.insert({"prompt": [f"{i}" for i in range(ROWS // GROUP)]}, name, rows=ROWS, group_size=GROUP,
                 once_per_group=True, seal=True)
    with queue.claim("rollout", rows, partition=name, policy="ordered") as batch:
        batch.set("response", [np.full(1 + slot, step, np.int32) for slot in batch.slots])
        batch.set_tag("version", [step - 1] * rows)


def state(folder, number):
    with open(f"{folder}/{number}.json") as file:
        return json.load(file)


def subscribed(context, version):
    model = torch.nn.Linear(2, 1)
    with dray.weights.Subscriber(model, "policy", context=context, group="engine") as subscriber:
        assert subscriber.update(min_version=version)["version"] == version
    return model.weight.detach().flatten().tolist()


def test_killed_and_resumed(folder, queue):
    roll_out(queue, 1)
    roll_out(queue, 2)
    ranks = start(folder, kill="1:2")
    with dray.weights.Context(role="engine") as context:
        assert subscribed(context, 0)[0] in (0, -1)
    said, codes = finish(ranks, kill=True)
    assert codes[1] == -signal.SIGKILL and codes[0] != 0, codes
    assert trained(said)[1] == list(range(ROWS)), said
    assert sum(line.startswith("[1, ") for line in said[0]) == 3, said  # 12 rows, 2 for each rank at once
    assert not os.path.exists(f"{folder}/2.json"), "step 2 was not finished, and is saved"
    assert 1 in state(folder, 1)["versions"] and state(folder, 1)["taken"] == 0, state(folder, 1)
    with open(f"{folder}/1.queue.cursor", "rb") as file:
        assert queue.resume(file.read()) == 1


def test_end_in_a_step(folder, queue):
    """Goes on from step 1; step 3 does not become whole: its rows are given back, nothing of it is saved."""
    roll_out(queue, 3, rows=ROWS - GROUP)
    ranks = start(folder, step=1)
    lines = [[], []]
    for rank, said in zip(ranks, lines):
        while not (said and said[-1].startswith("[3, ")):
            said.append(rank.stdout.readline())
            assert said[-1], rank.stderr.read()
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    said, _ = finish(ranks)
    assert [rest[-1] for rest in said] == ["ended"] * 2, said
    assert trained(lines)[2] == list(range(ROWS)), lines
    assert sorted(os.listdir(folder)) == [f"{n}.{name}" for n in range(3) for name in ("dray.json", "json", "queue.cursor")]
    tasks = {p["name"]: p["tasks"]["train"] for p in queue.status()["partitions"]}
    assert [tasks[f"step-{step}"]["committed"] for step in (1, 2, 3)] == [ROWS, ROWS, 0], tasks
    assert (tasks["step-3"]["taken"], tasks["step-3"]["ready"]) == (0, ROWS - GROUP), tasks
    assert sum(p["uncovered"] for p in queue.status()["partitions"]) == 0


def soon(condition, what, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_checkpoints_wait_for_rows(folder, queue):
    """A run goes on from its newest checkpoint: there is none of a step whose row is not in the metrics yet."""
    for step in (1, 2, 3):
        roll_out(queue, step)
    with open(f"{folder}/metrics.jsonl", "w") as rows:
        rows.write('{"step":0}\n')
    ranks = start(folder, DRAY_QUEUE="waits", DRAY_RUN=folder)
    for step, file in ((1, "metrics.jsonl"), (2, ".metrics.pending"), (3, "metrics.jsonl")):
        soon(lambda: {p["name"]: p["tasks"]["train"]["committed"] for p in queue.status()["partitions"]
                      }[f"step-{step}"] == ROWS, f"step {step} is not trained")
        time.sleep(0.3)
        assert not os.path.exists(f"{folder}/{step}.json"), f"step {step} is saved, and has no row"
        with open(f"{folder}/{file}", "a") as rows:
            rows.write(json.dumps({"step": step}) + "\n")
        soon(lambda: os.path.exists(f"{folder}/{step}.json"), f"step {step} has a row, and is not saved")
    finish(ranks)


class Nobody:
    """A publisher whose versions nobody takes."""

    def publish(self, version):
        pass


def configured(folder, queue, **rules):
    """As `dray run` writes it down."""
    with open(f"{folder}/config.json", "w") as file:
        json.dump({"name": "steps", "seed": 3, "steps": 9, "queue": {"durability": "none"}, "rules": dict(
            {"oldest": 1, "newest": 1, "open": 1, "kept": 1, "last": 2, "rows": 4, "group": 2, "tagged": 1},
            **rules)}, file)
    os.environ.update(DRAY_QUEUE=queue, DRAY_TASK="train", DRAY_RUN=folder, DRAY_CONFIG=f"{folder}/config.json",
                      DRAY_STEP="0")


def insert(queue, step, rows):
    queue.insert({"prompt": ["x"] * (rows // GROUP)}, f"step-{step:06d}", rows=rows, group_size=GROUP,
                 once_per_group=True, tags={"step": step}, seal=True)


def answer(queue, step, rows, version):
    """The first rows of the step's that nobody has claimed."""
    with queue.claim("rollout", rows, partition=f"step-{step:06d}", policy="ordered") as batch:
        batch.set("response", [np.full(1, step, np.int32)] * rows)
        batch.set_tag("version", [version] * rows)


def test_first_complete(folder, queue):
    """Whole groups of whichever step, first complete first; the checkpoint says which, and a run that goes on leaves
    them out."""
    configured(folder, "late", oldest=2, open=4, first_complete=1)
    for step in (1, 2):
        insert(queue, step, 4)
    answer(queue, 2, 2, 0)
    answer(queue, 1, 3, 0)
    cards, seen = [], []
    with dray.Role(timeout=20) as role:
        for step in role.steps(Nobody(), ["response"], micro=4, part=2, every=1, framework="numpy",
                               save=lambda number, files: cards.append(json.loads(files["dray.json"]))):
            for batch in step:
                seen.append((step.number, batch.partition, batch.slots.tolist(), step.due))
                if len(seen) == 2:  # those that are late
                    answer(queue, 1, 1, 0)
                    answer(queue, 2, 2, 1)
            step.report()
            if step.number == 2:
                queue.end()
    assert sorted(seen[:2]) == [(1, "step-000001", [0, 1], True), (1, "step-000002", [0, 1], True)], seen
    assert sorted(seen[2:]) == [(2, "step-000001", [2, 3], True), (2, "step-000002", [2, 3], True)], seen
    trained = [{one["step"]: one["trained"] for one in card["feed"]["steps"]} for card in cards]
    assert trained == [{}, {1: [0], 2: [0]}, {1: [0, 1], 2: [0, 1]}], cards
    assert [(card["step"], card["weight_version"]) for card in cards] == [(0, 0), (1, 1), (2, 2)], cards
    with open(f"{folder}/feed.json", "w") as file:  # as `dray run --resume` writes it for step 1
        json.dump({"first": 1, "steps": [{"step": 1, "trained": [0], "holds": [1]}]}, file)
    configured(folder, "later", oldest=2, open=4, first_complete=1, last=1)
    with dray.Queue("later", tasks=TASKS, provisional=["train"]) as later, dray.Role(timeout=20) as role:
        for step, rows in ((1, 2), (2, 4)):
            insert(later, step, rows)
            answer(later, step, rows, 0)
        later.end()
        del cards[:]
        for step in role.steps(Nobody(), micro=2, part=2, every=1, framework="numpy",
                               save=lambda number, files: cards.append(json.loads(files["dray.json"]))):
            assert len(list(step)) == 2
    trained = {one["step"]: one["trained"] for one in cards[-1]["feed"]["steps"]}
    assert trained == {1: [0, 1], 2: [0]}, cards


def test_other_versions(folder, queue):
    """Samples of a version that the step may not have are refused, whoever made them."""
    configured(folder, "wrong", oldest=2, newest=2, open=2, exact=1)
    insert(queue, 1, 4)
    answer(queue, 1, 4, 1)
    with dray.Role(timeout=20) as role:
        wrong(dray.DrayError, "a sample of step 1 is of version 1: its schedule expects 0 to 0", next,
              role.steps(Nobody(), micro=4, framework="numpy"))


def test_kept_versions(folder, queue):
    """Where the newest two are kept, an engine gets the older one, also in a run that goes on."""
    configured(folder, "kept", oldest=2, newest=2, open=2, kept=2, exact=1)
    os.environ["DRAY_TASK"] = "rollout"
    for step in (2, 3):
        insert(queue, step, 2)
    model, engine = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    with dray.Role(timeout=20) as role:
        publisher = role.publisher(model)
        for version in (0, 1):
            torch.nn.init.constant_(model.weight, version)
            publisher.publish(version)
        os.makedirs(f"{folder}/checkpoints/step-000002")
        dray.checkpoint.save(f"{folder}/checkpoints/step-000002", 0, publisher.previous(2)["previous"])
        os.rename(f"{folder}/checkpoints/step-000002/step-000000", f"{folder}/checkpoints/step-000002/previous")
        weights, taken = role.weights(engine), []
        for batch in role.batches(count=2):
            taken.append((int(batch.tag("step")[0]), weights.take(batch), float(engine.weight.detach()[0, 0])))
            if len(taken) == 2:
                break
            batch.set("response", [np.zeros(1, np.int32)] * batch.rows)
        assert taken == [(2, 0, 0.0), (3, 1, 1.0)], taken
        publisher.close()
    with dray.Role(timeout=20) as role:
        publisher = role.publisher(torch.nn.Linear(2, 1))
        publisher.restore(pathlib.Path(folder) / "checkpoints", 2)
        batch = role.queue.claim("rollout", 2, partition="step-000003")
        assert role.weights(engine).take(batch) == 1 and float(engine.weight.detach()[0, 0]) == 1.0


def test_kept_deltas(folder, queue):
    """Where the newest two are kept, they come without deltas: both of the engine's subscribers write the same memory."""
    configured(folder, "deltas", oldest=2, newest=2, open=2, kept=2, exact=1)
    model, engine = torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)
    os.environ["DRAY_DATA_ADDRESS"] = f"unix:{folder}/data"
    with dray.Role(timeout=20) as role:
        publisher = role.publisher(model, delta=True, delta_dtype=torch.float32, snapshot=True)
        # What other hosts read comes with deltas.
        os.environ.update(DRAY_HOST="elsewhere", DRAY_DATA_ADDRESS=f"unix:{folder}/elsewhere")
        weights = role.weights(engine)
        del os.environ["DRAY_HOST"], os.environ["DRAY_DATA_ADDRESS"]
        for version in range(6):
            with torch.no_grad():
                model.weight[version] += 1
            publisher.publish(version)
            report = weights.update(version)
            assert torch.equal(engine.weight, model.weight) and report["delta_bytes"] == 0, report
        publisher.close()


def test_other_hosts(folder):
    """A trainer that does not reach the run's folder, or is to save samples from there, is told so before it starts."""
    def start(**rules):
        with dray.Role() as role:
            return role.steps(Nobody(), rows=4, micro=4, last=2, every=1, framework="numpy", **rules)

    def told(durability, *parts, **rules):
        with open(f"{folder}/config.json") as file:
            config = json.load(file)
        config["queue"]["durability"] = durability
        with open(f"{folder}/config.json", "w") as file:
            json.dump(config, file)
        said = refused("EUNSUPPORTED", start, **rules)
        assert all(part in said for part in parts), said

    def save(number, files):
        raise AssertionError("nothing is saved")

    here, rows = os.environ["DRAY_ADDRESS"], pathlib.Path(folder, "metrics.jsonl")
    rows.unlink(missing_ok=True)
    configured(folder, "far")
    os.environ["DRAY_ADDRESS"] = "tcp:127.0.0.1:9"
    told("none", "metrics.jsonl", "--shared", save=save)
    start()
    rows.touch()
    start(save=save)
    told("checkpoint", "queue.durability", save=save)
    rows.unlink()
    configured(folder, "far", oldest=2, open=4, first_complete=1)
    told("none", "--shared")
    os.environ["DRAY_ADDRESS"] = here


def test_misused(queue):
    os.environ.update(DRAY_QUEUE="steps", DRAY_TASK="train")
    with dray.Role() as role:
        wrong(dray.DrayError, "$DRAY_CONFIG is not set", role.steps, None)
        wrong(TypeError, "save: a function", role.steps, None, rows=1, micro=1, last=1, save="folder")
    os.environ["WORLD_SIZE"] = "2"
    with dray.Role() as role:
        wrong(RuntimeError, "init_process_group", next, role.batches())
    del os.environ["WORLD_SIZE"]


TASKS = {"rollout": (["prompt"], ["response"]), "train": (["response"], [])}
with coordinator(), tempfile.TemporaryDirectory() as folder, dray.Queue(
        "steps", tasks=TASKS, provisional=["train"]) as queue:
    test_killed_and_resumed(folder, queue)
    test_end_in_a_step(folder, queue)
    test_misused(queue)
    with tempfile.TemporaryDirectory() as run, dray.Queue("waits", tasks=TASKS, provisional=["train"]) as waits:
        test_checkpoints_wait_for_rows(run, waits)
    with tempfile.TemporaryDirectory() as run:
        test_other_hosts(run)
    for test, name in ((test_first_complete, "late"), (test_other_versions, "wrong"), (test_kept_versions, "kept"),
                       (test_kept_deltas, "deltas")):
        with tempfile.TemporaryDirectory() as run, dray.Queue(name, tasks=TASKS, provisional=["train"]) as own:
            test(run, own)
print("ok")
