#!/usr/bin/env python3
"""Compares TransferQueue (PyPI's, with SimpleStorage and Ray) with dray.compat.transfer_queue. The same TensorDicts are
put by kv_batch_put, got by kv_batch_get as memory that may be written to, and cleared. Each library has a process of
its own. Their rounds are interleaved, so that the machine's other load affects both alike. The values that were got are
compared once with those that were put. A row has the medians of put and get of both libraries, and the ratio of their
sums. Another row, of dray alone, compares 1 GiB in 32 columns with the same bytes in one.

    build/frameworks/tq_real/venv/bin/python bench/peers/samples.py [--json] [--strict] [--alone] [--rounds N] [--mib N]

The environment is that of `tests/frameworks/run.py tq_real`: dray's wheel, TransferQueue and torch."""
import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time

ROWS, FASTER, OF_ONE = 256, 10.0, 0.9


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="an object a row instead of a table")
    parser.add_argument("--strict", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--alone", action="store_true", help="without TransferQueue: the row of 32 columns")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of each, behind one that is not counted")
    parser.add_argument("--mib", type=int, default=256, metavar="N", help="MiB of each of the 8 columns; four times as many of the 32 and of the one")
    return parser.parse_args()


def columns(torch, count, mib):
    """Returns a TensorDict's fields: `count` columns of `mib` MiB each."""
    generator = torch.Generator().manual_seed(count)
    return {f"c{i}": torch.randint(-9, 9, (ROWS, (mib << 20) // 4 // ROWS), generator=generator, dtype=torch.int32)
            for i in range(count)}


def ragged(torch):
    """Returns a step's samples: 512 prompts with their answers, and the tasks' outputs for each token."""
    generator = torch.Generator().manual_seed(3)

    def lengths(low, high):
        return torch.randint(low, high, (512,), generator=generator).tolist()

    def column(sizes, dtype):
        return torch.nested.as_nested_tensor([torch.randint(0, 99, (n,), generator=generator).to(dtype) for n in sizes],
                                             layout=torch.jagged)
    prompt, answer = lengths(64, 1024), lengths(128, 8192)
    return {"prompt": column(prompt, torch.int64), "answer": column(answer, torch.int64),
            **{name: column(answer, torch.float32) for name in ("logprobs", "old", "reference", "advantages")},
            "mask": column(answer, torch.bool), "reward": torch.rand(512, generator=generator)}


def of(torch, shape, mib):
    return ragged(torch) if shape == "ragged" else columns(torch, shape, mib if shape == 8 else max(1, mib * 4 // shape))


def worker(pipe, kind, mib):
    """Does a round of each shape that it receives, and sends the seconds of put and get."""
    import torch
    from tensordict import TensorDict
    torch.set_num_threads(1)
    if kind == "dray":
        import dray.compat.transfer_queue as tq
        tq.init()
    else:
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_raylet_start_wait_time_s="300")  # on a busy machine
        import ray
        ray.init(num_cpus=8,  # its actors ask for one each
                 include_dashboard=False, log_to_driver=False)
        import transfer_queue as tq
        tq.init()
    made, data = None, None
    pipe.send("ready")
    while (shape := pipe.recv()) is not None:
        if shape != made:
            made, fields = shape, of(torch, shape, mib)
            data = TensorDict(fields, batch_size=[512 if shape == "ragged" else ROWS])
            first = True
        keys = [f"k{row}" for row in range(data.batch_size[0])]
        begun = time.perf_counter()
        tq.kv_batch_put(keys, "step", data, [{}] * len(keys))
        put = time.perf_counter()
        found = tq.kv_batch_get(keys, "step", list(data.keys()))
        for name in data.keys():
            values = found[name].values() if found[name].is_nested else found[name]
            if first:
                wanted = data[name].values() if data[name].is_nested else data[name]
                assert torch.equal(values.reshape(-1), wanted.reshape(-1)), name
            values.view(-1)[:1].zero_()
        got = time.perf_counter()
        first = False
        del found, values
        tq.kv_clear(keys, "step")
        pipe.send((put - begun, got - put))
    tq.close()
    pipe.send("closed")


class Side:
    def __init__(self, kind, mib):
        self.pipe, there = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=worker, args=(there, kind, mib))
        self.process.start()
        there.close()
        self.pipe.recv()

    def round(self, shape):
        self.pipe.send(shape)
        return self.pipe.recv()

    def close(self):
        self.pipe.send(None)
        self.pipe.recv()
        self.process.join()


def median(times):
    return [statistics.median(each) for each in zip(*times)]


def show(options, name, value, limit, ratio, target):
    ok = ratio >= target
    if options.json:
        print(json.dumps({"bench": "transfer_queue", "name": name, "value": sum(value), "unit": "s", "put": value[0], "get": value[1],
                          "limit": sum(limit), "ratio": ratio, "target": target, "ok": ok}), flush=True)
    else:
        print(f"{name:40}  {value[0] * 1e3:7.1f} + {value[1] * 1e3:7.1f} ms  beside {limit[0] * 1e3:8.1f} + {limit[1] * 1e3:8.1f} ms  "
              f"{ratio:6.3g}  {f'>= {target:g}':>7}  {'ok' if ok else 'MISSED'}", flush=True)
    return ok


def main():
    options = arguments()
    ours, found = Side("dray", options.mib), {}
    theirs = None if options.alone else Side("upstream", options.mib)
    for shape in () if options.alone else (8, "ragged"):
        times = {ours: [], theirs: []}
        for _ in range(options.rounds + 1):
            for side in times:
                times[side].append(side.round(shape))
        found[shape] = [median(each[1:]) for each in times.values()]
    turns = {1: [], 32: []}
    for _ in range(options.rounds + 1):
        for shape, times in turns.items():
            ours.round(shape)
            times.append(ours.round(shape))
    one, many = (median(turns[shape][1:]) for shape in (1, 32))
    for side in (ours, theirs):
        if side:
            side.close()
    names = {8: f"8 columns of {options.mib} MiB", "ragged": "8 ragged columns of 512 samples"}
    ok = [*(show(options, names[shape], *both, sum(both[1]) / sum(both[0]), FASTER) for shape, both in found.items()),
          show(options, f"32 columns, beside 1, {4 * options.mib} MiB", many, one, sum(one) / sum(many), OF_ONE)]
    return int(options.strict and not all(ok))


if __name__ == "__main__":
    sys.exit(main())
