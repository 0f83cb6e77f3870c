"""test_quant_torch.py with tensors in GPU memory: quantised, and made floats of, by GPUs."""
from on_gpu import run_on_gpu

run_on_gpu("test_quant_torch.py")
