"""What docs/python.md shows works: its blocks run in one process, in their order, beside a coordinator;
and the examples in Python end well."""
import glob
import os
import re
import subprocess
import sys
import tempfile

try:
    import numpy  # noqa: F401
    import torch  # noqa: F401
except ImportError as missing:
    print(missing)
    sys.exit(77)

source, program = os.environ["DRAY_SOURCE_DIR"], os.environ["DRAY_PROGRAM"]
with open(os.path.join(source, "docs", "python.md"), encoding="utf-8") as page:
    text = page.read()
blocks = [(text[:m.start()].count("\n") + 2, m[1]) for m in
          re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)]
assert blocks, "no blocks"
# Each block where it stands in the page, so that tracebacks name its lines.
code = ""
for line, block in blocks:
    code += "\n" * (line - 1 - code.count("\n")) + block

with tempfile.TemporaryDirectory() as folder:
    environment = dict(os.environ, DRAY_ADDRESS=f"unix:{folder}/s", XDG_RUNTIME_DIR=folder,
                       PYTHONPATH=os.path.join(source, "python"))
    with open(f"{folder}/python.md", "w", encoding="utf-8") as script:
        script.write(code)
    server = subprocess.Popen([program, "serve", "--listen", f"unix:{folder}/s"],
                              stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline().startswith("listening")
        subprocess.run([sys.executable, f"{folder}/python.md"], env=environment, cwd=folder,
                       check=True, timeout=120)
        for example in sorted(glob.glob(os.path.join(source, "examples", "*.py"))):
            if os.path.basename(example) == "grpo.py":
                continue  # which learns for a minute: soak_docs.sh
            print(os.path.basename(example), flush=True)
            subprocess.run([sys.executable, example], env=environment, cwd=folder, check=True,
                           timeout=120)
    finally:
        server.terminate()
        server.wait(timeout=60)
