"""Random matrices in every encoding, and the implementations that this machine can run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from obole.errors import ConfigError
from obole.kernels.cpu import ISAS
from obole.kernels.dispatch import load_ops
from obole.kernels.formats import BLOCKS
from obole.kernels.ops import Ops
from obole.types import WeightTensor

KINDS = tuple(BLOCKS)
QUANTISED = tuple(kind for kind in KINDS if kind.startswith("Q"))
# where a block holds half-precision scales: byte offsets
_SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


def native(threads: int = 2, isa: str | None = None) -> Ops:
    return load_ops("native", threads, isa)


def runnable_isas() -> list[str]:
    found = []
    for isa in ISAS:
        try:
            load_ops("native", 1, isa)
        except ConfigError:
            continue
        found.append(isa)
    return found


ISAS_HERE = runnable_isas()
REFERENCE = load_ops("reference", 1)


def weights(kind: str, outputs: int, inputs: int, seed: int = 0, scale: float = 0.02) -> WeightTensor:
    """Random codes under random scales."""
    rng = np.random.default_rng([seed, outputs, inputs])
    size, width = BLOCKS[kind]
    if not kind.startswith("Q"):
        values = (rng.standard_normal((outputs, inputs)) * scale).astype(np.float32)
        data: np.ndarray[Any, Any] = values
        if kind == "F16":
            data = values.astype(np.float16)
        elif kind == "BF16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16)
        data = data.view(np.uint8).reshape(outputs, inputs * width)
        return WeightTensor(f"{kind}.weight", kind, (outputs, inputs), data)
    blocks = rng.integers(0, 256, (outputs * inputs // size, width), dtype=np.uint8)
    for at in _SCALES[kind]:
        halves = (rng.standard_normal(len(blocks)) * scale / (40 if kind.endswith("K") else 1)).astype(np.float16)
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    return WeightTensor(f"{kind}.weight", kind, (outputs, inputs), blocks.reshape(outputs, -1))


def activations(rows: int, n: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different sizes, with whole groups of zeros here and there."""
    rng = np.random.default_rng([seed, rows, n])
    x = rng.standard_normal((rows, n)) * np.exp(rng.uniform(-4, 4, (rows, 1)))
    if n >= 64:
        x[:: max(rows // 3, 1), 32:64] = 0
    return torch.tensor(x, dtype=torch.float32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool((a.view(torch.int32) == b.view(torch.int32)).all())
