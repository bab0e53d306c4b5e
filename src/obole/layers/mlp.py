"""The gated MLP's activation, by the name that the configuration gives it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from obole.errors import ModelError
from obole.kernels.ops import Ops


def gated_activation(ops: Ops, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """(R, 2F) gate beside up -> (R, F) activation(gate) * up. Raises `ModelError` for an unknown name."""
    match name:
        case "silu":
            return ops.silu_mul
        case "gelu_tanh":
            return ops.gelu_tanh_mul
        case other:
            raise ModelError(f"Activation {other!r} is not supported (silu and gelu_tanh are).")
