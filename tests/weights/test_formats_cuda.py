"""test_formats_torch.py with tensors in GPU memory: quantised by GPUs."""
from on_gpu import run_on_gpu

run_on_gpu("test_formats_torch.py")
