"""The operations of `ops.Ops` in plain torch, one row at a time where torch's own sums depend on their number."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from obole.kernels.formats import UNQUANTISED, decode, dequantize
from obole.kernels.ops import KV, Bias, Linear, Outputs, Read, ignored
from obole.kernels.packing import check_parts
from obole.kernels.reference.linear import ReferenceLinear, linear
from obole.types import WeightTensor

SEGMENT = 256  # positions whose softmax is computed together; segments are merged in order
BLOCK = 16

Numbers = np.ndarray[Any, np.dtype[Any]]


class ReferenceRecording:
    """There is nothing to save: the function is called again."""

    def __init__(self, function: Callable[[], Outputs]) -> None:
        self.replay = function

    def replay_timed(self) -> Mapping[str, int]:
        start = time.perf_counter_ns()
        self.replay()
        return {"all": time.perf_counter_ns() - start}


class ReferenceOps:
    name = "reference"
    threads = 1

    def pack_linear(self, parts: Sequence[WeightTensor], biases: Sequence[Bias], read: Read = ignored) -> ReferenceLinear:
        inputs = check_parts(parts, biases)
        packed = ReferenceLinear(
            in_features=inputs,
            out_features=sum(p.shape[0] for p in parts),
            nbytes=sum(p.data.nbytes for p in parts),
            parts=tuple(torch.from_numpy(dequantize(p)) if p.kind in UNQUANTISED else decode(p) for p in parts),
            biases=tuple(None if b is None else torch.from_numpy(np.array(b, dtype=np.float32)) for b in biases),
        )
        read(packed.nbytes)
        return packed

    def record(self, function: Callable[[], Outputs]) -> ReferenceRecording:
        return ReferenceRecording(function)

    def linear(self, x: torch.Tensor, w: Linear) -> torch.Tensor:
        assert isinstance(w, ReferenceLinear)
        if x.dim() != 2 or x.dtype != torch.float32 or x.shape[1] != w.in_features:
            raise ValueError(f"linear needs float32 rows of {w.in_features}, not {x.dtype} {tuple(x.shape)}.")
        return linear(x, w)

    def adapt_(self, out: torch.Tensor, x: torch.Tensor, down: Linear, up: Linear, ids: torch.Tensor, id: int) -> None:
        rows = torch.nonzero(ids == id).flatten()
        if out.shape != (x.shape[0], up.out_features) or down.out_features != up.in_features:
            raise ValueError(f"adapt_ needs an output of ({x.shape[0]}, {up.out_features}), not {tuple(out.shape)}.")
        out[rows] += self.linear(self.linear(x[rows], down), up)

    def embed(self, ids: torch.Tensor, w: Linear, scale: float) -> torch.Tensor:
        assert isinstance(w, ReferenceLinear)
        return w.rows()[ids.long()] * torch.tensor(scale, dtype=torch.float32)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        _same(weight.shape, x.shape[-1:], "rms_norm")
        rows = x.reshape(-1, x.shape[-1])
        out = [row / ((row * row).mean() + eps).sqrt() * weight for row in rows]
        return torch.stack(out).reshape(x.shape) if out else x.clone()

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self.add_(residual, x)
        return self.rms_norm(residual, weight, eps)

    def add_(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        _same(x.shape, residual.shape, "add_")
        residual += x

    def rope_(self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        half = x.shape[-1] // 2
        _same(cos.shape[1:], (half,), "rope_")
        c, s = cos[positions.long(), None], sin[positions.long(), None]
        x1, x2 = x[..., :half].clone(), x[..., half:].clone()
        x[..., :half] = x1 * c - x2 * s
        x[..., half:] = x2 * c + x1 * s

    def kv_write(self, k: torch.Tensor, v: torch.Tensor, kv: KV, slots: torch.Tensor) -> None:
        _same(kv.keys.shape[1:3], k.shape[1:], "kv_write")
        for row, slot in enumerate(slots.tolist()):
            block, at = divmod(slot, BLOCK)
            kv.keys[block, :, :, at] = _stored(k[row], kv.keys.dtype, kv.key_scales, block, at)
            kv.values[block, :, at, :] = _stored(v[row], kv.values.dtype, kv.value_scales, block, at)

    def attention(
        self,
        q: torch.Tensor,
        kv: KV,
        table: torch.Tensor,
        row_starts: torch.Tensor,
        pos_starts: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        _same(kv.keys.shape[2:3], q.shape[2:], "attention")
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2])
        starts = row_starts.tolist()
        for s, position in enumerate(pos_starts.tolist()):
            for row in range(starts[s], starts[s + 1]):
                last = position + row - starts[s]
                first = 0 if window is None else max(0, last - window + 1)
                out[row] = _attend(q[row], kv, table[s], first, last, scale, softcap).reshape(-1)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return torch.nn.functional.silu(gate.double()).float() * up

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return torch.nn.functional.gelu(gate.double(), approximate="tanh").float() * up

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        # numpy's argmax, unlike torch's, promises the first of equals
        clean = torch.where(logits.isnan(), -torch.inf, logits)
        found = np.argmax((clean == clean.amax(dim=1, keepdim=True)).logical_and(~logits.isnan()).numpy(), axis=1)
        return torch.from_numpy(found)

    def confidence(self, logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        known = torch.where(logits.isnan(), -torch.inf, logits)
        top = known.gather(1, best[:, None])
        return (known - top).exp().sum(1).reciprocal()

    def gumbel(self, seed: int, position: int, ids: torch.Tensor | int) -> torch.Tensor:
        wanted = torch.arange(ids) if isinstance(ids, int) else ids
        u = (noise_words(seed, position, wanted.numpy()).astype(np.float64) + 0.5) * 2.0**-32
        noise: torch.Tensor = torch.from_numpy(-np.log(-np.log(u))).float()
        return noise


def _same(got: Sequence[int], wanted: Sequence[int], op: str) -> None:
    if tuple(got) != tuple(wanted):
        raise ValueError(f"{op} needs matching shapes, not {tuple(got)} and {tuple(wanted)}.")


def philox4x32(counter: Sequence[Numbers], key: tuple[int, int]) -> Numbers:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    Four counter words, uint64 arrays (n,) below 2^32, and two key words -> uint32 (n, 4).
    """
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = b >> half ^ c1 ^ np.uint64(k0), b & mask, a >> half ^ c3 ^ np.uint64(k1), a & mask
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=-1).astype(np.uint32)


def noise_words(seed: int, position: int, ids: Numbers) -> Numbers:
    """The random word of each id: uint32, in the shape of `ids` (n,)."""
    index = ids.astype(np.uint64)
    zero = np.zeros_like(index)
    low, high = (zero + np.uint64(position >> shift & 0xFFFFFFFF) for shift in (0, 32))
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    words = philox4x32((index // np.uint64(4) & np.uint64(0xFFFFFFFF), low, high, zero), key)
    picked: Numbers = words[np.arange(len(index)), index % np.uint64(4)]
    return picked


def _stored(x: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None, block: int, at: int) -> torch.Tensor:
    """Vectors (KVH, hd) in the pool's format; their scales are put down at once."""
    if scales is None:
        return x.to(dtype)
    top = x.abs().amax(dim=1)
    scale = top / (127 if dtype == torch.int8 else 448)
    scale[scale < torch.finfo(torch.float32).tiny] = 0.0
    scale[~x.isfinite().all(dim=1)] = torch.nan
    scales[block, :, at] = scale
    scaled = torch.where((scale > 0)[:, None], x / scale[:, None], 0.0)
    return (scaled.round() if dtype == torch.int8 else scaled.clamp(-448, 448)).to(dtype)


def _attend(
    q: torch.Tensor,  # (H, hd): one row
    kv: KV,
    table: torch.Tensor,
    first: int,
    last: int,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Softmax over positions first..last, in segments at fixed places, merged in order; only those positions are read."""
    heads, dim = q.shape
    group = heads // kv.keys.shape[1]
    best = torch.full((heads,), -torch.inf)
    total = torch.zeros(heads)
    value = torch.zeros(heads, dim)
    for begin in range(first // SEGMENT * SEGMENT, last + 1, SEGMENT):
        seen = torch.arange(max(first, begin), min(last, begin + SEGMENT - 1) + 1)
        blocks = table[seen // BLOCK].long()
        k = kv.keys[blocks, :, :, seen % BLOCK].float().repeat_interleave(group, dim=1)  # (n, H, hd)
        v = kv.values[blocks, :, seen % BLOCK].float().repeat_interleave(group, dim=1)
        score = (q * k).sum(dim=2)  # (n, H)
        if kv.key_scales is not None:
            score = score * kv.key_scales[blocks, :, seen % BLOCK].repeat_interleave(group, dim=1)
        score = score * scale
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        top = score.amax(dim=0)
        weight = torch.exp(score - top)
        largest = torch.maximum(best, top)
        old, new = torch.exp(best - largest), torch.exp(top - largest)
        total = total * old + weight.sum(dim=0) * new
        if kv.value_scales is not None:
            weight = weight * kv.value_scales[blocks, :, seen % BLOCK].repeat_interleave(group, dim=1)
        value = value * old[:, None] + (weight[:, :, None] * v).sum(dim=0) * new[:, None]
        best = largest
    return value / total[:, None]
