"""Runs a test again with its tensors in GPU memory: with the fake driver, where DRAY_TEST_CUDA=real does not ask for the GPUs'
own. (The fake driver must be there before the process begins.)"""
import ctypes
import os
import subprocess
import sys
import tempfile


def run_on_gpu(script):
    """Ends this process with the exit status of tests/weights/SCRIPT."""
    environment = dict(os.environ, DRAY_TEST_KIND="cuda")
    command = [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), script)]
    if os.environ.get("DRAY_TEST_CUDA") == "real":
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError as missing:
            print(missing)
            sys.exit(77)
        sys.exit(subprocess.run(command, env=environment).returncode)
    fake = os.environ.get("DRAY_FAKE_CUDA", "")
    if not os.path.exists(fake):
        print("no fake driver")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as cache, tempfile.NamedTemporaryFile(dir="/dev/shm") as state:
        environment.update(DRAY_CUDA_LIBRARY=fake, DRAY_NVRTC_LIBRARY=fake, FAKE_CUDA_STATE=state.name,
                           FAKE_CUDA_DEVICES="2", XDG_CACHE_HOME=cache)
        if os.environ.get("DRAY_FAKE_NCCL"):  # machines with GPUs have NCCL, too
            environment.setdefault("DRAY_NCCL_LIBRARY", os.environ["DRAY_FAKE_NCCL"])
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        sys.exit(subprocess.run(command, env=environment).returncode)
