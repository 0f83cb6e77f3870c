"""20,000 placements of quantised tensors, and as many times the rest of test_quant_torch.py."""
import os
import runpy

os.environ["DRAY_TEST_SCALE"] = "40"
runpy.run_path(os.path.join(os.path.dirname(os.path.abspath(__file__)), "test_quant_torch.py"),
               run_name="__main__")
