"""What insert and set take from Python: values come out as they were given, or are refused; never
bytes from beside an array."""
import random
import subprocess
import sys

from begin import needs, seed

with needs:
    import numpy as np
    import torch

from python_fixture import coordinator, dray, refused, wrong
from dray.values import Values

TASKS = {"read": (["x"], []), "write": (["x"], ["y"])}


def back(values, rows=None, framework="numpy"):
    """The rows that a consumer gets, and the batch that has them."""
    with dray.Queue(f"q{back.count}", tasks=TASKS, timeout=20) as queue:
        back.count += 1
        queue.insert({"x": values}, "p", rows=rows, seal=True)
        with queue.claim("read", 100, up_to=True, framework=framework) as batch:
            found = batch.list("x")
            dtype = batch.ragged("x")[0].dtype
    return [v.tolist() if hasattr(v, "tolist") else v for v in found], dtype


back.count = 0


def check_offsets(queue):
    """The queue refuses offsets that lead outside their values, here and in C."""
    array = np.arange(4, dtype=np.int64)
    for offsets, part in (([0, 4, 20], "20"), ([0, 4, 2**40], "behind"), ([1, 4], "0"),
                          ([0, 3, 2, 4], "back"), ([0, 2], "4"), ([0, -1, 4], "back"),
                          ([0.0, 4.0], "whole"), ([[0, 4]], "dimension"), ([], "offsets")):
        wrong((ValueError, TypeError), part, queue.insert, {"x": (array, offsets)}, "p")
        wrong((ValueError, TypeError), part, queue.insert, {"x": (array, np.array(offsets))}, "p")
        wrong((ValueError, TypeError), part, queue.insert, {"x": (torch.tensor(array), offsets)}, "p")
    assert back((array, [0, 1, 1, 4]))[0] == [[0], [], [1, 2, 3]]
    assert back((array, torch.tensor([0, 1, 1, 4])))[0] == [[0], [], [1, 2, 3]]
    assert back((array, None))[0] == [0, 1, 2, 3]
    # The library looks for itself: what Python says is changed behind its back.
    real = Values._checked
    for given, part in (([0, 5], "40 bytes"), ([0, 2**61], "overflow"), ([4, 5], "40 bytes"),
                        ([0, 3, 2, 4], "behind the next")):
        Values._checked = lambda *_: np.array(given, dtype=np.uint64)
        try:
            assert part in refused("EINVALID", queue.insert, {"x": (array, [0, 4])}, "p"), part
        finally:
            Values._checked = real


def check_tuples(queue):
    """A tuple is values and offsets; rows come in a list."""
    rows = [np.array([5, 6, 7]), np.array([1, 2, 3])]
    assert back(rows)[0] == [[5, 6, 7], [1, 2, 3]]
    for given in (tuple(rows), ("a", "b"), (1, 2), (rows[0], rows[1], rows[0]), (rows[0],),
                  (np.array([1.0, 2.0]), np.array([0.0, 2.0])), ([1, 2], [3, 4])):
        wrong((ValueError, TypeError), "list", queue.insert, {"x": given}, "p")


def check_torch(queue):
    base = torch.arange(24.0).reshape(3, 8)
    narrow = torch.nested.narrow(base, 1, torch.tensor([1, 0, 4]), torch.tensor([2, 3, 1]),
                                 layout=torch.jagged)
    expected = [row.tolist() for row in narrow.unbind()]
    assert expected == [[1, 2], [8, 9, 10], [20]]
    assert back(narrow)[0] == expected, back(narrow)[0]
    rows = [torch.arange(n * 2, dtype=torch.int32).reshape(n, 2) for n in (1, 3, 0)]
    for layout in (torch.jagged, torch.strided):
        nested = torch.nested.nested_tensor(rows, layout=layout)
        assert back(nested)[0] == [row.tolist() for row in rows]
    turned = torch.nested.nested_tensor(rows[:2], layout=torch.jagged).transpose(1, 2)
    wrong((ValueError, TypeError), "dimension", queue.insert, {"x": turned}, "p")
    assert back(turned.transpose(1, 2))[0] == [row.tolist() for row in rows[:2]]
    complexes = torch.view_as_complex(torch.arange(6.0).reshape(3, 2)).conj()
    assert back(complexes.imag)[0] == [-1, -3, -5]  # a view that negates
    assert back(torch.arange(6).reshape(3, 2).t())[0] == [[0, 2, 4], [1, 3, 5]]
    wrong((ValueError, TypeError), "sparse", queue.insert, {"x": torch.eye(3).to_sparse()}, "p")


def check_lists(queue):
    for given, part in ((["a", 3, "b"], "row 1"), ([b"a", "b"], "row 1"), (["a", None], "row 1"),
                        ([3, "a"], ""), ([[1], 2], "row 1"), ([np.zeros(2), "ab"], "row 1"),
                        ([np.zeros(2, np.int32), np.zeros(2)], "row 1"),
                        ([np.zeros((2, 3)), np.zeros((2, 4))], "row 1"), ([[1], ["a"]], ""),
                        (np.array(["a", 3], dtype=object), "row 1"), (5, "rows"), ("abc", "list"),
                        ({"a": 1}, ""), (np.float32(1), "rows"), ([None, None], "")):
        wrong((ValueError, TypeError), part, queue.insert, {"x": given}, "p", rows=2)
    masked = np.ma.array([1, 2], mask=[True, False])
    wrong((ValueError, TypeError), "mask", queue.insert, {"x": masked}, "p")
    wrong(TypeError, "row 0", queue.insert, {"x": [masked, masked]}, "p")
    for given in ([2**63, -1], [[2**63], [-1]], [np.uint64(2**63), np.int64(-1)]):
        wrong(ValueError, "int64 or uint64", queue.insert, {"x": given}, "p")
    for given in (list(masked), [[masked], [masked]], [[1], list(masked)], [2.0, np.ma.masked], [[[2.0]], [[np.ma.masked]]]):
        wrong(TypeError, "mask", queue.insert, {"x": given}, "p")
    assert back(["", "ab\0c"])[0] == ["", "ab\0c"]
    assert back([b"", bytearray(b"ab")])[0] == [b"", b"ab"]
    assert back([[], [1.5]]) == ([[], [1.5]], np.float64)
    assert back([[], [1]]) == ([[], [1]], np.int64)
    assert back([torch.tensor([], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)]) == \
        ([[], [4]], np.int32)
    assert back([True, False]) == ([True, False], np.bool_)
    assert back(np.array(["b", "a"]))[0] == ["b", "a"]


def check_names(queue):
    for call, arguments in ((queue.insert, ({"x\0y": ["a"]}, "p")), (queue.insert, ({"x": ["a"]}, "p\0q")),
                            (queue.claim, ("read\0er",)), (queue.claim, ("read", 1, "p\0q")),
                            (queue.seal, ("p\0", 1)), (queue.clear, ("p\0",)),
                            (queue.wait, ("p\0",)), (dray.Queue, ("q\0",)),
                            (dray.StreamDataLoader, ("read\0er", ["x"], 1))):
        wrong(ValueError, "NUL", call, *arguments)
    wrong(ValueError, "NUL", queue.insert, {"x": ["a"]}, "p", tags={"t\0": 1})
    wrong(ValueError, "NUL", queue.claim, "read", group="g\0h")
    wrong(ValueError, "NUL", dray.Queue, tasks={"a\0": (["x"], [])})
    wrong(ValueError, "NUL", dray.Queue, tasks={"a": (["x\0"], [])})


def check_sets(queue):
    queue.insert({"x": np.arange(4)}, "p", seal=True)
    with queue.claim("write", 4, "p") as batch:
        wrong(ValueError, "20", batch.set, "y", (np.arange(4), [0, 4, 4, 4, 20]))
        wrong(ValueError, "20", batch.set, "y", np.arange(4), [0, 4, 4, 4, 20])
        wrong(TypeError, "row 1", batch.set, "y", ["a", 3, "b", "c"])
        wrong(ValueError, "NUL", batch.set, "y\0", np.arange(4))
        wrong(ValueError, "4", batch.set_tag, "t", [1.0, 2.0])
        batch.set("y", np.arange(4))
    with queue.claim("read", 4, "p") as batch:
        batch.fail("a reason\0with more")


def forms_of(queue):
    return {name: (column["dtype"], column["shape"], column["content"]) for name, column in queue.status()["columns"].items()}


def draw_rows(rng, more, kind):
    """Some rows, as an array or tensor of one shape or as a list of those of different lengths; and each as numpy's."""
    lengths = [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
    if kind in ("array", "tensor"):
        lengths = [lengths[0]] * len(lengths)
    rows = [np.array([rng.randrange(100) for _ in range(n * int(np.prod(more)))], np.int32).reshape(n, *more) for n in lengths]
    if kind in ("tensor", "tensors"):
        given = [torch.from_numpy(row) for row in rows]
        return torch.stack(given) if kind == "tensor" else given, rows
    return np.stack(rows) if kind == "array" else rows, rows


def check_one_shape():
    """Rows of one shape go into a column whose rows differ, by whoever it was made; never the other way round."""
    rng = random.Random(seed)
    tasks = {"write": (["x"], ["y"]), "read": (["x", "y"], [])}
    for more in ((), (2,), (3, 1)):
        with dray.Queue(f"shapes{len(more)}", tasks=tasks, timeout=20) as queue, \
                dray.Queue(f"shapes{len(more)}", timeout=20) as other:
            wanted, ys = [], []
            kinds = ("array", "tensor", "arrays", "tensors")
            first = [(queue, "arrays"), (other, "array"), (queue, "tensor")]  # of each column
            for who, kind in first + [(rng.choice((queue, other)), rng.choice(kinds)) for _ in range(9)]:
                given, rows = draw_rows(rng, more, kind)
                who.insert({"x": given}, "p")
                wanted += rows
            queue.seal("p", len(wanted))
            while len(ys) < len(wanted):
                who, kind = first.pop(0) if first else (rng.choice((queue, other)), rng.choice(kinds))
                given, rows = draw_rows(rng, more, kind)
                given, rows = given[:len(wanted) - len(ys)], rows[:len(wanted) - len(ys)]
                with who.claim("write", len(rows), "p") as batch:
                    batch.set("y", given)
                ys += rows
            form = ("I32", [None, *more], "tensor")
            assert forms_of(queue) == {"x": form, "y": form}, forms_of(queue)
            with queue.claim("read", len(wanted), "p") as batch:
                for name, expected in (("x", wanted), ("y", ys)):
                    for found, row in zip(batch.list(name), expected):
                        assert found.shape == row.shape and np.array_equal(found, row), (name, found, row)
            # What does not fit is said as it was given.
            for values, part in ((np.zeros((2, 3, *more, 5), np.int32), "found I32 [3, "), (np.zeros((2, 3, *more)), "F64"),
                                 (np.zeros(2, np.int32), "found I32 []")):
                for each in (values, torch.from_numpy(values)):
                    wrong(dray.DrayError, part, other.insert, {"x": each}, "q")
    with dray.Queue("rectangle", tasks=tasks, timeout=20) as queue:
        queue.insert({"x": torch.zeros(2, 3)}, "p", seal=True)
        with queue.claim("write", 1, "p") as batch:
            batch.set("y", np.zeros((1, 4)))
        assert forms_of(queue) == {"x": ("F32", [3], "tensor"), "y": ("F64", [4], "tensor")}
        for rows in ([torch.zeros(3), torch.zeros(2)], [np.zeros(3, np.float32)], torch.nested.nested_tensor([torch.zeros(3)])):
            said = refused("ESHAPE", queue.insert, {"x": rows}, "q")
            assert "rows of F32 [3] expected, found F32 [?]" in said, said
        with queue.claim("write", 1, "p") as batch:
            batch.set("y", [np.zeros(4)])
            said = refused("ESHAPE", batch.commit)
            assert "rows of F64 [4] expected, found F64 [?]" in said, said
            batch.set("y", np.ones((1, 4)))
        with queue.claim("read", 2, "p") as batch:
            assert batch["y"][0].tolist() == [[0] * 4, [1] * 4]


WRITER = """
import sys, os
sys.path.insert(0, os.path.join(os.environ["DRAY_SOURCE_DIR"], "python"))
import dray, torch
with dray.Queue("share", timeout=20) as queue:
    with queue.claim("read", 4, "p", framework="torch") as batch:
        values = batch["x"]
        values += 100
        assert values.tolist() == [100, 101, 102, 103], values
    for batch in dray.StreamDataLoader("stream", ["x"], 4, "share", "p", framework="torch"):
        batch["x"].mul_(-1)
        assert batch["x"].tolist() == [0, -1, -2, -3]
"""


def check_writable():
    """A claimed tensor can be written to, and nobody else sees that; in place nothing can be."""
    tasks = {"read": ["x"], "stream": ["x"], "other": ["x"]}
    with dray.Queue("share", tasks={k: (v, []) for k, v in tasks.items()}, timeout=20) as queue:
        queue.insert({"x": np.arange(4)}, "p", seal=True)
        done = subprocess.run([sys.executable, "-c", WRITER], timeout=300)  # it imports torch
        assert done.returncode == 0, f"the writer ended with {done.returncode}"
        with queue.claim("other", 4, "p") as batch:  # numpy: in place, and stays read-only
            values, _ = batch["x"]
            assert values.tolist() == [0, 1, 2, 3] and not values.flags.writeable
            wrong(ValueError, "", values.setflags, write=True)
            wrong(ValueError, "", values.view(np.uint8).setflags, write=True)
        with dray.Queue("copies", tasks={"read": (["x"], [])}, timeout=20) as copies:
            copies.insert({"x": np.arange(8)}, "p", seal=True)
            addresses = set()
            for copy in (True, False):
                for framework in ("torch", "numpy"):
                    with copies.claim("read", 2, framework=framework, copy=copy) as batch:
                        values = batch.ragged("x")[0]
                        if framework == "numpy":
                            assert values.flags.writeable == copy
                        elif copy:
                            values.zero_()
                        elif not copy:
                            addresses.add(values.data_ptr())
            assert addresses


with coordinator():
    with dray.Queue(tasks=TASKS, timeout=20) as queue:
        check_offsets(queue)
        check_tuples(queue)
        check_torch(queue)
        check_lists(queue)
        check_names(queue)
        assert queue.status()["partitions"] == []
        check_sets(queue)
    check_one_shape()
    check_writable()
