"""Rows of every kind go through `dray queue load`, `claim`, `read` and `commit` unchanged; Python's
own json and struct say what they must be."""
import json
import os
import socket
import struct
import subprocess
import tempfile

from begin import coordinator, rng, seed

program = os.environ["DRAY_PROGRAM"]


def dray(*arguments, **more):
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, **more)


def must(*arguments, **more):
    done = dray(*arguments, **more)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout


def f32(x):
    return struct.unpack("<f", struct.pack("<f", x))[0]


def text():
    return "".join(rng.choice("ab\\\"/\n\tä€😀 {}") for _ in range(rng.randrange(20)))


def row():
    return {
        "text": text(),
        "bytes": {"base64": __import__("base64").b64encode(rng.randbytes(rng.randrange(9))).decode()},
        "tokens": [rng.randrange(-2**31, 2**31) for _ in range(rng.randrange(6))],
        "long": rng.randrange(-2**63, 2**63),
        "logp": [f32(rng.uniform(-9, 9)) for _ in range(rng.randrange(4))],
        "score": rng.uniform(-1e300, 1e300),
        "done": rng.random() < 0.5,
    }


rows = [row() for _ in range(3000)]
with coordinator() as folder:
    must("queue", "open", "--task", "copy:" + ",".join(rows[0]) + ">again", "--task", "last:again")
    with open(f"{folder}/rows.jsonl", "w") as f:
        f.write("\n".join(json.dumps(r) for r in rows) + "\n\n")
    must("queue", "load", f"{folder}/rows.jsonl", "-p", "p", "-d", "tokens=i32", "-d", "logp=f32",
         "--seal")
    left = iter(rows)
    while True:
        done = dray("queue", "claim", "-t", "copy", "-p", "p", "-n", "700", "-o", "ordered")
        if done.returncode:
            break
        claim = done.stdout.strip()
        got = [json.loads(line) for line in must("queue", "read", claim).splitlines()]
        assert got
        for one in got:
            assert one == next(left), seed
        outputs = "".join(json.dumps({"again": one["text"]}) + "\n" for one in got)
        must("queue", "commit", claim, "-", input=outputs)
    assert next(left, None) is None, seed
    claim = must("queue", "claim", "-t", "last", "-n", "3000", "-o", "ordered").strip()
    with socket.socket(socket.AF_UNIX) as gone:  # asks, and does not wait for the answer
        gone.connect(claim)
        gone.sendall(b'{"do": "read"}')
    again = [json.loads(line)["again"] for line in must("queue", "read", claim).splitlines()]
    assert again == [r["text"] for r in rows], seed
    must("queue", "commit", claim)
    must("queue", "wait", "-p", "p", "-w", "20")
    for bad, why in [('{"tokens": [3000000000]}', "cannot hold"), ('{"x": null}', "expected"),
                     ('{"bytes": {"base64": "A"}}', "base64"), ("[1]", "object"),
                     ('{"a": 1}\n\0\0{"a": 2}', "line 2"), ('{"a": 1}\0{"a": 2}', "line 1"),
                     ('{"a": 1}\n{"a": "x"}', "row 2"), ('{"a": 1}\n{"b": 1}', "column")]:
        dtype = ["-d", "tokens=i32"] if "tokens" in bad else []
        done = dray("queue", "insert", "-p", "bad", *dtype, input=bad)
        assert done.returncode == 1 and why in done.stderr, (bad, done.stderr)
    with tempfile.TemporaryDirectory() as folder:  # opens as a file does, and cannot be read
        path = os.path.join(folder, "rows")
        with open(path, "w") as file:
            file.write('{"a": 1}\n')
        done = dray("queue", "load", "-p", "bad", "--seal", path, folder)
        assert done.returncode == 1 and f"{folder}, behind line 0: Is a directory" in done.stderr, done
    assert '"bad"' not in must("queue", "stat", "--json")
    done = dray("queue", "insert", "-p", "bad", "-T", "step", input='{"a": 1, "step": 1}\n{"a": 1}')
    assert done.returncode == 1 and "row 2 has no number 'step'" in done.stderr, done.stderr
    # `insert` puts all rows or none, also where they are more than `load` puts at a time.
    must("queue", "open", "--queue", "small", "--task", "t:a", "--capacity-rows", "1500")
    small = ("queue", "insert", "--queue", "small", "-p", "p")
    done = dray(*small, input="".join('{"a": %d}\n' % i for i in range(1501)))
    assert done.returncode == 1, done.stderr
    assert json.loads(must("queue", "stat", "--queue", "small", "--json"))["rows"] == 0
    must(*small, input="".join('{"a": %d}\n' % i for i in range(1500)))
    assert json.loads(must("queue", "stat", "--queue", "small", "--json"))["rows"] == 1500
    done = dray("keeper", env=dict(os.environ, DRAY_DATA_ADDRESS="1" * 80))
    assert done.returncode == 2 and "$DRAY_DATA_ADDRESS" in done.stderr, done.stderr
    done = dray("keeper", env={k: v for k, v in os.environ.items() if k != "DRAY_ADDRESS"})
    assert done.returncode == 2 and "$DRAY_ADDRESS" in done.stderr, done.stderr
