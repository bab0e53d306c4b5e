"""Matrices to 8 bits while they are loaded, for models that come unquantised."""

from __future__ import annotations

import numpy as np

from obole.kernels.formats import GROUP, dequantize
from obole.types import WeightTensor

LARGEST = 127


def quantized(tensor: WeightTensor) -> WeightTensor:
    """A matrix as Q8_0: groups of 32 weights, code times a half-precision scale, the largest magnitude being 127 times that.

    The bytes are those of ggml (`quantize_row_q8_0_ref` in ggml-quants.c). A matrix whose rows are no whole groups stays as it
    is, and so does one with a weight that is not finite or whose scale would be beyond half precision.
    """
    if tensor.shape[-1] % GROUP:
        return tensor
    groups = dequantize(tensor).reshape(-1, GROUP)
    largest = np.abs(groups).max(axis=1)
    if not largest.max(initial=0.0) <= LARGEST * float(np.finfo(np.float16).max):
        return tensor
    scale = (largest / np.float32(LARGEST)).astype(np.float32)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    scaled = groups * inverse[:, None]
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)  # halves away from zero
    data = np.empty((len(groups), 2 + GROUP), dtype=np.uint8)
    data[:, :2] = scale.astype(np.float16)[:, None].view(np.uint8)
    data[:, 2:] = codes.view(np.uint8)
    return WeightTensor(tensor.name, "Q8_0", tensor.shape, data.reshape(tensor.shape[0], -1))
