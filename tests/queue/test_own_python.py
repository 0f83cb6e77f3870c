"""What a copy of rows with keys is where it is large: memory of this process's own, whatever others and the queue do."""
from begin import needs

with needs:
    import numpy as np
    import torch

import gc
import os
import threading

from python_fixture import coordinator, dray, refused

KEYS = ["a", "b", "c", "d"]
LARGE = 3 << 18  # numbers in all


def values(seed):
    return np.arange(LARGE, dtype=np.int32).reshape(len(KEYS), -1) * 3 + seed


def put(queue, seed, keys=KEYS, timeout=None):
    rows = values(seed)
    queue.put("p", keys, {"x": rows, "ragged": [row[:row.size - i] for i, row in enumerate(rows)], "y": rows}, timeout=timeout)


def mappings():
    """Those of the queue's memory that are written to."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("dray-samples" in line and " rw-p " in line for line in maps)


def check_written(queue):
    put(queue, 1)
    for framework in ("numpy", "torch"):
        with queue.get("p", KEYS, framework=framework, copy=True) as one, queue.get("p", KEYS, framework=framework, copy=True) as two:
            found = [batch.ragged(name)[0] for name in ("x", "ragged") for batch in (one, two)]
            before = mappings()
            assert before == 4, before
            for each in found[::2]:
                each.reshape(-1)[::100] += 7
        x, ragged = values(1), np.concatenate([row[:row.size - i] for i, row in enumerate(values(1))])
        for mine, theirs, wanted in ((*found[:2], x), (*found[2:], ragged)):
            assert (np.asarray(theirs) == wanted).all()
            changed = np.flatnonzero(np.asarray(mine).reshape(-1) != wanted.reshape(-1))
            assert (changed == np.arange(0, wanted.size, 100)).all()
        with queue.get("p", KEYS, copy=True) as again:
            assert (again["x"][0] == x).all()
        del mine, theirs, each, found, one, two, again
        gc.collect()
        assert not mappings() and not queue._pins.lent and not queue._pins.held


def check_clear(queue):
    """Also of a column alone, in a thread that ends, and behind the end of its batch."""
    put(queue, 1)
    with queue.get("p", KEYS, framework="torch", copy=True) as batch:
        kept = batch["x"]
        assert batch["y"].sum() == kept.sum()
    batch = None
    kept.reshape(-1)[0] = -1
    view = kept[1:]
    del kept
    queue.clear("p")
    for seed in range(2, 6):
        put(queue, seed)
        queue.clear("p")
    assert (view.numpy() == values(1)[1:]).all() and mappings() == 1
    thread = threading.Thread(target=lambda held: None, args=(view,))
    del view
    thread.start()
    thread.join()
    del thread
    gc.collect()
    assert not mappings() and not queue._pins.held


def check_fork(queue):
    put(queue, 1)
    with queue.get("p", KEYS, copy=True) as batch:
        kept = batch["x"][0]
    del batch
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.read(reads, 1)
        good = (kept == values(1)).all()
        kept[:] = 0
        del kept
        os._exit(0 if good else 1)
    del kept
    queue.clear("p")
    for seed in range(2, 6):
        put(queue, seed)
        queue.clear("p")
    os.write(writes, b".")
    assert os.waitpid(child, 0)[1] == 0
    os.close(reads)
    os.close(writes)


def check_growth(queue):
    def resident():
        with open("/proc/self/statm", encoding="utf-8") as statm:
            return int(statm.read().split()[1])
    for round_ in range(30):
        put(queue, round_)
        with queue.get("p", KEYS, framework="torch", copy=True) as batch:
            found = [batch[name] for name in ("x", "y")]
        for each in found:
            each += 1
        assert int(found[0][0, 0]) == round_ + 1
        del found, each, batch
        queue.clear("p")
        if round_ == 5:
            before, chunks = resident(), queue.status()["chunk_bytes"]
    assert resident() - before < (8 << 20) // 4096 and queue.status()["chunk_bytes"] <= chunks
    assert not mappings() and queue.status()["bytes"] == 0


def fill(queue):
    """How many puts there is room for."""
    for number in range(100):
        try:
            put(queue, number, [f"{number}.{key}" for key in KEYS], timeout=0)
        except dray.DrayError as error:
            assert error.name == "EFULL", error
            return number
    raise AssertionError("the queue is never full")


def check_full(queue):
    """A put that finds no room takes back what results have of the queue, which is at most a quarter."""
    room = fill(queue)
    queue.clear("p")
    kept = []
    for seed in range(4):
        put(queue, seed)
        with queue.get("p", KEYS, framework="torch", copy=True) as batch:
            kept.append(batch["x"])
        queue.clear("p")
    del batch
    lent, status = len(queue._pins.lent), queue.status()
    assert 0 < lent < 4 and mappings() == lent and 0 < status["bytes"] <= status["capacity_bytes"] // 4
    found = fill(queue)
    assert found == room and not queue._pins.lent and not queue._pins.held, (found, room)
    for seed, found in enumerate(kept):
        assert (found.numpy() == values(seed)).all(), seed
        found += 1
    queue.clear("p")
    assert queue.status()["bytes"] == 0
    del found, kept
    gc.collect()
    assert not mappings()


with coordinator():
    with dray.Queue("own", tasks={"unused": ([], [])}, timeout=20, capacity_bytes=96 << 20) as own:
        check_written(own)
        own.clear("p")
        check_clear(own)
        check_fork(own)
        check_growth(own)
        check_full(own)
    closing = dray.Queue("own", tasks={"unused": ([], [])}, timeout=20, capacity_bytes=96 << 20)
    put(closing, 3)
    with closing.get("p", KEYS, copy=True) as rows:
        last = rows["x"][0]
    closing.close()
    assert (last == values(3)).all()
    refused("ECLOSED", closing.get, "p", KEYS)
    last[:] = 0
    survivor = dray.Queue("own", timeout=20)
    with survivor.get("p", KEYS, framework="torch", copy=True) as rows:
        left = rows["x"]
    survivor.close()
assert (left.numpy() == values(3)).all()  # the coordinator has ended, and its memory with it
left += 1
