"""dray.Queue: what is put from Python comes out as it was, to Python and to `dray queue`; claims as
context managers commit, or fail; arrays outlive their claim and their queue."""
import json
import os
import subprocess

from begin import needs, rng, seed

with needs:
    import numpy as np
    import torch

from python_fixture import coordinator, dray, refused, wrong

program = os.environ["DRAY_PROGRAM"]
ROWS = 24
WORDS = ["", "4", "héllo", "日本語", "x" * 300]
prompts = [rng.choice(WORDS) for _ in range(ROWS // 4)]
responses = [[rng.randrange(2**31) for _ in range(rng.randrange(0, 9))] for _ in range(ROWS)]
blobs = [rng.randbytes(rng.randrange(0, 20)) for _ in range(ROWS)]
tokens = [len(r) for r in responses]
images = torch.tensor(np.random.default_rng(seed).normal(size=(ROWS, 2, 3))).to(torch.bfloat16)
TASKS = {"reward": (["prompt", "response", "blob"], ["score", "notes"]),
         "train": dray.Task(["response", "score", "notes", "image"])}


def put(queue, partition):
    """The prompts once a group of four, everything else a row; torch, lists and (values, offsets)."""
    with_offsets = (np.concatenate([np.array(r, dtype=np.int32) for r in responses]),
                    np.cumsum([0] + tokens))
    first = queue.insert({"prompt": prompts}, partition, rows=ROWS, group_size=4, once_per_group=True,
                         tags={"version": 7})
    assert first == 0
    # What a task writes nobody else puts; a producer's own task is a claim of rows that are there.
    with queue.claim("rollout", ROWS, partition) as batch:
        assert batch.list("prompt") == [p for p in prompts for _ in range(4)]
        assert batch.groups.tolist() == [i // 4 for i in range(ROWS)]
        batch.set("response", with_offsets)
        batch.set("blob", blobs)
        batch.set("image", images)
        batch.set_tag("tokens", tokens)
    queue.seal(partition, ROWS)


def reward(queue, partition):
    """Scores what is there; one row fails once."""
    seen, kept = [], []
    while True:
        try:
            batch = queue.claim("reward", 5, partition, up_to=True, framework="torch")
        except dray.DrayError as error:
            assert error.name == "EEND", error
            return seen, kept
        if not seen:
            try:
                with batch:
                    raise RuntimeError("a reward model that fell over")
            except RuntimeError:
                seen.append(-1)
                continue
        with batch:
            for slot, prompt, response, blob in zip(batch.slots, batch.list("prompt"),
                                                    batch.list("response"), batch.list("blob")):
                assert prompt == prompts[slot // 4] and blob == blobs[slot]
                assert response.dtype == torch.int32 and response.tolist() == responses[slot]
                seen.append(int(slot))
            kept.append((batch.slots, batch.ragged("response")))
            full, lengths = batch.padded("response", value=-1)
            try:
                batch.padded("response", length=int(lengths.max()) - 1)
                raise AssertionError("a row was cut")
            except ValueError as error:
                assert "cannot hold" in str(error), error
            assert lengths.tolist() == [tokens[s] for s in batch.slots]
            assert [row[:n].tolist() for row, n in zip(full, lengths)] == \
                [responses[s] for s in batch.slots]
            assert all((row[n:] == -1).all() for row, n in zip(full, lengths))
            assert batch.tag("version").tolist() == [7] * batch.rows
            batch.set("score", torch.tensor([float(s) for s in batch.slots]))
            batch.set("notes", [f"row {s}" for s in batch.slots])
        assert refused("ECLOSED", batch.commit) and refused("ECLOSED", batch.tag, "version")


def check_refusals(queue):
    wrong(ValueError, "not for 2", queue.insert, {"prompt": ["a", "b"], "other": ["c"]}, "p")
    wrong(ValueError, "tag", queue.insert, {"prompt": ["a"]}, "p", tags={"version": [1, 2]})
    wrong(TypeError, "dtype", queue.insert, {"prompt": np.array([1 + 2j])}, "p")
    wrong(ValueError, "policy", queue.claim, "train", policy="best")
    wrong(TypeError, "dp_rnk", queue.claim, "train", dp_rnk=1)
    wrong(ValueError, "framework", queue.claim, "train", framework="jax")
    wrong(ValueError, "lists of columns", dray.Queue, "other", tasks={"a": ("prompt", "b")})
    wrong(TypeError, "capacity_rows", dray.Queue, capacity_rows=3)
    assert "rollout" in refused("ENOENT", queue.claim, "rolout")
    refused("ETIMEDOUT", queue.claim, "rollout", timeout=0.01)
    # ctypes would take the lowest bits of a number: a claim of one row, a slot at the end, as many rows as fit.
    wrong(ValueError, "count", queue.claim, "train", (1 << 32) + 1)
    wrong(ValueError, "count", queue.claim, "train", -1)
    wrong(ValueError, "at_slot", queue.insert, {"prompt": ["a"]}, "p", at_slot=-1)
    wrong(ValueError, "group_size", queue.insert, {"prompt": ["a"]}, "p", group_size=np.int64(1 << 32))
    wrong(ValueError, "group_size", queue.insert, {"prompt": ["a"]}, "p", group_size=1 << 32)
    wrong(ValueError, "rows", queue.seal, "p", -1)
    wrong(ValueError, "batch_rows", queue.admit, None, (1 << 32) + 8)
    wrong(ValueError, "max_attempts", dray.Queue, "wide", tasks=TASKS, max_attempts=1 << 32)
    wrong(ValueError, "ahead_bytes", dray.StreamDataLoader, "train", [], 1, ahead_bytes=-1)
    # A misspelt option is no attribute of a structure, and a text no list of columns.
    wrong(TypeError, "unknown keyword 'capacity_row'", dray.Queue, "misspelt", tasks=TASKS, capacity_row=8)
    for columns in (("prompt", ["score"]), (["prompt"], "score")):
        wrong(ValueError, "lists of columns", dray.Queue, "text", tasks={"reward": columns})
    with dray.Queue("two", tasks={"reward": (["prompt"], ["score", "notes"])}):
        assert "task reward, which writes score, notes, found scores" in refused(
            "EEXIST", dray.Queue, "two", tasks={"reward": (["prompt"], ["scores"])})
        assert "task reward, which needs prompt, found none" in refused(
            "EEXIST", dray.Queue, "two", tasks={"reward": ([], ["score", "notes"])})
    assert "queue nowhere is not there yet" in refused("ETIMEDOUT", dray.Queue, "nowhere", timeout=0.01)
    assert "p" not in [p["name"] for p in queue.status()["partitions"]]


def check_refill(queue):
    """A row that failed too often is asked for again, and answered."""
    queue.insert({"prompt": ["bad"]}, "2", seal=True)
    for _ in range(2):
        queue.claim("rollout", 1, "2").fail("will not do")
    want = queue.refill(timeout=20)
    assert (want.partition, want.rows, want.cause, want.reason) == ("2", 1, "failed", "will not do")
    queue.insert({"prompt": ["good"]}, "2", refill=want)
    with queue.claim("rollout", 1, "2") as batch:
        assert batch.list("prompt") == ["good"]
        batch.set("response", [np.array([1], dtype=np.int32)])
        batch.set("blob", [b""])
        batch.set("image", images[:1])


def check_large_numbers():
    """What the shell reads of numbers that are larger than its JSON has is their digits, and no other number."""
    wide = [0, 2**63 - 1, 2**63, 2**64 - 1]
    with dray.Queue("wide", tasks={"read": (["n", "m"], [])}, timeout=20) as queue:
        queue.insert({"n": np.array(wide, np.uint64), "m": np.array([wide, wide[::-1]] * 2, np.uint64)}, "p", seal=True)
        claim = subprocess.run([program, "queue", "claim", "-q", "wide", "-t", "read", "-n", "4", "-o", "ordered"],
                               capture_output=True, text=True, timeout=60, check=True).stdout.strip()
        said = subprocess.run([program, "queue", "read", claim], capture_output=True, text=True, timeout=60, check=True)
        rows = [json.loads(line) for line in said.stdout.splitlines()]
        assert [int(row["n"]) for row in rows] == wide and list(map(int, rows[1]["m"])) == wide[::-1], rows
        assert [type(row["n"]) for row in rows] == [int, int, str, str], rows
        subprocess.run([program, "queue", "release", claim], timeout=60, check=True, capture_output=True)


with coordinator():
    check_large_numbers()
    TASKS["rollout"] = (["prompt"], ["response", "blob", "image"])
    with dray.Queue(tasks=TASKS, timeout=20, max_attempts=2) as queue:
        check_refusals(queue)
        put(queue, "1")
        seen, kept = reward(queue, "1")
        assert sorted(seen[1:]) == list(range(ROWS)), seen

        # The shell sees the same.
        claim = subprocess.run([program, "queue", "claim", "--task", "train", "--count", "3",
                                "--policy", "ordered"], capture_output=True, text=True,
                               timeout=60, check=True).stdout.strip()
        lines = subprocess.run([program, "queue", "read", claim], capture_output=True, text=True,
                               timeout=60, check=True).stdout.splitlines()
        for slot, row in enumerate(map(json.loads, lines)):
            assert row["response"] == responses[slot] and row["notes"] == f"row {slot}", row
            assert row["score"] == slot
        subprocess.run([program, "queue", "commit", claim], input="{}\n" * 3, text=True,
                       timeout=60, check=True)
        with queue.claim("train", ROWS - 3, "1", copy=True) as batch:
            assert batch.list("notes") == [f"row {s}" for s in batch.slots]
            assert batch["score"][0].tolist() == batch.slots.tolist()
            image = torch.from_numpy(batch["image"][0]).view(torch.bfloat16)
            assert torch.equal(image, images[batch.slots])
        queue.wait("1", timeout=0)
        check_refill(queue)
        queue.clear("1")
        left = queue.claim("reward", 1, "2")  # given back by the end of the block
        queue.end()
    refused("ECLOSED", queue.status)
    refused("ECLOSED", left.commit)
    for slots, (values, offsets) in kept:  # as they were, although all is gone
        for i, slot in enumerate(slots):
            assert values[offsets[i]:offsets[i + 1]].tolist() == responses[slot]
    with dray.Queue(timeout=20) as queue:
        assert queue.status()["partitions"][0]["tasks"]["reward"]["ready"] == 1
