"""test_fsdp_python.py with FSDP1: flat parameters in f32, engines in bf16."""
import os
import subprocess
import sys

script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "test_fsdp_python.py")
sys.exit(subprocess.run([sys.executable, script],
                        env=dict({"DRAY_TEST_STEPS": "4"}, DRAY_TEST_FSDP="1", **os.environ))
         .returncode)
