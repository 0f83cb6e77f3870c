"""Claims from Python: freed and dropped ones give their rows back at once, peers' end without a word,
one thread at a time uses a queue, and messages say what is missing."""
import gc
import subprocess
import sys
import threading
import time

from begin import needs, rng

with needs:
    import numpy as np
    import torch

from python_fixture import coordinator, dray, refused, wrong

TASKS = {"read": (["x"], []), "again": (["x"], []), "write": (["x"], ["y"])}


def check_free(queue, other):
    """The rows come back at once, uncounted (max_attempts are 2); arrays that were read stay."""
    queue.insert({"x": np.arange(4)}, "free", seal=True)

    def back():
        with other.claim("read", 4, "free", timeout=5) as batch:
            assert batch and not len(batch)  # nothing is read yet
            assert batch["x"][0].tolist() == [0, 1, 2, 3]
            batch.free()
    first = queue.claim("read", 4, "free")
    first.free()
    back()
    for framework in ("numpy", "torch"):
        claim = queue.claim("read", 4, "free", framework=framework, copy=False)
        kept = claim.ragged("x")[0]
        claim.free()
        back()  # an array that lives on holds no rows
        assert kept.tolist() == [0, 1, 2, 3]
        claim = queue.claim("read", 4, "free", framework=framework)
        del claim
        gc.collect()
        back()
        elsewhere = [queue.claim("read", 4, "free")]
        thread = threading.Thread(target=elsewhere.clear)
        thread.start()
        thread.join()
        back()
        assert kept.tolist() == [0, 1, 2, 3]
    left = queue.claim("read", 4, "free")
    left["x"]
    left.commit()
    left.free()
    queue.wait("free", "read", timeout=0)


def check_pieces(*_):
    """A row that is committed in pieces is read as one value, and its pieces with their versions."""
    tasks = {"generate": (["prompt"], ["response"]), "train": (["response"], [])}
    with dray.Queue("pieces", tasks=tasks) as queue:
        queue.insert({"prompt": np.arange(2)}, "all", seal=True)
        for version in range(6):
            with queue.claim("generate", 1, "all") as claim:
                assert claim.rows == 1
                claim.set("response", np.full(version + 1, version), [0, version + 1])
                if version != 2:
                    claim.set_tag("version", [version])
                if version < 5:
                    claim.leave_open()
        with queue.claim("train", 1, "all") as claim:
            assert len(claim["response"][0]) == 21
            assert claim.pieces("response", 0) == [(n + 1, None if n == 2 else n) for n in range(6)]
            refused("ENOENT", claim.pieces, "prompt", 0)
            wrong(IndexError, "row 1 of 1", claim.pieces, "response", 1)


def check_threads(queue, other):
    """While one thread is in the queue, others are told so."""
    begun, ended = threading.Event(), []
    queue.insert({"x": np.arange(2)}, "held", seal=True)
    held = queue.claim("read", 2, "held")

    def wait():
        begun.set()
        ended.append(refused("ETIMEDOUT", queue.claim, "read", 1, "none", timeout=1.5))
    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    time.sleep(0.3)
    assert "another thread" in refused("EBUSY", queue.status)
    assert "another thread" in refused("EBUSY", queue.close)
    thread.join()
    assert ended and queue.status()["name"] == "samples"
    held.commit()  # the close that was refused has changed nothing
    held.free()
    # Many threads at once: each call succeeds or is refused, and nothing is lost.
    queue.insert({"x": np.arange(60)}, "many", seal=True)
    rows, stop = [], threading.Event()

    def take():
        while not stop.is_set():
            try:
                with queue.claim("read", 4, "many", up_to=True, timeout=0.2) as batch:
                    found = batch["x"][0].tolist()
                rows.extend(found)
            except dray.DrayError as error:
                if error.name == "EEND":
                    stop.set()
                elif error.name not in ("EBUSY", "ETIMEDOUT"):  # others hold the last rows
                    raise
                time.sleep(0.002)
    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(rows) == set(range(60)), sorted(set(range(60)) - set(rows))


def check_empty(*_):
    """Rows without an element are tensors of the column's dtype."""
    with dray.Queue("empty", tasks=TASKS, timeout=20) as queue:
        queue.insert({"x": [np.zeros((0, 3), np.int32), np.zeros((2, 3), np.int32)]}, "p", seal=True)
        for framework in ("numpy", "torch"):
            with queue.claim("read", 1, policy="ordered", framework=framework) as batch:
                values, offsets = batch.ragged("x")
                assert list(values.shape) == [2 * int(batch.slots[0]), 3]
                assert str(values.dtype).endswith("int32") and len(offsets) == 2
            with queue.claim("again", 1, policy="ordered", framework="torch") as batch:
                assert batch["x"].dtype == torch.int32


def check_peers(queue, other):
    queue.insert({"x": np.arange(4)}, "peers", seal=True)
    options = {"policy": "lockstep", "peers": 2, "dp_size": 1, "round": 1}
    with queue.claim("read", 4, "peers", peer=0, **options) as first:
        with other.claim("read", 4, "peers", peer=1, **options) as second:
            assert second["x"][0].tolist() == first["x"][0].tolist()
    queue.wait("peers", "read", timeout=0)


def check_words(queue, other):
    """What a partition waits for; a column that no task has."""
    said = refused("EINVALID", queue.insert, {"x": ["a"], "yy": ["b"]}, "words")
    assert "no task has a column yy" in said and "'y'" in said, said
    said = refused("EINVALID", queue.insert, {"nothing": ["b"]}, "words")
    assert "no task has a column nothing" in said and "x" in said, said
    queue.insert({"x": np.arange(4)}, "words", seal=True)
    for _ in range(2):
        with queue.claim("read", 4, "words", policy="ordered") as batch:
            batch.fail("bad", rows=[1, 3])
            batch.free()
    assert queue.refill(timeout=5).partition == "words"
    for said in (refused("ETIMEDOUT", queue.wait, "words", timeout=0.01),
                 refused("ETIMEDOUT", queue.claim, "write", 4, "words", timeout=0.01)):
        assert "2 wait for another sample (refill): slots 1, 3" in said, said


def check_bulk(*_):
    """Columns and tags in one call are what was put, whatever rows a claim gets."""
    with dray.Queue("bulk", tasks=TASKS, timeout=20) as queue:
        bulk(queue)


def bulk(queue):
    count = 60
    tokens = [np.arange(rng.randrange(5), dtype=np.int32) + 100 * i for i in range(count)]
    weights = [rng.random() for _ in range(count)]
    for i in range(0, count, 6):
        queue.insert({"x": tokens[i:i + 6]}, "bulk", tags={"w": weights[i:i + 6]})
    queue.seal("bulk", count)
    for size in (1, 7, 20, 32):
        for framework in ("numpy", "torch"):
            with queue.claim("write", size, "bulk", framework=framework,
                             policy=rng.choice(["fifo", "ordered"])) as batch:
                for slot, row in zip(batch.slots, batch.list("x")):
                    assert row.tolist() == tokens[slot].tolist()
                assert batch.tag("w").tolist() == [weights[slot] for slot in batch.slots]
                assert batch.weights.tolist() == [1.0] * size
                assert np.isnan(batch.tag("none")).all() and (batch.tag("none", 3) == 3).all()
                batch.set("y", np.arange(size))
                batch.set_tag("back", batch.slots * 2)
                batch.free()
    with queue.claim("write", count, "bulk") as batch:
        batch.set("y", batch.slots)
        batch.set_tag("back", batch.slots * 2)
    with queue.claim("again", count, "bulk") as batch:
        assert batch.tag("back").tolist() == (batch.slots * 2).tolist()


def check_reads(*_):
    """A small column is one call of the library, a large one two at most, and either is as it was put;
    `copy` says who may write into it. Numbers that change are not mistaken for those before."""
    large = [np.full((1000 + i, 3), i, np.int32) for i in range(4)]
    for i, values in enumerate((np.arange(4), large, [rows[:i] for i, rows in enumerate(large)])):
        with dray.Queue(f"reads{i}", tasks=TASKS, timeout=20) as queue:
            queue.insert({"x": values[:2]}, "p")
            queue.insert({"x": values[2:]}, "p", seal=True)
            for copy in (None, False, True):
                reads(queue, values, copy, i > 0, int(i == 1 or copy is False))
    with dray.Queue("reads0") as queue:
        number = np.array(2)
        for number[...] in (2, 3):
            with queue.claim("read", number) as batch:
                assert batch.rows == number
                batch.free()
        wrong(TypeError, "integer", queue.claim, "read", 1.0)


def reads(queue, values, copy, ragged, gathers):
    calls, real = [], dray.columns.call
    with queue.claim("read", 4, policy="ordered", copy=copy) as batch:
        dray.columns.call = lambda name, *more: (calls.append(name), real(name, *more))
        try:
            found, offsets = batch["x"]
        finally:
            dray.columns.call = real
        assert calls == ["dray_batch_read"] + ["dray_batch_gather_rows"] * gathers, calls
        assert found.tolist() == (np.concatenate(values) if ragged else values).tolist()
        assert ragged == (offsets is not None)
        assert not ragged or offsets.tolist() == [0, *np.cumsum([len(v) for v in values])]
        assert found.flags.writeable == bool(copy)
        batch.free()


LEFT = """
import os, sys
sys.path.insert(0, os.path.join(os.environ["DRAY_SOURCE_DIR"], "python"))
import dray, numpy as np, torch
queue = dray.Queue("left", tasks={"read": (["x"], []), "loop": (["x"], [])})
queue.insert({"x": np.arange(8)}, "p", seal=True)
claim = queue.claim("read", 4)
array = claim["x"][0]
tensor = queue.claim("read", 4, framework="torch", copy=False)["x"]
loader = dray.StreamDataLoader("loop", ["x"], 2, "left")
batch = next(loader)
context = dray.weights.Context(role="trainer")
publisher = dray.weights.Publisher([("t", torch.ones(8))], "m", context=context)
cycle = [queue, claim, array, loader]
cycle.append(cycle)
sys.modules["kept"] = cycle
"""


def check_exit(*_):
    """A process that ends without close() says nothing, and its rows come back."""
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done
    with dray.Queue("left", timeout=20) as queue:
        with queue.claim("read", 8, timeout=20) as batch:
            assert batch.rows == 8


with coordinator():
    with dray.Queue(tasks=TASKS, timeout=20, max_attempts=2) as queue, dray.Queue(timeout=20) as other:
        for check in (check_free, check_pieces, check_threads, check_empty,
                      check_peers, check_words, check_bulk, check_reads, check_exit):
            check(queue, other)
