#!/usr/bin/env python3
"""Compares a claim, a read and a commit of 32 rows from Python with the C calls that they consist of. Prints a row in
the form of bench/rows.h, with the medians. Needs numpy and cc; without them the row says that it is skipped.

    [DRAY_PROGRAM=build/release/dray] python3 bench/queue_python.py [--json] [--strict] [--quick]"""
import argparse
import ctypes as c
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

NAME, ROWS, TARGET, BLOCK = "claim, read 4 columns, commit 32 rows", 32, 2.0, 20
COLUMNS = ["prompt", "tokens", "logprobs", "reward"]
source = pathlib.Path(__file__).resolve().parents[1]
program = os.environ.get("DRAY_PROGRAM", str(source / "build/release/dray"))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    parser.add_argument("--strict", action="store_true", help="exit 1 when the target is missed")
    parser.add_argument("--quick", action="store_true", help="few rounds: does it run at all?")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="times 200 rounds")
    return parser.parse_args()


def show(options, value=None, limit=None, spread=None, samples=None, skipped=None):
    """Prints the row. Returns the program's exit status."""
    ok = skipped is not None or value <= TARGET * limit
    if options.json:
        figure = {"skipped": skipped} if skipped else {"value": value, "unit": "s"}
        print(json.dumps({"bench": "python", "name": NAME, **figure, "limit": limit,
                          "ratio": value and value / limit, "target": TARGET, "ok": ok,
                          "samples": samples, "spread": spread}, separators=(",", ":")))
    else:
        print(f"{'python':{len(NAME)}}  {'value':>12}  {'spread':>7}  {'limit':>12}  {'ratio':>7}  "
              f"{'target':>9}")
        print(f"{NAME}  skipped: {skipped}" if skipped else
              f"{NAME}  {value * 1e6:9.3g} us  {spread:7.0%}  {limit * 1e6:9.3g} us  "
              f"{value / limit:7.3g}  {f'<= {TARGET:g}':>9}  {'ok' if ok else 'MISSED'}")
    return int(options.strict and not ok)


def c_loop(folder, library):
    built = f"{folder}/loop.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-I", str(source / "include"), "-o", built,
                    str(source / "bench/queue_python.c"), library,
                    f"-Wl,-rpath,{os.path.dirname(os.path.abspath(library))}"], check=True)
    return c.CDLL(built).claim_and_commit


def timed(function):
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def fill(np, queue, blocks):
    tokens = [np.arange(100 + i, dtype=np.int32) for i in range(ROWS)]
    for i in range(blocks):
        queue.insert({"prompt": ["What is 2 + 2?"] * ROWS, "tokens": tokens,
                      "logprobs": [t.astype(np.float32) for t in tokens],
                      "reward": np.zeros(ROWS, np.float32)}, f"p{i}", seal=True)


def measure(options, np, dray, loop):
    """Measures blocks of rounds in C and in Python. They are interleaved, so that the machine's other load affects both
    alike."""
    names = (c.c_char_p * len(COLUMNS))(*(name.encode() for name in COLUMNS))
    room = c.create_string_buffer(1 << 20)
    rounds = 3 * BLOCK if options.quick else max(1, options.repeat) * 200
    with dray.Queue("bench", tasks={"c": (COLUMNS, []), "python": (COLUMNS, [])}) as queue:
        def in_c():
            if loop(queue._session.queue, b"c", ROWS, names, len(COLUMNS), room, len(room)):
                raise RuntimeError("the C calls failed")

        def in_python():
            with queue.claim("python", ROWS) as batch:
                for name in COLUMNS:
                    batch[name]
        took = {in_c: [], in_python: []}
        fill(np, queue, rounds)
        for _ in range(0, rounds, BLOCK):
            for function, times in took.items():
                times += [timed(function) for _ in range(BLOCK)]
    limit, found = (times[BLOCK:] for times in took.values())
    low, value, high = statistics.quantiles(found)
    return show(options, value, statistics.median(limit), (high - low) / value, len(found))


def main():
    options = arguments()
    sys.path.insert(0, str(source / "python"))
    try:
        import numpy as np
    except ImportError as missing:
        return show(options, skipped=str(missing))
    if not shutil.which("cc"):
        return show(options, skipped="no cc")
    import dray
    from dray import _library
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DRAY_ADDRESS"] = f"unix:{folder}/s"
        server = subprocess.Popen([program, "serve", "--listen", f"unix:{folder}/s"],
                                  stdout=subprocess.PIPE, text=True)
        try:
            server.stdout.readline()
            return measure(options, np, dray, c_loop(folder, _library.library_path()))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    sys.exit(main())
