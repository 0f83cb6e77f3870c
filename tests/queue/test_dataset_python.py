"""StreamDataLoader in torch's DataLoader: every row once, with four workers and with none; its length;
what comes out of a worker."""
import pickle
import time
from unittest import mock

from begin import needs

with needs:
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, IterableDataset

from python_fixture import coordinator, dray, refused, wrong

ROWS, COUNT = 50, 4
TASKS = {"train": (["x", "text"], []), "other": (["x"], []), "write": (["x"], ["y"]), "taken": (["n"], [])}


def fill(queue, partition):
    queue.insert({"x": [np.arange(i % 5, dtype=np.int64) + i for i in range(ROWS)],
                  "text": [f"row {i}" for i in range(ROWS)]}, partition, seal=True)


def check(partition, workers, start, framework):
    dataset = dray.StreamDataLoader("train", ["x", "text"], COUNT, partition=partition,
                                    framework=framework, timeout=120)
    assert isinstance(dataset, IterableDataset) and isinstance(dataset, dray.StreamDataLoader)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers,
                        multiprocessing_context=start if workers else None)
    assert len(dataset) == len(loader) == 13 and dataset
    seen, batches = [], 0
    for batch in loader:
        batches += 1
        for slot, row, text in zip(batch.slots.tolist(), batch.list("x"), batch.list("text")):
            assert row.tolist() == [i + slot for i in range(slot % 5)], (slot, row)
            assert text == f"row {slot}"
            seen.append(slot)
        if workers:
            refused("ECLOSED", batch.set_tag, "t", [1.0] * batch.rows)
    assert sorted(seen) == list(range(ROWS)), sorted(seen)
    assert workers or batches == 13
    dataset.close()


def rows_that_are_taken_back(queue):
    """A worker leaves a batch out that it could not commit, and goes on; with strict it says so."""
    for strict in (False, True):
        for partition in ("gone", "stays"):
            queue.insert({"n": np.arange(4)}, f"{partition}-{strict}", seal=True)
        loader = dray.StreamDataLoader("taken", ["n"], 2, timeout=1, ahead=2, strict=strict)
        seen, turns = [], iter(range(9))

        def dumps(batch):
            if next(turns) == 1:
                queue.clear(f"gone-{strict}")
            return pickle.dumps(batch)

        try:
            with mock.patch("dray.loader.pickle", mock.Mock(dumps=dumps, loads=pickle.loads)):
                for batch in loader._within_worker():
                    seen.append((batch.partition, *batch["n"][0]))
        except dray.DrayError as error:
            assert error.name == ("EGONE" if strict else "ETIMEDOUT"), error
        assert seen == [(f"gone-{strict}", 0, 1), (f"stays-{strict}", 0, 1), (f"stays-{strict}", 2, 3)][:1 if strict else 3], seen
        loader.close()


if __name__ == "__main__":
    with coordinator():
        with dray.Queue(tasks=TASKS, timeout=120) as queue:
            for i, (workers, start, framework) in enumerate(
                    ((0, None, "numpy"), (4, "fork", "numpy"), (4, "fork", "torch"),
                     (1, "spawn", "torch"))):
                fill(queue, f"p{i}")
                begin = time.monotonic()
                check(f"p{i}", workers, start, framework)
                queue.wait(f"p{i}", "train", timeout=20)
                assert time.monotonic() - begin < 110, "a worker waited for another one"
            queue.insert({"x": [np.arange(2)], "text": ["a"]}, "open")
            with dray.StreamDataLoader("other", ["x"], 1, partition="open") as loader:
                wrong(TypeError, "not sealed", len, loader)
            rows_that_are_taken_back(queue)
            with dray.StreamDataLoader("other", ["x"], 1) as loader:
                wrong(TypeError, "named", len, loader)
