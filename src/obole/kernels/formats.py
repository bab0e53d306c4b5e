"""The encodings of weights: the sizes of their blocks, their codes, and their values. With numpy only.

Source of the layouts: the block structures of ggml (ggml-common.h) and its reference dequantisation (ggml-quants.c).
A block is written (B, bytes) of uint8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from obole.types import WeightTensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

GROUP = 32  # weights that share a scale at most


class Block(NamedTuple):
    elements: int
    size: int  # bytes


BLOCKS = {  # by the names of the GGUF specification
    "F32": Block(1, 4),
    "F16": Block(1, 2),
    "BF16": Block(1, 2),
    "Q4_0": Block(32, 18),
    "Q4_1": Block(32, 20),
    "Q5_0": Block(32, 22),
    "Q5_1": Block(32, 24),
    "Q8_0": Block(32, 34),
    "Q4_K": Block(256, 144),
    "Q5_K": Block(256, 176),
    "Q6_K": Block(256, 210),
}
UNQUANTISED = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Codes:
    """weight = scale * (code - zero) + minimum, N outputs, G groups of 32 inputs."""

    code: Bytes  # (N, G, 32)
    zero: int
    scale: Floats  # (N, G, s): s = 1, or 2 where scales are per 16 inputs
    minimum: Floats | None  # (N, G)


def dequantize(tensor: WeightTensor) -> Floats:
    """The values of a tensor of any kind in `BLOCKS`, float32, in its shape."""
    if tensor.kind in UNQUANTISED:
        return _floats(tensor.kind, np.ascontiguousarray(tensor.data)).reshape(tensor.shape)
    return values(decode(tensor)).reshape(tensor.shape)


def decode(tensor: WeightTensor) -> Codes:
    """The codes of a quantised tensor; all but its last dimension are one here."""
    elements, size = BLOCKS[tensor.kind]
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, size)
    groups = tensor.shape[-1] // GROUP
    with np.errstate(all="ignore"):  # a scale may be infinite or NaN, and then so is the product
        if elements == GROUP:
            code, zero, scale, minimum = _simple(tensor.kind, blocks)
        elif tensor.kind == "Q6_K":
            code, zero, scale, minimum = _q6_k(blocks)
        else:
            code, zero, scale, minimum = _k_affine(tensor.kind, blocks)
    return Codes(
        code=np.ascontiguousarray(code).reshape(-1, groups, GROUP),
        zero=zero,
        scale=scale.reshape(-1, groups, 2 if tensor.kind == "Q6_K" else 1),
        minimum=None if minimum is None else minimum.reshape(-1, groups),
    )


def values(codes: Codes) -> Floats:
    """The weights as float32 (N, K), in the order of operations that the file format defines."""
    n, groups, _ = codes.code.shape
    split = codes.code.reshape(n, groups, codes.scale.shape[2], -1)
    with np.errstate(all="ignore"):
        result: Floats = codes.scale[..., None] * (split.astype(np.float32) - np.float32(codes.zero))
        if codes.minimum is not None:
            result += codes.minimum[:, :, None, None]
    return result.reshape(n, groups * GROUP)


def _floats(kind: str, data: Bytes) -> Floats:
    if kind == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return data.view("<f4" if kind == "F32" else "<f2").astype(np.float32)


def _halves(data: Bytes) -> Floats:
    return _floats("F16", np.ascontiguousarray(data))


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
    """Q4_K and Q5_K: d, dmin, 6-bit scales and minima of 8 groups in 12 bytes, the fifth bits (Q5_K), nibbles.

    Of the scales and minima, four are whole, in bytes 0-3 and 4-7; four are split over bytes 8-11 and the two highest bits
    of the others.
    """
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=-1)
    minima = np.concatenate((mid & 63, (high >> 4) | (mid >> 6 << 4)), axis=-1)
    at = 48 if kind == "Q5_K" else 16
    runs = blocks[:, at:].reshape(-1, 4, 1, 32)  # of 32 bytes, each with two groups: low halves first
    code: Bytes = np.concatenate((runs & 15, runs >> 4), axis=2).reshape(-1, 8, 32)
    if kind == "Q5_K":
        shifts = np.arange(8, dtype=np.uint8)[None, :, None]
        code = code | (blocks[:, None, 16:48] >> shifts & np.uint8(1)) << np.uint8(4)
    scale = _halves(blocks[:, :2]) * scales.astype(np.float32)
    minimum = -(_halves(blocks[:, 2:4]) * minima.astype(np.float32))
    return code, 0, scale, minimum


def _q6_k(blocks: Bytes) -> tuple[Bytes, int, Floats, Floats | None]:
    """Two halves of 128 elements, in each 64 bytes of low nibbles and 32 bytes with four pairs of high bits; 16 signed
    scales, d."""
    runs = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate((runs & 15, runs >> 4), axis=2).reshape(-1, 8, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)).reshape(-1, 8, 32)
    scale = _halves(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return low | high << np.uint8(4), 32, scale, None
