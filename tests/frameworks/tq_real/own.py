"""Ours: what TransferQueue's tests do not ask, and the commands of docs/transfer-queue.md."""
import multiprocessing
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile

import torch
from tensordict import NonTensorStack, TensorDict

import dray

SEED = int(os.environ.get("DRAY_TEST_SEED", random.randrange(1 << 30)))
DRAW = random.Random(SEED)
PROCESSES = multiprocessing.get_context("forkserver")  # torch is imported once for all of them
PROCESSES.set_forkserver_preload(["dray.compat.transfer_queue", "tensordict"])


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return a == b


def rows_come_back(tq):
    """Columns of several dtypes, shapes and kinds, some put again, against plain dicts."""
    model, dtypes = {}, [torch.float32, torch.int64, torch.bfloat16, torch.bool]
    for _ in range(40):
        keys = DRAW.sample([f"k{number}" for number in range(12)], DRAW.randrange(1, 6))
        columns = {}
        for name in DRAW.sample("abcd", 2):
            dtype, kind = DRAW.choice(dtypes), DRAW.randrange(5)
            shapes = [(3,), (DRAW.randrange(4),), (2, DRAW.randrange(1, 4)), (), None]
            each = []
            for _ in keys:
                shape = (DRAW.randrange(1, 5),) if kind == 1 else (DRAW.randrange(1, 3), DRAW.randrange(1, 3)) if kind == 2 else shapes[kind]
                each.append({"x": DRAW.randrange(9)} if shape is None else torch.randint(0, 2, shape).to(dtype))
            columns[name] = each
        def column(each):
            if not isinstance(each[0], torch.Tensor):
                return NonTensorStack(*each)
            if len({value.shape for value in each}) == 1:
                return torch.stack(each)
            return torch.nested.as_nested_tensor(each, layout=torch.strided)
        tags = [{"n": DRAW.randrange(99)} for _ in keys]
        tq.kv_batch_put(keys, "model", TensorDict({name: column(each) for name, each in columns.items()}, batch_size=len(keys)), tags)
        for row, key in enumerate(keys):
            model.setdefault(key, ({}, {}))
            model[key][0].update({name: each[row] for name, each in columns.items()})
            model[key][1].update(tags[row])
        if DRAW.random() < 0.3:
            gone = DRAW.choice(list(model))
            tq.kv_clear([gone, "nowhere"], "model")
            del model[gone]
        assert tq.kv_list("model").get("model", {}) == {key: tag for key, (_, tag) in model.items()}
        for key, (fields, _) in model.items():
            got = tq.kv_batch_get(key, "model")
            assert set(got.keys()) == set(fields), (key, set(got.keys()), set(fields))
            for name, value in fields.items():
                found = got.get(name)
                found = found.unbind()[0] if isinstance(found, torch.Tensor) else found.tolist()[0]
                assert same(found, value), (key, name, found, value)
    tq.get_client().clear_partition("model")


def results_are_ones_own(tq):
    """Large columns, which are not copied before they are written to: what one writes the other does not see, and clearing
    and putting anew changes neither. Columns whose rows are as long can be added up."""
    def data(seed):
        dense = torch.arange(1 << 20).reshape(8, -1) * 5 + seed
        ragged = torch.nested.as_nested_tensor([row[:row.numel() - 7 * number] for number, row in enumerate(dense)], layout=torch.jagged)
        return TensorDict({"dense": dense, "ragged": ragged, "more": ragged + 1, "small": dense[:, 0]}, batch_size=8)

    def equal(found, wanted):
        return all(torch.equal(a, b) for a, b in zip(found.unbind(), wanted.unbind()))
    keys = [f"k{row}" for row in range(8)]
    tq.kv_batch_put(keys, "own", data(1))
    mine, theirs = (tq.kv_batch_get(keys, "own") for _ in range(2))
    for name in ("dense", "ragged", "more"):
        mine[name].values().mul_(-1)
    total = theirs["ragged"] + theirs["more"]
    tq.kv_clear(keys, "own")
    for seed in range(2, 6):
        tq.kv_batch_put(keys, "own", data(seed))
        tq.kv_clear(keys, "own")
    for name, wanted in data(1).items():
        assert equal(theirs[name], wanted), name
        assert name == "small" or equal(mine[name], wanted * -1), name
    assert equal(total, data(1)["ragged"] * 2 + 1)
    kept = theirs["ragged"].unbind()[3]
    del mine, theirs
    tq.kv_batch_put(keys, "own", data(9))
    tq.kv_clear(keys, "own")
    assert torch.equal(kept, data(1)["ragged"].unbind()[3])


def fetcher(pipe, what):
    tq = client_module()
    meta = tq.get_client().get_meta(["x"], 4, "acked", task_name="t", ack=True)
    pipe.send((meta.size, sorted(tq.get_client().get_data(meta)["x"].tolist())))
    if what == "settle":
        tq.get_client().ack(meta)
    elif what == "die":
        os.kill(os.getpid(), signal.SIGKILL)


def client_module():
    """For a process of this test: the queue that the first one made."""
    import dray.compat.transfer_queue as tq
    tq.init()
    return tq


def started(what, *arguments):
    """A process, and where it says what it found."""
    pipe, there = PROCESSES.Pipe()
    process = PROCESSES.Process(target=what, args=(there, *arguments))
    process.start()
    there.close()
    return process, pipe


def fetch(what):
    process, pipe = started(fetcher, what)
    found = pipe.recv()
    process.join(120)
    assert process.exitcode == (-signal.SIGKILL if what == "die" else 0), process
    return found


def dead_fetchers(tq):
    """What a killed process had fetched with ack=True is fetched again, once, and what was acknowledged is not."""
    tq.get_client().put(TensorDict({"x": torch.arange(8)}, batch_size=8), partition_id="acked")
    first = fetch("die")
    assert first == (4, [0, 1, 2, 3]), first
    assert fetch("settle") == first
    assert fetch("settle") == (4, [4, 5, 6, 7])
    assert tq.get_client().check_consumption_status("t", "acked")
    assert tq.get_client().get_meta(["x"], 4, "acked", task_name="t", ack=True).size == 0
    tq.get_client().clear_partition("acked")


def rank(pipe, dp_rank):
    tq = client_module()
    parts = iter(tq.StreamingDataLoader(tq.StreamingDataset(None, 4, 2, ["x"], "ranks", "t", dp_rank)))
    pipe.send([sorted(value for _ in range(2) for value in next(parts)[0]["x"].tolist()) for _ in range(2)])


def ranks(tq):
    """Processes of one dp_rank get the same batches, those of others different ones: RankAwareSampler's state is shared."""
    tq.get_client().put(TensorDict({"x": torch.arange(16)}, batch_size=16), partition_id="ranks")
    processes = [started(rank, dp_rank) for dp_rank in (0, 0, 1, 1)]
    found = [pipe.recv() for _, pipe in processes]
    for process, _ in processes:
        process.join(120)
    assert found[0] == found[1] and found[2] == found[3], found
    assert sorted(sum(found[0] + found[2], [])) == list(range(16)), found


def checkpoints(tq):
    """Rows without keys, of several shapes, and what was consumed; a changed file changes nothing."""
    client = tq.get_client()
    client.put(TensorDict({"x": torch.arange(6), "o": NonTensorStack(*[{"i": i} for i in range(6)])}, batch_size=6),
               partition_id="kept")
    tq.kv_put("k", "kept", {"x": torch.ones(2, 3)}, {"a": 1})
    assert client.get_meta(["x", "o"], 2, "kept", task_name="t").size == 2
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "c")
        tq.save_checkpoint(path, metadata={"step": 3})
        client.clear_partition("kept")
        tq.load_checkpoint(path)
        assert client.get_consumption_status("t", "kept")[1].sum() == 2
        assert tq.kv_list("kept") == {"kept": {"k": {"a": 1}}}
        meta = client.get_meta(["x", "o"], 4, "kept", task_name="t")
        assert client.get_data(meta)["o"].tolist() == [{"i": i} for i in range(2, 6)], client.get_data(meta)["o"]
        rows = path / "rows"
        data = bytearray(rows.read_bytes())
        data[DRAW.randrange(len(data))] ^= 1 << DRAW.randrange(8)
        rows.write_bytes(bytes(data))
        try:
            tq.load_checkpoint(path)
            raise SystemExit("a checkpoint that was changed was loaded")
        except ValueError:
            assert tq.kv_list("kept") == {"kept": {"k": {"a": 1}}}
    client.clear_partition("kept")


def documentation():
    """The page's blocks, in their order, in one process."""
    text = (pathlib.Path(os.environ["DRAY_SOURCE_DIR"]) / "docs/transfer-queue.md").read_text()
    blocks = re.findall(r"^```python tq\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) >= 4
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 0 and "{'a': {'uid': 7, 'score': 1.0}, 'b': {'uid': 8}}" in done.stdout, done


def main():
    print(f"seed {SEED}")
    documentation()
    with dray.serve():
        import dray.compat.transfer_queue as tq
        for sampler, checks in (("SequentialSampler", (rows_come_back, results_are_ones_own, dead_fetchers, checkpoints)), ("RankAwareSampler", (ranks,))):
            tq.init({"controller": {"sampler": sampler, "polling_mode": True}})
            for check in checks:
                check(tq)
                print(check.__name__, flush=True)
            tq.close()
    assert not [name for name in sys.modules if name in ("ray", "zmq", "transfer_queue")]


if __name__ == "__main__":
    main()
