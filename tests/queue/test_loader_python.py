"""StreamDataLoader against numpy and torch: values, offsets and dtypes as they were put; nothing
copied where rows follow each other; arrays that outlive their batch; balanced ranks in lockstep."""
import collections
import json
import os
import subprocess
import sys
import threading

from begin import needs, rng

with needs:
    import numpy as np
    import torch

from python_fixture import coordinator, dray, refused, wrong

program = os.environ["DRAY_PROGRAM"]
ROWS, CAP = 61, 96
tokens = [[rng.randrange(-2**31, 2**31) for _ in range(rng.randrange(1, 30))] for _ in range(ROWS)]
scores = [rng.uniform(-1e9, 1e9) for _ in range(ROWS)]


without = subprocess.run([sys.executable, "-c", "import dray; dray.version()"], capture_output=True,
                         text=True, env=dict(os.environ, DRAY_LIBRARY="nowhere.so", PYTHONPATH=os.path.join(os.environ["DRAY_SOURCE_DIR"], "python")))
assert "nowhere.so" in without.stderr and "$DRAY_LIBRARY" in without.stderr, without.stderr


def must(*arguments, **more):
    done = subprocess.run([program, "queue", *arguments], capture_output=True, text=True, timeout=60,
                          **more)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout


def insert(partition):
    rows = "\n".join(json.dumps({"tokens": t, "score": s}) for t, s in zip(tokens, scores))
    must("insert", "-p", partition, "-d", "tokens=i32", "--seal", input=rows)


def rollout(copy):
    """Reads tokens, writes twice of them as torch's bf16 (ragged) and their sum (fixed)."""
    kept, order = [], []
    with dray.StreamDataLoader("rollout", ["tokens", "score"], 8, partition="0", ahead=2, copy=copy,
                               timeout=20) as loader:
        for batch in loader:
            values, offsets = batch["tokens"]
            assert values.dtype == np.int32 and offsets.dtype == np.int64
            assert values.flags.writeable == copy
            assert batch["score"][1] is None and batch["score"][0].shape == (batch.rows,)
            kept.append((batch["tokens"], batch["score"][0], batch.slots))
            halves = torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16)
            batch.set("halves", halves, offsets)
            batch.set("sums", np.add.reduceat(values.astype(np.int64), offsets[:-1]).reshape(-1, 1))
            batch.set_tag("tokens", np.diff(offsets))
            order.extend(batch.slots.tolist())
        counts = loader.counts()
        assert counts["rows"] == ROWS and counts["lost"] == 0, counts
        assert counts["committed"] == counts["batches"] == 8, counts
    assert sorted(order) == list(range(ROWS))
    return kept


def same(kept):
    for (values, offsets), score, slots in kept:
        for i, slot in enumerate(slots):
            assert values[offsets[i]:offsets[i + 1]].tolist() == tokens[slot]
            assert score[i] == scores[slot]


def rank_of(rank, seen, sums):
    with dray.StreamDataLoader("actor", ["halves", "sums", "tokens"], 20, partition="0", micro=True,
                               policy="lockstep", dp_rank=rank, dp_size=2, token_cap=CAP,
                               framework="torch", timeout=20) as loader:
        while True:
            micros = loader.num_microbatches()
            if not micros:
                break
            seen[rank].append(micros)
            for i in range(micros):  # as forward_backward_func takes them
                batch = next(loader)
                assert batch.micro == i and batch.micros == micros
                halves, offsets = batch.ragged("halves")
                assert halves.dtype == torch.bfloat16 and offsets.dtype == torch.int64
                assert int(offsets[-1]) <= CAP
                assert batch["sums"].shape == (batch.rows, 1)
                for k, slot in enumerate(batch.slots.tolist()):
                    expected = torch.tensor(tokens[slot], dtype=torch.float32).to(torch.bfloat16)
                    assert torch.equal(halves[offsets[k]:offsets[k + 1]], expected)
                    assert int(batch["sums"][k, 0]) == sum(tokens[slot])
                    if batch.weights[k]:
                        sums.append(slot)
                assert np.array_equal(batch.tag("tokens"), np.diff(offsets.numpy()))
        loader.flush()


def micro_batches():
    """Those of a batch become one column, or are refused: none is read as if it were like the first."""
    def raises(part, batch, values, *offsets):
        try:
            batch.set("y", values, *offsets)
        except ValueError as error:
            assert part in str(error), (part, error)
            return
        raise AssertionError(f"not refused: {part}")

    for kinds in (("array", "list"), ("list", "array"), ("array", "array")):
        name = "-".join(kinds)
        with dray.Queue(name, tasks={"write": (["x"], ["y"]), "read": (["x", "y"], [])}, timeout=20) as queue:
            queue.insert({"x": np.arange(4)}, "p", tags={"tokens": [5] * 4}, seal=True)
            sets = {}
            with dray.StreamDataLoader("write", ["x"], 4, name, "p", micro=True, policy="token_balanced", token_cap=10,
                                       timeout=20) as loader:
                for batch, kind in zip(loader, kinds):
                    assert (batch.micros, batch.rows) == (2, 2)
                    rows = [np.full(4 if kind == "array" else 3 + x, x, np.float32) for x in batch["x"][0]]
                    raises("1 rows, not for 2", batch, rows[:1])
                    raises("3 rows, not for 2", batch, np.zeros(6), [0, 2, 4, 6])
                    if batch.micro:
                        raises("found F64 [4]", batch, np.zeros((2, 4)))
                        raises("found F32 [4, 1]", batch, np.zeros((2, 4, 1), np.float32))
                        raises("found U8 [?] strings", batch, ["a", "b"])
                    if batch.micro and "list" not in kinds:
                        raises("rows of F32 [4] expected, as the others of the batch, found F32 [5]", batch,
                               np.zeros((2, 5), np.float32))
                    batch.set("y", np.stack(rows) if kind == "array" else rows)
                    sets.update(zip(batch["x"][0], rows))
            with queue.claim("read", 4, "p") as batch:
                for x, row in zip(batch["x"][0], batch.list("y")):
                    assert np.array_equal(row, sets[x]), (x, row)


def memory_used_again():
    """What is set is what the arrays held by then: the loop may write to them at once."""
    with dray.Queue("again", tasks={"write": (["x"], ["y", "z"]), "read": (["x", "y", "z"], [])}, timeout=20) as queue:
        for micro, more in ((False, {}), (True, dict(micro=True, policy="token_balanced", token_cap=10))):
            partition, y = f"micro-{micro}", np.zeros(4, np.float32)
            z, ends = torch.zeros(8, dtype=torch.bfloat16), np.zeros(5, np.uint64)
            queue.insert({"x": np.arange(4)}, partition, tags={"tokens": [5] * 4}, seal=True)
            with dray.StreamDataLoader("write", ["x"], 4, "again", partition, timeout=20, **more) as loader:
                for batch in loader:
                    n = batch.rows
                    assert n == (2 if micro else 4)
                    y[:n], ends[:n + 1] = batch["x"][0], 2 * np.arange(n + 1)
                    z[:2 * n] = torch.from_numpy(y[:n]).repeat_interleave(2)
                    batch.set("y", y[:n])
                    batch.set("z", z[:2 * n], ends[:n + 1])
                    y[:], z[:], ends[:] = -1, -1, 0
            with queue.claim("read", 4, partition=partition, framework="torch") as claim:
                assert torch.equal(claim["y"], claim["x"].float()), (micro, claim["y"])
                assert torch.equal(claim["z"].values().float(), claim["y"].repeat_interleave(2)), (micro, claim["z"].values())


def micro_batches_that_fail():
    """One of them, with its output set or not, is an attempt more for its rows; the others' outputs are committed."""
    for fails, kind in ((0, "array"), (1, "array"), (0, "list"), (1, "list"), ((0, 1), "array")):
        for sets in (False, True):
            name = f"fail-{fails}-{kind}-{sets}".translate({ord(c): "_" for c in "(), "})
            with dray.Queue(name, tasks={"write": (["x"], ["y"]), "read": (["x", "y"], [])}, timeout=20) as queue:
                queue.insert({"x": np.arange(4)}, "p", tags={"tokens": [5] * 4}, seal=True)
                attempts = collections.Counter()
                with dray.StreamDataLoader("write", ["x"], 4, name, "p", micro=True, policy="token_balanced",
                                           token_cap=10, timeout=20) as loader:
                    for turn, batch in enumerate(loader):
                        attempts.update(batch["x"][0].tolist())
                        bad = turn < 2 and batch.micro in np.atleast_1d(fails)
                        if sets or not bad:
                            rows = [np.full(1 if kind == "array" else 1 + x, -1 if bad else x, np.int64)
                                    for x in batch["x"][0]]
                            batch.set("y", np.stack(rows) if kind == "array" else rows)
                        if bad:
                            batch.fail("not yet")
                assert sorted(attempts.values()) == ([2] * 4 if fails == (0, 1) else [1, 1, 2, 2]), (name, attempts)
                with queue.claim("read", 4, "p") as batch:
                    for x, row in zip(batch["x"][0], batch.list("y")):
                        assert np.array_equal(row, [x] * (1 if kind == "array" else 1 + x)), (name, x, row)


def an_output_that_is_missing():
    """Of one micro-batch of several: the loop keeps the batch until it has failed what lacks it, and what was set is never
    another batch's."""
    with dray.Queue("missing", tasks={"write": (["x"], ["y"]), "read": (["x", "y"], [])}, timeout=20) as queue:
        queue.insert({"x": np.arange(8)}, "p", tags={"tokens": [5] * 8}, seal=True)
        with dray.StreamDataLoader("write", ["x"], 4, "missing", "p", micro=True, policy="token_balanced", token_cap=10,
                                   timeout=20) as loader:
            first = next(loader)
            first.set("y", first["x"][0])
            last = next(loader)
            for _ in range(2):
                wrong(ValueError, "y is set for micro-batches [0] of 2", next, loader)
            last.fail("its y is missing")
            for batch in loader:
                batch.set("y", batch["x"][0])
        with queue.claim("read", 8, "p") as batch:
            assert np.array_equal(batch["x"][0], batch["y"][0]), (batch["x"][0], batch["y"][0])


def an_output_that_is_set_again():
    """After a hand-in that was refused for another column: what was set last is read, not what the refused one had joined."""
    for kind in ("array", "list"):
        def z(x):
            return x.reshape(-1, 1) if kind == "array" else [x[:1], x[1:]]

        name = f"again-{kind}"
        with dray.Queue(name, tasks={"write": (["x"], ["y", "z"]), "read": (["x", "y", "z"], [])}, timeout=20) as queue:
            queue.insert({"x": np.arange(4)}, "p", tags={"tokens": [5] * 4}, seal=True)
            with dray.StreamDataLoader("write", ["x"], 4, name, "p", micro=True, policy="token_balanced", token_cap=10,
                                       timeout=20) as loader:
                first, x = next(loader), {}
                x[0] = first["x"][0]
                first.set("y", z(x[0]))
                first.set("z", z(x[0]))
                last = next(loader)
                x[1] = last["x"][0]
                last.set("y", z(x[1] - 100))
                wrong(ValueError, "z is set for micro-batches [0] of 2", loader.flush)
                last.set("y", z(x[1]))
                last.set("z", z(x[1]))
            with queue.claim("read", 4, "p") as batch:
                for name in ("y", "z"):
                    assert np.array_equal(batch["x"][0], np.concatenate(batch.list(name))), (kind, name, batch.list(name))


def a_batch_that_cannot_be_read():
    """Its rows are a failed attempt, and come again: they do not stay with the loader, which never handed them over."""
    tasks = {"read": (["x"], []), "write": (["x"], ["y"])}
    with dray.Queue("unread", tasks=tasks, max_attempts=20, timeout=20) as queue:
        queue.insert({"x": np.arange(4)}, "p", tags={"tokens": [5] * 4}, seal=True)
        for task, more in (("read", {}), ("write", dict(micro=True, policy="token_balanced", token_cap=10))):
            with dray.StreamDataLoader(task, ["x", "nothing"], 4, "unread", "p", timeout=5, **more) as loader:
                for _ in range(3):
                    refused("ENOENT", next, loader)
            with queue.claim(task, 4, "p") as again:
                assert sorted(again["x"][0]) == [0, 1, 2, 3]
                if task == "write":
                    again.set("y", again["x"][0])


def in_thread(errors, function, *arguments):
    def run():
        try:
            function(*arguments)
        except BaseException as error:  # noqa: B902
            errors.append(error)
            raise
    thread = threading.Thread(target=run)
    thread.start()
    return thread


with coordinator():
    must("open", "--task", "rollout:tokens,score>halves,sums",
         "--task", "actor:halves,sums,tokens>")
    insert("0")
    kept = rollout(copy=False)
    same(kept)

    # Two ranks in lockstep, each in its thread: equal counts, each row once.
    seen, done, errors = {0: [], 1: []}, [], []
    threads = [in_thread(errors, rank_of, rank, seen, done) for rank in range(2)]
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert seen[0] == seen[1] and len(seen[0]) == 4, seen
    assert sorted(done) == list(range(ROWS))
    must("wait", "-p", "0", "-w", "0")

    # The arrays are as they were, although all is committed, cleared and written over.
    must("clear", "-p", "0")
    insert("1")
    same(kept)
    del kept

    # On request they are copies, which may be written; a failed batch comes again.
    with dray.StreamDataLoader("rollout", ["tokens"], 4, partition="1", copy=True,
                               timeout=20) as loader:
        batch = next(loader)
        batch["tokens"][0][:] = 7
        slots = batch.slots.tolist()
        batch.fail("not today")
        attempts = {}
        for batch in loader:
            attempts.update(zip(batch.slots.tolist(), batch.attempts.tolist()))
            values, offsets = batch["tokens"]
            for i, slot in enumerate(batch.slots):
                assert values[offsets[i]:offsets[i + 1]].tolist() == tokens[slot]
            batch.set("halves", torch.zeros(batch.rows, dtype=torch.bfloat16),
                      np.arange(batch.rows + 1))
            batch.set("sums", np.zeros((batch.rows, 1), dtype=np.int64))
        assert all((attempts[slot] == 2) == (slot in slots) for slot in range(ROWS)), attempts

    micro_batches()
    memory_used_again()
    micro_batches_that_fail()
    an_output_that_is_missing()
    an_output_that_is_set_again()
    a_batch_that_cannot_be_read()

    # What is wrong is said.
    refused("ENOENT", dray.StreamDataLoader, "rolout", ["tokens"], 4, timeout=5)
    with dray.StreamDataLoader("rollout", ["nothing"], 4, timeout=0.05) as loader:
        refused("ETIMEDOUT", next, loader)
    insert("2")
    with dray.StreamDataLoader("rollout", ["nothing"], 4, timeout=5) as loader:
        refused("ENOENT", next, loader)
    loader = dray.StreamDataLoader("rollout", ["tokens"], 4, partition="2", timeout=5)
    last = next(loader)["tokens"][0]
    before = last.tolist()
    loader.close()
    refused("ECLOSED", next, loader)
    assert last.tolist() == before  # also an array that outlives its loader
    del last, loader
