"""How many files of src a client executes in one steady operation: the fewer, the sooner its reader knows them.

    tests/house/soak_steady_files.py [--source FOLDER] [--build FOLDER] [--program DRAY] [--json]

compiles the library with --coverage, runs tests/house/steady.c against `dray serve` of PROGRAM, and prints for an insert,
claim and commit of the queue's client, and for a co-located update of an engine rank, the files with lines that were
executed, and the lines. FOLDER: another checkout, to compare with (this one's steady.c is compiled against it)."""
import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
MODEL = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-6,
         "rope_theta": 10000, "tie_word_embeddings": False, "max_position_embeddings": 128}
OPERATIONS = {"queue": "insert, claim, commit", "update": "update of an engine rank"}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=pathlib.Path, default=HERE.parents[1])
    parser.add_argument("--build", type=pathlib.Path)
    parser.add_argument("--program", type=pathlib.Path)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    a.source = a.source.resolve()
    a.build = (a.build or a.source / "build/coverage").resolve()
    a.program = (a.program or a.source / "build/release/dray").resolve()
    return a


def compile_all(a):
    """The library and steady.c, both counting; returns the program."""
    print(f"compiling {a.source} with --coverage ...", file=sys.stderr)
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    subprocess.run(["cmake", "-S", a.source, "-B", a.build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug",
                    "-DCMAKE_C_FLAGS=--coverage -O0", "-DBUILD_TESTING=OFF", "-DDRAY_PROGRAM=OFF", "-DDRAY_NVCC=OFF"], **quiet)
    subprocess.run(["cmake", "--build", a.build, "--target", "dray_static"], **quiet)
    libraries = subprocess.run(["pkg-config", "--libs", "libevent", "jansson", "libxxhash", "openssl", "liburing",
                                "libzstd", "hiredis"], check=True, capture_output=True, text=True).stdout.split()
    subprocess.run(["cc", "-std=gnu11", "-O0", "--coverage", f"-I{a.source}/include", HERE / "steady.c", a.build / "libdray.a",
                    "-o", a.build / "steady", *libraries, "-lpthread", "-ldl", "-lm"], **quiet)
    return a.build / "steady"


def executed(a, program, operation):
    """{file of src: executed lines}."""
    for counts in a.build.rglob("*.gcda"):
        counts.unlink()
    with tempfile.TemporaryDirectory(prefix="dray-steady-") as made:
        address = f"unix:{made}/socket"
        server = subprocess.Popen([a.program, "serve", "--listen", address], stdout=subprocess.DEVNULL)
        try:
            while not os.path.exists(f"{made}/socket"):
                if server.poll() is not None:
                    sys.exit(f"{a.program} serve ended with {server.returncode}")
                time.sleep(0.01)
            model = pathlib.Path(made) / "config.json"
            model.write_text(json.dumps(MODEL))
            subprocess.run([program, operation, *[model] * (operation == "update")], check=True, timeout=120, env=dict(os.environ, DRAY_ADDRESS=address))
        finally:
            server.terminate()
            server.wait()
    lines = collections.defaultdict(set)
    for counts in a.build.rglob("*.gcda"):
        text = subprocess.run(["gcov", "--json-format", "--stdout", counts], check=True, capture_output=True,
                              cwd=a.build).stdout
        for report in text.splitlines():
            for file in json.loads(report)["files"]:
                path = pathlib.Path(os.path.normpath(a.build / file["file"]))
                if a.source / "src" in path.parents:
                    lines[str(path.relative_to(a.source))] |= {one["line_number"] for one in file["lines"]
                                                              if one["count"]}
    return {path: len(found) for path, found in sorted(lines.items()) if found}


def main():
    a = parse()
    program = compile_all(a)
    for operation, title in OPERATIONS.items():
        found = executed(a, program, operation)
        row = {"operation": operation, "files": len(found), "sources": sum(path.endswith(".c") for path in found),
               "lines": sum(found.values())}
        if a.json:
            print(json.dumps({**row, "of": found}))
            continue
        print(f"{title}: {row['files']} files of src ({row['sources']} of them .c), {row['lines']} lines")
        for path, count in found.items():
            print(f"  {count:5}  {path}")


if __name__ == "__main__":
    main()
