"""dray.Role: programs that a run starts find their part in the environment, take batches of any columns,
commit what they set, give back what an exception leaves, and end with the queue or by SIGTERM."""
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import numpy as np

from python_fixture import coordinator, dray, refused, wrong

TASKS = {"rollout": (["prompt"], ["response"]), "reward": (["prompt", "response"], ["reward"]),
         "eval": (["question"], ["found"]), "train": (["response", "reward"], [])}


def environment(**more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("DRAY_") or k in (
        "DRAY_ADDRESS", "DRAY_LIBRARY", "DRAY_SOURCE_DIR", "DRAY_PROGRAM")}
    return dict(kept, PYTHONPATH=os.path.join(os.environ["DRAY_SOURCE_DIR"], "python"), **more)


def start(program, **more):
    """A role of its own: python with the program, as `dray run` would start it."""
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], text=True, env=environment(**more),
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process, status=0):
    out, errors = process.communicate(timeout=60)
    assert process.returncode == status, (process.returncode, out, errors)
    return out + errors


def wait_for(condition, what, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def task_of(queue, task, partition="step-1"):
    found = [p for p in queue.status()["partitions"] if p["name"] == partition]
    return found[0]["tasks"][task]


def within(**variables):
    """This process's own environment, for roles in it."""
    for name in list(os.environ):
        if name.startswith("DRAY_") and name not in environment():
            del os.environ[name]
    os.environ.update(variables)


GRADE = """
    import dray, numpy as np
    with dray.Role() as role:
        for batch in role.batches(columns=["prompt", "response"], count=3):
            print(role.rank, batch.rows, flush=True)
            batch.set("reward", np.array([len(r) for r in batch.list("response")], np.float32))
"""


def filled(queue, rows=8, partition="step-1"):
    queue.insert({"prompt": [f"{i}" for i in range(rows)]}, partition, seal=True)
    with queue.claim("rollout", rows) as batch:
        batch.set("response", [np.arange(i, dtype=np.int32) for i in range(rows)])


def test_environment():
    kept = os.environ.pop("DRAY_ADDRESS")
    assert "$DRAY_ADDRESS is not set" in refused("EINVALID", dray.Role)
    assert "dray run" in refused("EINVALID", dray.Role)
    within(DRAY_ADDRESS=kept)
    with dray.Role() as role:
        assert "$DRAY_TASK is not set" in refused("EINVALID", role.batches)
        assert "$DRAY_CONFIG is not set" in refused("EINVALID", lambda: role.config)
        assert "$DRAY_RUN is not set" in refused("EINVALID", lambda: role.folder)
        wrong(ValueError, "columns: a list", role.batches, "reward", "prompt")
        wrong(ValueError, "framework: one of", role.batches, "reward", framework="jax")
        assert (role.name, role.group, role.rank, role.world, role.step) == ("role", "role", 0, 1, 0)
    within(DRAY_RANK="one")
    assert "$DRAY_RANK: a number expected, found 'one'" in refused("EINVALID", dray.Role)
    within(DRAY_RANK="0", DRAY_CONFIG="/nowhere/job.json")
    assert "/nowhere/job.json" in refused("EINVALID", dray.Role)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"limits": {"wait_seconds": 7}, "reward": {"micro_batch": 5}}, file)
        file.flush()
        within(DRAY_CONFIG=file.name, DRAY_ROLE="desk", DRAY_INSTANCE="2", DRAY_TASK="reward,eval",
               DRAY_EPOCH="3", DRAY_STEP="40", DRAY_RUN="/runs/a")
        with dray.Role() as role:
            assert (role.name, role.group, role.instance, role.epoch, role.step) == ("desk", "desk.2", 2, 3, 40)
            assert role.tasks == ["reward", "eval"] and role.timeout == 7 and str(role.folder) == "/runs/a"
            assert [o.count for o in role._options(None, None, "fifo", True, {})] == [5, 32]
            assert [o.count for o in role._options(None, {"eval": 9}, "fifo", True, {})] == [5, 9]
        with open(file.name, "w") as whole:
            json.dump({"roles": [{"name": "desk", "instances": 3}, {"name": "one", "instances": 1}]}, whole)
        names = []
        for role, instance in (("desk", "0"), ("one", "0")):
            os.environ.update(DRAY_ROLE=role, DRAY_INSTANCE=instance)
            with dray.Role() as told:
                names.append(told.group)
        assert names == ["desk.0", "one"], names
    within()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_graders():
    """Two of them; a third one that comes by itself, and one that is killed with rows in its hands."""
    with dray.Queue("graded", tasks=TASKS) as queue:
        filled(queue)
        doomed = start("""
            import dray, time
            with dray.Role() as role:
                for batch in role.batches(count=8):
                    print("has them", batch.rows, flush=True)
                    time.sleep(60)
        """, DRAY_TASK="reward", DRAY_QUEUE="graded")
        assert doomed.stdout.readline() == "has them 8\n"
        graders = [start(GRADE, DRAY_TASK="reward", DRAY_QUEUE="graded", DRAY_INSTANCE=str(i)) for i in (0, 1)]
        wait_for(lambda: queue.status()["waiters"]["claims"]["reward"] == 2, "two graders wait")
        doomed.kill()
        doomed.communicate()
        queue.wait("step-1", "reward", 30)
        with queue.claim("train", 8, policy="ordered") as batch:
            assert batch["reward"][0].tolist() == list(range(8))
        filled(queue, 100, "step-2")
        graders.append(start(GRADE, DRAY_TASK="reward", DRAY_QUEUE="graded"))
        queue.wait("step-2", "reward", 30)
        graders[0].send_signal(signal.SIGTERM)  # it waits: it ends at once, with nothing in its hands
        ended(graders[0])
        filled(queue, 9, "step-3")
        queue.wait("step-3", "reward", 30)
        queue.end()
        said = "".join(ended(grader) for grader in graders[1:])
        assert "0 3" in said, said
        assert queue.status()["tasks_out"]["reward"]["committed"] == 117


def test_exceptions():
    """A failed attempt, with the reason, with `with` and without; by break it is given back, uncounted."""
    body = """
            for batch in role.batches(count=2):
                raise ValueError("no grade for " + batch.list("prompt")[0])
    """
    with dray.Queue("failed", tasks=TASKS, max_attempts=9) as queue:
        filled(queue, 2)
        for beginning in ("with dray.Role() as role:", "role = dray.Role()\n        if True:"):
            said = ended(start(f"""
        import dray
        {beginning}{body}""", DRAY_TASK="reward", DRAY_QUEUE="failed"), 1)
            assert "ValueError: no grade for 0" in said, said
        left = start("""
            import dray
            with dray.Role() as role:
                for batch in role.batches(count=2):
                    break
                again = next(role.batches(count=2))
                assert again.rows == 2
                again.fail("not now")
        """, DRAY_TASK="reward", DRAY_QUEUE="failed")
        ended(left)
        counts = queue.status()["tasks_out"]["reward"]
        assert (counts["failed"], counts["given_back"]) == (6, 2), counts
        with queue.claim("reward", 2) as batch:
            batch.set("reward", np.ones(2, np.float32))


def test_signals():
    """SIGTERM in the body: the batch that is worked on is finished and committed, and no other begun."""
    with dray.Queue("stopped", tasks=TASKS) as queue:
        filled(queue, 4)
        role = start("""
            import dray, numpy as np, signal, os, time
            with dray.Role() as role:
                for batch in role.batches(count=2):
                    print("works", flush=True)
                    deadline = time.monotonic() + 30
                    while not role.stopping and time.monotonic() < deadline:
                        time.sleep(0.01)
                    batch.set("reward", np.ones(batch.rows, np.float32))
            print("ended")
        """, DRAY_TASK="reward", DRAY_QUEUE="stopped")
        assert role.stdout.readline() == "works\n"
        role.send_signal(signal.SIGTERM)
        assert ended(role) == "ended\n"
        assert task_of(queue, "reward")["committed"] == 2 and task_of(queue, "reward")["ready"] == 2
        # Many times while it waits, and is given rows: none is lost, whenever it comes.
        for i in range(8):
            filled(queue, 1, f"more-{i}")
            role = start(GRADE, DRAY_TASK="reward", DRAY_QUEUE="stopped")
            time.sleep(0.12 + 0.02 * i)
            role.send_signal(signal.SIGTERM)
            role.communicate(timeout=60)
            assert role.returncode in (0, -signal.SIGTERM), role.returncode
        queue.end()
        ended(start(GRADE, DRAY_TASK="reward", DRAY_QUEUE="stopped"))
        for i in range(8):
            queue.wait(f"more-{i}", "reward", 0)


def clear_when_done():
    """What a run's driver does: rows that lack what a task needs keep it waiting until they are cleared."""
    with dray.Queue("kinds") as queue:
        queue.wait("step-1", "train", 30)
        queue.wait("eval-1", "eval", 30)
        queue.clear("step-1")
        queue.clear("eval-1")


def test_tasks():
    """One program for several tasks; columns of any kind; what it does not need is refused by name."""
    routed = [np.arange(n * 6, dtype=np.int16).reshape(n, 3, 2) for n in (4, 0, 7, 1)]
    images = [bytes([i]) * (1 << (4 * i)) for i in range(4)]
    with dray.Queue("kinds", tasks={"look": (["image", "routed", "name", "score"], ["routes", "thumbs"]),
                                    "eval": (["question"], ["found"]),
                                    "train": (["routes", "thumbs"], [])}) as queue:
        queue.insert({"image": images, "routed": routed, "name": ["a", "", "ä", "b"],
                      "score": np.arange(4.0)}, "step-1", seal=True)
        queue.insert({"question": ["why?"]}, "eval-1", seal=True)
        queue.end()
        finisher = threading.Thread(target=clear_when_done)
        finisher.start()
        within(DRAY_QUEUE="kinds", DRAY_TASK="look,eval,train")
        seen = []
        with dray.Role() as role:
            for batch in role.batches():
                seen.append((batch.task, batch.partition, batch.rows))
                if batch.task == "eval":
                    batch.set("found", [b"because"])
                    assert "column image" in refused("ENOENT", lambda: batch["image"])
                elif batch.task == "look":
                    values, offsets = batch["routed"]
                    assert values.dtype == np.int16 and values.shape == (12, 3, 2) and \
                        offsets.tolist() == [0, 4, 4, 11, 12], (values.shape, offsets)
                    assert all((a == b).all() for a, b in zip(batch.list("routed"), routed))
                    assert batch.list("image") == images and batch.list("name") == ["a", "", "ä", "b"]
                    assert batch.list("score") == [0, 1, 2, 3]
                    batch.set("routes", batch.list("routed"))
                    batch.set("thumbs", [image[:16] for image in batch.list("image")])
                    batch.set_tag("tokens", [1, 2, 3, 4])
                else:
                    assert np.asarray(batch["routes"][0]).tolist() == np.concatenate(routed).tolist()
                    assert batch.list("thumbs") == [image[:16] for image in images]
                    assert batch.tag("tokens").tolist() == [1, 2, 3, 4]
        assert sorted(seen) == [("eval", "eval-1", 1), ("look", "step-1", 4), ("train", "step-1", 4)], seen
        finisher.join()
        within(DRAY_QUEUE="kinds", DRAY_TASK="trian")
        with dray.Role() as role:
            assert "did you mean 'train'" in refused("ENOENT", next, role.batches())
    within()


def test_superseded():
    """Rows that were cleared, or taken back, while they were worked on: left out, counted, no error."""
    with dray.Queue("cleared", tasks=TASKS) as queue:
        filled(queue, 2)
        filled(queue, 2, "step-2")
        queue.end()
        within(DRAY_QUEUE="cleared", DRAY_TASK="reward")
        with dray.Role() as role:
            for batch in role.batches(count=2):
                batch.set("reward", np.ones(2, np.float32))
                if batch.partition == "step-1":
                    queue.clear("step-1")
            assert role.lost == 2
        queue.wait("step-2", "reward", 0)
    within()


def test_forgotten():
    """A role that does not set what its task writes is told so."""
    with dray.Queue("forgotten", tasks=TASKS) as queue:
        filled(queue, 2)
        within(DRAY_QUEUE="forgotten", DRAY_TASK="reward")
        with dray.Role() as role:
            assert "column reward was not set" in refused("EINVALID", list, role.batches())
    within()


def test_leases():
    """Who shares a device waits for its turn; the turn of one that is killed is the next one's at once."""
    program = """
        import dray, time
        with dray.Role() as role:
            with role.lease() as lease:
                print("mine", lease.number, flush=True)
                while not lease.check():
                    time.sleep(0.01)
                print("wanted", flush=True)
                time.sleep(60)
    """
    within()
    with dray.Role() as role:
        with role.lease() as none:  # it shares nothing
            assert none is None
    within(DRAY_LEASES="engine/cpu:0,engine+trainer/cpu:1")
    doomed = start(program, DRAY_LEASES="engine+trainer/cpu:1")
    assert doomed.stdout.readline().startswith("mine")
    with dray.Role() as role:
        waiter = threading.Timer(0.1, lambda: (doomed.stdout.readline(), doomed.kill()))
        waiter.start()
        began = time.monotonic()
        with role.lease() as lease:
            assert time.monotonic() - began > 0.05 and lease.number > 0
            message = refused("EBUSY", dray.Lease, role.context(), "engine/cpu:0", 0)
            assert "this session holds it" in message, message
            with dray.weights.Context() as other:
                assert "has held it for" in refused("ETIMEDOUT", dray.Lease, other, ["x", "engine/cpu:0"], 0)
        waiter.join()
        with dray.Lease(role.context(), "engine/cpu:0", 0) as again:
            assert again.number > lease.number
            refused("ECLOSED", lease.check)
        wrong(ValueError, "NUL", dray.Lease, role.context(), "x\0y")
        refused("EINVALID", dray.Lease, role.context(), [])
    doomed.wait()
    within()


def test_reports():
    with dray.Queue("told", tasks=TASKS) as queue:
        within(DRAY_ROLE="grader", DRAY_INSTANCE="1", DRAY_QUEUE="told")
        with dray.Role() as role:
            role.report("note", value=np.float32(0.5), worst=float("inf"), many=[1, np.int64(2)], text="ä")
            status = json.loads(subprocess.run([os.environ["DRAY_PROGRAM"], "status", "--json"],
                                               capture_output=True, text=True).stdout)
            assert status["reports"]["posted"] > 0, status["reports"]
            names = [session["name"] for session in status["sessions"]]
            assert "grader.1/0" in names, names
            assert role.engines() == []
            refused("EINVALID", role.report, "")
    within()


with coordinator():
    for test in [value for name, value in list(globals().items()) if name.startswith("test_")]:
        begin = time.monotonic()
        test()
        print(f"{test.__name__}: {time.monotonic() - begin:.2f} s", flush=True)
print("ok")
