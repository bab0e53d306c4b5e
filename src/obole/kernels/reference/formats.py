"""The encodings of GGUF as codes, scales and minima, which is what the products are defined on.

Source of the layouts: the block structures of ggml (ggml-common.h). A block is written (B, bytes) of uint8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from obole.kernels.packing import BLOCKS
from obole.types import WeightTensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

GROUP = 32


@dataclass(frozen=True, slots=True)
class Codes:
    """weight = scale * (code - zero) + minimum, N outputs, G groups of 32 inputs."""

    code: torch.Tensor  # uint8 (N, G, 32)
    zero: int
    scale: torch.Tensor  # float32 (N, G, s): s = 1, or 2 where scales are per 16 inputs
    minimum: torch.Tensor | None  # float32 (N, G)


def _halves(data: Bytes) -> Floats:
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _nibbles(data: Bytes) -> Bytes:
    """(B, n) -> (B, 2n): all low halves, then all high ones."""
    return np.concatenate((data & 15, data >> 4), axis=-1)


def _simple(kind: str, blocks: Bytes) -> tuple[Bytes, int, Floats, Floats | None]:
    """Blocks of 32: d, a minimum (_1), the fifth bits (Q5), codes."""
    scale = _halves(blocks[:, :2])
    if kind == "Q8_0":
        return blocks[:, 2:] ^ np.uint8(128), 128, scale, None
    at = 4 if kind.endswith("_1") else 2
    minimum = _halves(blocks[:, 2:4])[:, 0] if kind.endswith("_1") else None
    bits = 4
    fifth: Bytes = np.zeros((len(blocks), 1), dtype=np.uint8)
    if kind.startswith("Q5"):
        bits = 5
        fifth = np.unpackbits(blocks[:, at : at + 4], axis=-1, bitorder="little") << np.uint8(4)
        at += 4
    zero = 0 if minimum is not None else 1 << (bits - 1)
    return _nibbles(blocks[:, at:]) | fifth, zero, scale, minimum


def _k_affine(kind: str, blocks: Bytes) -> tuple[Bytes, int, Floats, Floats | None]:
    """Q4_K and Q5_K: d, dmin, 6-bit scales and minima of 8 groups in 12 bytes, the fifth bits (Q5_K), nibbles."""
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=-1)
    minima = np.concatenate((mid & 63, (high >> 4) | (mid >> 6 << 4)), axis=-1)
    at = 48 if kind == "Q5_K" else 16
    runs = blocks[:, at:].reshape(-1, 4, 1, 32)
    code: Bytes = np.concatenate((runs & 15, runs >> 4), axis=2).reshape(-1, 8, 32)
    if kind == "Q5_K":
        shifts = np.arange(8, dtype=np.uint8)[None, :, None]
        code = code | (blocks[:, None, 16:48] >> shifts & np.uint8(1)) << np.uint8(4)
    scale = _halves(blocks[:, :2]) * scales.astype(np.float32)
    minimum = -(_halves(blocks[:, 2:4]) * minima.astype(np.float32))
    return code, 0, scale, minimum


def _q6_k(blocks: Bytes) -> tuple[Bytes, int, Floats, Floats | None]:
    """Low nibbles, pairs of high bits, 16 signed scales, d."""
    runs = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate((runs & 15, runs >> 4), axis=2).reshape(-1, 8, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)).reshape(-1, 8, 32)
    scale = _halves(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return low | high << np.uint8(4), 32, scale, None


def decode(tensor: WeightTensor) -> Codes:
    """The codes of a quantised matrix."""
    weights, size = BLOCKS[tensor.kind]
    n, groups = tensor.shape[0], tensor.shape[1] // GROUP
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, size)
    if weights == GROUP:
        code, zero, scale, minimum = _simple(tensor.kind, blocks)
    elif tensor.kind == "Q6_K":
        code, zero, scale, minimum = _q6_k(blocks)
    else:
        code, zero, scale, minimum = _k_affine(tensor.kind, blocks)
    return Codes(
        code=torch.from_numpy(np.ascontiguousarray(code).reshape(n, groups, GROUP)),
        zero=zero,
        scale=torch.from_numpy(scale.reshape(n, groups, 2 if tensor.kind == "Q6_K" else 1)),
        minimum=None if minimum is None else torch.from_numpy(minimum.reshape(n, groups)),
    )


def decode_float(tensor: WeightTensor) -> torch.Tensor:
    """An unquantised matrix as float32 (N, K)."""
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[tensor.kind]
    raw = torch.from_numpy(np.array(tensor.data))  # a copy: the source may be a read-only map
    return raw.view(dtype).reshape(tensor.shape).float()


def values(codes: Codes) -> torch.Tensor:
    """The weights as float32 (N, K), in the order of operations that the file format defines."""
    n, groups, _ = codes.code.shape
    split = codes.code.reshape(n, groups, codes.scale.shape[2], -1)
    result = codes.scale[..., None] * (split.float() - codes.zero)
    if codes.minimum is not None:
        result = result + codes.minimum[:, :, None, None]
    return result.reshape(n, groups * GROUP)
