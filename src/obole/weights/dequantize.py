"""Any supported encoding to float32, with numpy: for norms, for tests, and as the specification of the encodings.

Source of the layouts: the block structures of ggml (ggml-common.h) and its reference dequantisation (ggml-quants.c).
A block is written (B, bytes), the result (B, elements).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from obole.types import WeightTensor
from obole.weights.kinds import KINDS

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


def dequantize(tensor: WeightTensor) -> Floats:
    """The values of `tensor`, float32, in its shape. The kind must be one of `KINDS`."""
    kind = KINDS[tensor.kind]
    blocks = np.ascontiguousarray(tensor.data).reshape(-1, kind.size)
    with np.errstate(all="ignore"):  # a scale may be infinite or NaN, and then so is the product
        return _DECODERS[tensor.kind](blocks).reshape(tensor.shape)


def _f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4").astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """(B, n) -> (B, 2n): the low halves of all bytes, then the high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _bits(packed: Bytes) -> Bytes:
    """(B, 4) -> (B, 32): one bit each, lowest first, in the place of the fifth bit."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Floats:
    return _f16(blocks[:, :2]) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _f16(blocks[:, :2]) * _nibbles(blocks[:, 4:]).astype(np.float32) + _f16(blocks[:, 2:4])


def _q5_0(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6])
    return _f16(blocks[:, :2]) * (values.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    values = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8])
    return _f16(blocks[:, :2]) * values.astype(np.float32) + _f16(blocks[:, 2:4])


def _q8_0(blocks: Bytes) -> Floats:
    return _f16(blocks[:, :2]) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """(B, 12) -> scales and minima (B, 8), 6 bits each: four whole ones in bytes 0-3 and 4-7, four split over 8-11 and
    the two highest bits of the others."""
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((low & 63, (high & 15) | (low >> 6 << 4)), axis=-1)
    minima = np.concatenate((mid & 63, (high >> 4) | (mid >> 6 << 4)), axis=-1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_affine(blocks: Bytes, values: Bytes) -> Floats:
    """values (B, 8, 32) -> (B, 256), each group of 32 with its own scale and minimum."""
    scales, minima = _k_scales(blocks[:, 4:16])
    scale = (_f16(blocks[:, :2]) * scales)[:, :, None]
    minimum = (_f16(blocks[:, 2:4]) * minima)[:, :, None]
    result: Floats = (scale * values.astype(np.float32) - minimum).reshape(-1, 256)
    return result


def _k_nibbles(packed: Bytes) -> Bytes:
    """(B, 128) -> (B, 8, 32): each run of 32 bytes holds two groups, low halves first."""
    runs = packed.reshape(-1, 4, 1, 32)
    return np.concatenate((runs & 15, runs >> 4), axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> Floats:
    return _k_affine(blocks, _k_nibbles(blocks[:, 16:]))


def _q5_k(blocks: Bytes) -> Floats:
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = (blocks[:, None, 16:48] >> shifts & np.uint8(1)) << np.uint8(4)
    return _k_affine(blocks, _k_nibbles(blocks[:, 48:]) | fifth)


def _q6_k(blocks: Bytes) -> Floats:
    """Two halves of 128 elements; in each, 64 bytes of low nibbles and 32 bytes with four pairs of high bits."""
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate((low & 15, low >> 4), axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
    values = ((low | high).astype(np.float32) - 32).reshape(-1, 16, 16)
    scale = _f16(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    result: Floats = (scale[:, :, None] * values).reshape(-1, 256)
    return result


_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
