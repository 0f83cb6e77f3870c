"""Rows with keys from Python: what is put comes out, with tags and addresses, in numpy's arrays and torch's."""
from begin import needs

with needs:
    import numpy as np
    import torch

from python_fixture import coordinator, dray, refused, wrong
from dray.values import Objects


def check_put_and_get(queue):
    keys = ["a", "b", "c"]
    values = {"x": np.arange(6, dtype=np.float32).reshape(3, 2), "text": ["1", "", "333"],
              "ragged": [np.arange(2), np.arange(0), np.arange(3)], "object": Objects([b"p", b"q", b"r"]),
              "half": torch.arange(3).to(torch.bfloat16)}
    at = queue.put("p", keys, values, [b"one", None, b""])
    assert at["attempt"].tolist() == [1, 1, 1] and len(set(at["slot"].tolist())) == 3
    for framework in ("numpy", "torch"):
        with queue.get("p", ["c", "a"], framework=framework) as rows:
            assert rows.row_keys == ["c", "a"] and rows.tags == [b"", b"one"]
            assert sorted(rows.columns) == sorted(values) and rows.at.tolist() == at[[2, 0]].tolist()
            assert rows.ragged("x")[0].tolist() == [[4, 5], [0, 1]] and rows.list("text") == ["333", "1"]
            assert rows.list("object") == [b"r", b"p"] and rows.cells("object") == [b"r", b"p"]
            assert [r.tolist() for r in rows.cells("ragged")] == [[0, 1, 2], [0, 1]]
            assert rows.cell("text", 0) == "333" and rows.cell("half", 0).shape == ()
            wrong(KeyError, "y", rows.cell, "y", 0)
    with queue.get("p", ["a"], framework="torch") as rows:
        x, half = rows.cell("x", 0), rows.cell("half", 0)
        x += 1  # a copy, which anybody may write into
        assert half.dtype == torch.bfloat16 and x.tolist() == [1, 2]
    kept = queue.get("p", ["a"]).cell("x", 0)
    assert queue.put("p", ["a"], {"x": np.zeros((1, 5), np.int64)})["attempt"].tolist() == [2]
    assert kept.tolist() == [0, 1] and not kept.flags.writeable  # what was read stays
    with queue.get("p", columns=["x"]) as rows:
        assert [r.dtype for r in rows.cells("x")] == [np.int64, np.float32, np.float32]
        refused("EDTYPE", lambda: rows["x"])
        refused("EPERM", lambda: rows._pins.call("dray_batch_commit", rows._batch))
    assert queue.list("p") == {"a": b"one", "b": None, "c": b""} and queue.list()["p"] == queue.list("p")


def check_partial(queue):
    queue.put("p", ["d"], tags=[b"no values"])
    refused("EAGAIN", queue.get, "p", ["a", "d"])
    refused("EAGAIN", queue.get, "p", ["a", "e"])
    refused("ETIMEDOUT", queue.get, "p", ["a", "e"], timeout=0.001)
    with queue.get("p", ["e", "d", "a"], partial=True) as rows:
        assert rows.row_keys == ["d", "a"] and rows.cell("x", 0) is None and rows.cell("x", 1).size == 5
        assert rows.cells("text") == [None, "1"]
        for name in ("x", "text"):  # what is there is no whole column
            refused("ENOENT", lambda: rows[name])
            refused("ENOENT", rows.list, name)


def check_consumers(queue):
    ready = queue.get("p", columns=["x"], task="train", peek=True)
    assert ready.row_keys == ["a", "b", "c"]
    chosen = ready.at[[0, 2]].copy()
    assert queue.get("p", columns=["x"], at=chosen, task="train").row_keys == ["a", "c"]
    refused("ESTALE", queue.get, "p", columns=["x"], at=ready.at[[1, 2]], task="train")
    assert queue.get("p", columns=["x"], task="train", count=5, up_to=True).row_keys == ["b"]
    refused("EAGAIN", queue.get, "p", columns=["x"], task="train")
    assert queue.keyed()[0]["tasks"] == {"train": 3}
    queue.reset("p", "train")
    assert queue.get("p", columns=["x"], task="train", count=2).rows == 2


def check_clear(queue):
    at = queue.get("p", ["b"]).at
    queue.clear("p", ["a", "nobody"])
    queue.clear("p", at=at)
    refused("ESTALE", queue.put, "p", at=at)
    assert sorted(queue.list("p")) == ["c", "d"]
    queue.put("p", rows=2)  # without keys
    assert queue.keyed()[0]["rows"] == 4 and sorted(queue.list("p")) == ["c", "d"]
    queue.clear("p")
    assert queue.list() == {} and queue.list("p") == {} and not queue.keyed()
    wrong(ValueError, "rows", queue.put, "p")
    wrong(ValueError, "2", queue.put, "p", ["a"], {"x": np.zeros(2)})
    wrong(TypeError, "list", queue.put, "p", "abc")


with coordinator():
    with dray.Queue("keys", tasks={"unused": ([], [])}, timeout=20) as keyed:
        check_put_and_get(keyed)
        check_partial(keyed)
        check_consumers(keyed)
        check_clear(keyed)
