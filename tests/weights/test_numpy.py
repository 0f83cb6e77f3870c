"""dray.weights with numpy's arrays, in shared and in private memory, whole, cut and strided: the same bytes as
numpy's own slices, and PyTorch is not imported. In its own place, import dray takes neither torch nor numpy."""
import os
import subprocess
import sys
import time

from begin import coordinator, seed

import numpy as np

from dray import DrayError, DrayTimeout
from dray.weights import Block, Context, Publisher, Subscriber, empty
from served import refused

TOP = os.path.join(os.environ["DRAY_SOURCE_DIR"], "python")
rng = np.random.default_rng(seed)


def together(subscribers, **options):
    for s in subscribers:
        s.start(**options)
    deadline = time.monotonic() + 60
    while not all([s.poll() for s in subscribers]):
        assert time.monotonic() < deadline
    return [s.finish() for s in subscribers]


def cuts(rows, count):
    """`count` ranges that make up `rows`, some perhaps empty."""
    ends = [0, *sorted(int(n) for n in rng.integers(0, rows + 1, count - 1)), rows]
    return list(zip(ends, ends[1:]))


def values(shape, dtype):
    return rng.integers(-100, 100, shape).astype(dtype)


def strided(shape, dtype):
    """Memory of an engine: every other column of something wider, or the rows of a transposed array."""
    if rng.integers(2):
        return np.empty((*shape[:-1], 2 * shape[-1] + 1), dtype)[..., 1::2]
    return np.empty(shape[::-1], dtype).T


def moves(model, dtype, to):
    trainers, engines = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    shape = tuple(int(n) for n in rng.integers(5, 40, int(rng.integers(2, 4))))
    rows, columns = cuts(shape[0], trainers), cuts(shape[-1], engines)
    shared = bool(rng.integers(2))
    make = (lambda *s: empty(*s, dtype=dtype)) if shared else (lambda *s: np.zeros(s, dtype))
    sources = [make(b - a, *shape[1:]) for a, b in rows]
    targets = [strided((*shape[:-1], b - a), to) for a, b in columns]
    whole = [np.zeros(7, np.int64) for _ in columns]
    bias = make(7).astype(np.int64) if not shared else empty(7, dtype=np.int64)
    with Context(role="trainer") as context, Context(role="engine") as engine:
        publishers = [Publisher([Block("w", shape, source, (a,) + (0,) * (len(shape) - 1))]
                                + ([Block("b", (7,), bias)] if rank == 0 else []), model, rank, trainers,
                                context=context)
                      for rank, (source, (a, _)) in enumerate(zip(sources, rows))]
        subscribers = [Subscriber([Block("w", shape, t, (0,) * (len(shape) - 1) + (a,)), Block("b", (7,), w)],
                                  model, "engine", rank, engines, context=engine)
                       for rank, (t, w, (a, _)) in enumerate(zip(targets, whole, columns))]
        for version in range(1, 4):
            now, bias[:] = values(shape, dtype), values(7, np.int64)
            for source, (a, b) in zip(sources, rows):
                source[:] = now[a:b]
            for publisher in publishers:
                publisher.publish(version)
            reports = together(subscribers, min_version=version)
            assert all(r["version"] == version for r in reports), reports
            for t, w, (a, b) in zip(targets, whole, columns):
                assert np.array_equal(t, now[..., a:b].astype(to)) and np.array_equal(w, bias), (shape, dtype, to)
            for publisher in publishers:
                publisher.wait()


def refusals():
    with Context(role="engine") as context:
        fixed = np.zeros(4, np.float32)
        fixed.flags.writeable = False
        refused(TypeError, "read-only", Subscriber, {"w": fixed}, "n", context=context)
        refused(TypeError, "found list", Subscriber, {"w": [1.0]}, "n", context=context)
        refused(TypeError, "without a mask", Subscriber, {"w": np.ma.zeros(4, np.float32)}, "n", context=context)
        refused(TypeError, "is no dtype", Subscriber, {"w": np.zeros(4, np.complex64)}, "n", context=context)
    with Context(role="trainer") as trainer, Context(role="engine") as engine:
        one = np.zeros(4, np.float32)
        half = one.astype(np.float16)
        for name, words, other in (("EDTYPE", ["w: F32 expected", "found F16"], Block("w", (8,), half, (4,))),
                                   ("ESHAPE", ["w: a whole tensor of shape [8]", "found [16]"], Block("w", (16,), one, (4,)))):
            for kind, context in ((Publisher, trainer), (Subscriber, engine)):
                assert refused(DrayError, words, kind, [Block("w", (8,), one), other], "n", context=context).name == name
        for found in (Block("w", (8, 4), np.zeros((2, 4, 4), np.float32)), Block("w", (8, 4), np.zeros(8, np.float32)),
                      Block("w", (8,), one, (2 ** 64,)), Block("w", (8,), one, (5,)), Block("w", (8,), one, (-1,)),
                      Block("w", (2,) * 6, np.zeros((2,) * 6, np.float32), (0, 0, 0, 0, 1, 0))):
            for kind, context in ((Publisher, trainer), (Subscriber, engine)):
                words = [f"w: a rectangle within {found.shape} expected, found {found.tensor.shape} from "]
                assert refused(DrayError, words, kind, [found], "n", context=context).name == "ESHAPE"
        # Two arrays over a part of the same bytes cannot both be filled; columns of one memory can.
        room = bytearray(256)
        cut = [np.frombuffer(room, np.float32, count, offset) for count, offset in ((32, 0), (24, 96), (1, 252))]
        words = ["group n, rank 0: a [0:32] and b [0:24] share bytes of region b (from byte 0)"]
        assert refused(DrayError, words, Subscriber, {"c": cut[2], "a": cut[0], "b": cut[1]}, "n", group="n",
                       context=engine).name == "EOVERLAP"
        two = np.frombuffer(room, np.float32).reshape(8, 8), np.frombuffer(room, np.float32, 60, 16)
        columns = two[0][:, :4], np.lib.stride_tricks.as_strided(two[1], (8, 4), (32, 4))
        with Publisher({"a": np.full((8, 4), 1, np.float32), "b": np.full((8, 4), 2, np.float32)}, "columns",
                       context=trainer) as publisher, \
                Subscriber(dict(zip("ab", columns)), "columns", context=engine) as subscriber:
            publisher.publish(1)
            subscriber.update()
            assert (columns[0] == 1).all() and (columns[1] == 2).all()
        for kind, context in ((Publisher, trainer), (Subscriber, engine)):  # neither becomes the tensor "a"
            refused(ValueError, "NUL byte", kind, {"a\0b": one, "a\0c": one.copy()}, "n", context=context)
        for names in ("ww", ("w", "_orig_mod.w")):
            refused(ValueError, "w: came twice", Publisher, list(zip(names, (one, one.copy()))), "n", context=trainer)


def plain_pairs():
    """A mapping, looked up anew: what is put in its place is published."""
    given, target = {"w": values((4, 6), np.float32)}, np.zeros((4, 6), np.float32)
    with Context(role="trainer") as context, Context(role="engine") as engine, \
            Publisher(given, "pairs", context=context) as publisher, \
            Subscriber({"w": target}, "pairs", context=engine) as subscriber:
        for version in (1, 2):
            given["w"] = values((4, 6), np.float32)
            publisher.publish(version)
            together([subscriber], min_version=version)
            assert np.array_equal(target, given["w"])
            publisher.wait()


def timeouts():
    """A call that is given no timeout, or 0, takes its subscriber's."""
    begun = time.monotonic()
    with Context(role="engine") as engine, \
            Subscriber({"w": np.zeros(4, np.float32)}, "nobody", "timeouts", context=engine, timeout=0.2) as subscriber:
        for given in ({}, {"timeout": None}, {"timeout": 0}):
            for wait in (subscriber.update, subscriber.prefetch):
                refused(DrayTimeout, "nobody", wait, **given)
        refused(DrayError, "prefetched", subscriber.commit)
        subscriber.leave()
    assert time.monotonic() - begun < 30
    source, target = np.full(1000, 3.0, np.float32), np.zeros(1000, np.float32)
    with Context(role="trainer") as trainer, Context(role="engine") as engine, \
            Publisher({"w": source}, "there", context=trainer) as publisher, \
            Subscriber({"w": target}, "there", "timeouts", context=engine) as subscriber:
        publisher.publish(1)
        subscriber.update(timeout=0)
        assert np.array_equal(target, source)
        publisher.wait()


def not_there():
    """An update without a version says what there is of the model: no trainer, some of its ranks, an older version."""
    target = {"w": np.zeros(4, np.float32)}
    with Context(role="trainer") as trainer, Context(role="engine", timeout=20) as engine:
        def missing(model, group, words, **options):
            with Subscriber(target, model, group, context=engine) as subscriber:
                refused(DrayTimeout, [f"group {group}: no version", f"of {model} was published; {words}"],
                        subscriber.update, timeout=0.1, **options)
                taken = refused(DrayError, "is taken by test_numpy.py", Subscriber, target, model, group,
                                context=engine)
                assert taken.name == "EEXIST"
        missing("early", "early", "no trainer has a publisher of that model open")
        with Publisher(target, "greeting", context=trainer) as publisher:
            missing("greetnig", "misspelt", "no trainer has a publisher of that model open; did you mean 'greeting'?")
            missing("greeting", "idle", "its trainer has not published one on all of its 1 ranks")
            publisher.publish(3)
            missing("greeting", "late", "the newest is 3", min_version=4)
            refused(DrayError, "a version greater than 3", publisher.publish, 3)
            refused(TypeError, "version: a whole number expected, found 1.5", publisher.publish, 1.5)
        with Publisher(target, "half", 0, 2, context=trainer):
            missing("half", "half", "1 of 2 ranks of its trainer have opened")


def imports():
    seen = subprocess.check_output([sys.executable, "-c", "import dray, sys; dray.__version__; "
                                    "print('torch' in sys.modules, 'numpy' in sys.modules)"],
                                   text=True, env={**os.environ, "PYTHONPATH": TOP})
    assert seen.split() == ["False", "False"], seen


with coordinator():
    imports()
    for number in range(4 * int(os.environ.get("DRAY_TEST_SCALE", 1))):
        moves(f"same-{number}", *(rng.choice(["float32", "float64", "float16", "int32", "uint8"]),) * 2)
    moves("half", "float32", "float16")
    plain_pairs()
    refusals()
    timeouts()
    not_there()
assert "torch" not in sys.modules
