"""Takes a checkpoint's tensors into the kernels' layouts, one at a time, so that the file is read once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from obole.errors import ModelError
from obole.kernels.formats import UNQUANTISED, dequantize
from obole.kernels.ops import Linear, Ops
from obole.layers.linear import Adapter, Product
from obole.types import WeightTensor
from obole.weights.checkpoint import Checkpoint
from obole.weights.kinds import row_bytes
from obole.weights.quantize import quantized

KEPT_BYTES = 24 << 20  # of the file, read and packed but not yet dropped: else it would be in memory twice

Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Loader:
    checkpoint: Checkpoint
    ops: Ops
    progress: Progress | None = None
    quantize: bool = False  # matrices that are not quantised yet
    _done: int = 0
    _kept: int = 0
    _total: int = field(init=False)

    def __post_init__(self) -> None:
        self._total = self.checkpoint.nbytes

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """One product for several matrices with the same input: their outputs stand side by side.

        With `bias`, each matrix "x.weight" has a vector "x.bias".
        """
        parts = [self._matrix(name) for name in names]
        biases = [self.array(name.removesuffix("weight") + "bias") if bias else None for name in names]
        return self.ops.pack_linear(parts, biases, self._read)

    def _matrix(self, name: str) -> WeightTensor:
        tensor = self._take(name)
        return quantized(tensor) if self.quantize and tensor.kind in UNQUANTISED else tensor

    def product(self, adapted: str, *names: str, bias: bool = False) -> Product:
        """The same inside a layer, with the checkpoint's adapter by the name `adapted`, if it has one."""
        weights = self.linear(*names, bias=bias)
        multi_token = self.checkpoint.config.multi_token
        down, up = (self.checkpoint.adapter.get(f"{adapted}.lora_{side}") for side in "AB")
        if down is None or up is None or multi_token is None:
            return Product(weights)
        first, second = (self.ops.pack_linear([tensor], [None], self._read) for tensor in (down, up))
        return Product(weights, Adapter(first, second, multi_token.mask_id))

    def _read(self, nbytes: int) -> None:
        self._kept += nbytes
        if self._kept > KEPT_BYTES:
            self.checkpoint.drop_pages()
            self._kept = 0

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight as float32 (n,)."""
        return torch.from_numpy(self.array(name))

    def array(self, name: str) -> np.ndarray:
        """A small tensor as float32, flattened; a copy that does not need the file."""
        return np.array(dequantize(self._take(name)), dtype=np.float32).reshape(-1)

    def _take(self, name: str) -> WeightTensor:
        tensor = self.checkpoint.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.checkpoint.path}: tensor {name!r} is missing.")
        self._done += math.prod(tensor.shape[:-1]) * row_bytes(tensor.kind, tensor.shape[-1])
        if self.progress is not None:
            self.progress("packing", self._done, self._total)
        return tensor
