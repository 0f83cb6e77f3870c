"""numpy's arrays with what dray.weights asks of a tensor: so it does without PyTorch where none is meant."""
import sys

import numpy as np


class _Storage:
    """The memory of the array that others are views of."""

    def __init__(self, array):
        while isinstance(array.base, np.ndarray):
            array = array.base
        reach = [(n - 1) * stride if array.size else 0 for n, stride in zip(array.shape, array.strides)]
        self._kept = array
        self._at = array.ctypes.data + sum(r for r in reach if r < 0)
        self._bytes = sum(abs(r) for r in reach) + array.itemsize if array.size else 0

    def data_ptr(self):
        return self._at

    def nbytes(self):
        return self._bytes


class Array:
    is_cuda, _base = False, None

    def __init__(self, values):
        if not isinstance(values, np.ndarray):
            raise TypeError(f"a tensor or a numpy array expected, found {type(values).__name__}")
        masked = sys.modules.get("numpy.ma")  # nobody has one where it was not imported
        if masked and isinstance(values, masked.MaskedArray):
            raise TypeError("an array without a mask expected, as masks are not moved, found a MaskedArray")
        self._values = values
        self.dtype, self.shape, self.writeable = values.dtype, values.shape, values.flags.writeable

    def detach(self):
        return self

    def untyped_storage(self):
        return _Storage(self._values)

    def data_ptr(self):
        return self._values.ctypes.data

    def stride(self):
        """In elements."""
        if any(s % self._values.itemsize for s in self._values.strides):
            raise TypeError("an array whose strides are multiples of its elements expected, found "
                            f"{self._values.strides} bytes for {self.dtype}")
        return tuple(s // self._values.itemsize for s in self._values.strides)

    def is_neg(self):
        """PyTorch's negative bit."""
        return False

    def element_size(self):
        return self._values.itemsize

    def numel(self):
        return self._values.size

    def dim(self):
        return self._values.ndim

    def is_contiguous(self):
        return self._values.flags.c_contiguous
