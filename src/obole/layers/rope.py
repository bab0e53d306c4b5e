"""Rotary position embedding: tables of cosines and sines, computed once and looked up by position.

A table and not a formula at run time: vectorised cosines can differ in the last bit from scalar ones at the end of an
array, which would make a row depend on its place in the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from obole.config import MAX_POSITIONS, ModelConfig, RopeConfig
from obole.errors import ModelError

SLICE = 1 << 16


@dataclass(frozen=True, slots=True)
class RopeTable:
    cos: torch.Tensor  # float32 (positions, head_dim / 2)
    sin: torch.Tensor


def context_limit(config: ModelConfig) -> int:
    """The longest context that the model's position embedding can serve, in tokens."""
    rope = config.rope
    limit = config.max_position
    if rope.kind in ("linear", "dynamic"):  # their configuration states the length before scaling
        limit = max(limit, int((rope.original_max_position or config.max_position) * rope.factor))
    return min(limit, MAX_POSITIONS)


def rope_table(rope: RopeConfig, head_dim: int, max_position: int, context: int, positions: int) -> RopeTable:
    """Tables for the first `positions` positions of a model opened for a context of `context`.

    Frequencies and angles are rounded to float32 where transformers rounds them, so that logits agree. With "dynamic"
    scaling the base follows the context for which the engine was opened, not the length of the text so far: a key
    already cached must not have been turned by another angle than the one computed now (row independence).
    Raises `ModelError` for an unknown kind.
    """
    inv_freq, attention_factor = _frequencies(rope, head_dim, max_position, context)
    if rope.freq_factors is not None:
        if len(rope.freq_factors) != head_dim // 2:
            raise ModelError(f"rope_freqs has {len(rope.freq_factors)} factors, but heads of {head_dim} need {head_dim // 2}.")
        inv_freq = inv_freq / torch.tensor(rope.freq_factors, dtype=torch.float32)
    cos, sin = (torch.empty(positions, head_dim // 2) for _ in range(2))
    for start in range(0, positions, SLICE):  # the angles in double precision are not all needed at once
        places = torch.arange(start, min(start + SLICE, positions), dtype=torch.float32)
        angles = (places[:, None] * inv_freq[None, :]).double()
        cos[start : start + SLICE] = angles.cos() * attention_factor
        sin[start : start + SLICE] = angles.sin() * attention_factor
    return RopeTable(cos, sin)


def _frequencies(rope: RopeConfig, dim: int, max_position: int, context: int) -> tuple[torch.Tensor, float]:
    original = rope.original_max_position or max_position
    match rope.kind:
        case "default":
            return _inverse(rope.theta, dim), 1.0
        case "linear":
            return _inverse(rope.theta, dim) / rope.factor, 1.0
        case "dynamic":  # NTK-aware scaling of the base for the length in use
            stretch = rope.factor * max(context, original) / original - (rope.factor - 1)
            return _inverse(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0
        case "llama3":
            return _llama3(rope, _inverse(rope.theta, dim), original), 1.0
        case "yarn":
            return _yarn(rope, dim, original)
        case other:
            raise ModelError(f"RoPE scaling {other!r} is not supported (default, linear, dynamic, llama3, yarn are).")


def _inverse(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / _powers(theta, dim)


def _powers(theta: float, dim: int) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return torch.as_tensor(theta**exponents)


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor, original: int) -> torch.Tensor:
    """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / inv_freq
    slowed = torch.where(wavelength > original / rope.low_freq_factor, inv_freq / rope.factor, inv_freq)
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * slowed / rope.factor + smooth * slowed
    between = (wavelength >= original / rope.high_freq_factor) & (wavelength <= original / rope.low_freq_factor)
    return torch.where(between, blended, slowed)


def _yarn(rope: RopeConfig, dim: int, original: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3.4): interpolate slow dimensions, keep fast ones, ramp between."""

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = _powers(rope.theta, dim)
    keep = 1 - ramp
    inv_freq = 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep
    if rope.attention_factor is not None:
        return inv_freq, rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return inv_freq, _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return inv_freq, _mscale(rope.factor, 1.0)


def _mscale(scale: float, weight: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0
