"""The GPU's conversions, quantisation and sums (those of the kernels' source as C, where the driver is
the fake one) against PyTorch and Python: test_kernels_python.py with another program."""
import os
import subprocess
import sys

program = os.path.join(os.environ["DRAY_BUILD_DIR"], "mover_helper_cuda")
if not os.path.exists(program):
    print("no program")
    sys.exit(77)
script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "test_kernels_python.py")
sys.exit(subprocess.run([sys.executable, script],
                        env=dict(os.environ, DRAY_TEST_KERNELS="mover_helper_cuda")).returncode)
