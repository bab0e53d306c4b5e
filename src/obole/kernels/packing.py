"""What both implementations ask of the matrices of a product before they pack them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from obole.errors import ModelError
from obole.kernels.formats import BLOCKS
from obole.kernels.ops import Bias
from obole.types import WeightTensor


def check_parts(parts: Sequence[WeightTensor], biases: Sequence[Bias]) -> int:
    """The number of inputs that all `parts` share. Raises `ModelError` for parts that do not make one product."""
    if not parts or len(biases) != len(parts):
        raise ModelError(f"A product needs at least one matrix and as many biases, not {len(parts)} and {len(biases)}.")
    for part, bias in zip(parts, biases, strict=True):
        if part.kind not in BLOCKS:
            raise ModelError(
                f"Tensor {part.name!r} is of kind {part.kind}, which is not supported; supported are {', '.join(BLOCKS)}."
            )
        if len(part.shape) != 2:
            raise ModelError(f"Tensor {part.name!r} must be a matrix (out, in) but has the shape {part.shape}.")
        if part.shape[1] != parts[0].shape[1]:
            raise ModelError(
                f"Tensors {parts[0].name!r} {parts[0].shape} and {part.name!r} {part.shape} differ in their inputs "
                "and cannot be one product."
            )
        weights, size = BLOCKS[part.kind]
        expected = (part.shape[0], part.shape[1] // weights * size)
        if part.shape[1] % weights or part.data.dtype != np.uint8 or part.data.shape != expected:
            raise ModelError(
                f"Tensor {part.name!r} of kind {part.kind} and shape {part.shape} needs uint8 data {expected}, "
                f"not {part.data.dtype} {part.data.shape}."
            )
        if bias is not None and bias.shape != (part.shape[0],):
            raise ModelError(f"The bias of {part.name!r} must have the shape ({part.shape[0]},), not {bias.shape}.")
    return parts[0].shape[1]
