"""What record_real does, with SGLang's own models and loaders."""
import importlib.util
import os
import pathlib
import subprocess
import sys

if importlib.util.find_spec("sglang") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "sglang==0.5.23"], check=True)
folder = pathlib.Path(__file__).resolve().parents[1] / "record_real"
sys.exit(subprocess.run([sys.executable, folder / "test.py", "sglang"], env=os.environ, check=False).returncode)
