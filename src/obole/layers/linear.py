"""A product inside a layer, with what is added to it at masks where a model was taught several tokens by a low-rank adapter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from obole.kernels.ops import Linear, Ops
from obole.layers.batch import Batch


@dataclass(frozen=True, slots=True)
class Adapter:
    """x -> up(down(x)), for the rows of `mask_id` alone: all others are computed as without it, bit for bit."""

    down: Linear
    up: Linear
    mask_id: int


@dataclass(frozen=True, slots=True)
class Product:
    weights: Linear
    adapter: Adapter | None = None

    @property
    def nbytes(self) -> int:
        """What a pass over masks reads, and any other without the adapter."""
        return self.weights.nbytes + (0 if self.adapter is None else self.adapter.down.nbytes + self.adapter.up.nbytes)


def project(ops: Ops, x: torch.Tensor, product: Product, batch: Batch) -> torch.Tensor:
    """(R, in) -> (R, out)."""
    out = ops.linear(x, product.weights)
    adapter = product.adapter
    if adapter is not None:
        ops.adapt_(out, x, adapter.down, adapter.up, batch.token_ids, adapter.mask_id)
    return out
