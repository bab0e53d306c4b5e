"""The native kernels: checks at the seam, then a call with plain addresses into the C++ module.

A model makes about ten calls a layer and hundreds a step, so each wrapper costs only a few microseconds: shapes and
strides are fetched once, and tensors are allocated without naming what they inherit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from obole.errors import ConfigError
from obole.kernels import _native
from obole.kernels.arena import Arena, Place
from obole.kernels.ops import KV, KV_FORMATS, Bias, Linear, Outputs, Read, has_scales, ignored
from obole.kernels.packing import check_parts
from obole.types import WeightTensor

ISAS = ("amx", "avx512vnni", "avx2", "portable")  # best first
EMULATED_AMX = "amx-emulated"  # the tiles of AMX in plain C++: slow, for tests
COLUMNS = 16  # rows of a matrix that are packed together
PIECE_BYTES = 16 << 20  # of a matrix that are packed before the next are read
NO_WINDOW = 1 << 40  # positions: more than any context

_F32 = torch.float32
_I32 = torch.int32
_FORMATS = {dtype: name for name, dtype in KV_FORMATS.items()}


class NativeLinear:
    """Matrices packed for the native kernels (layout: csrc/formats.h). Owns its memory."""

    __slots__ = ("in_features", "out_features", "nbytes", "packed")

    def __init__(self, in_features: int, packed: _native.Packed) -> None:
        self.in_features = in_features
        self.out_features = packed.outputs
        self.nbytes = packed.nbytes
        self.packed = packed


def _bad(op: str, wanted: str, *tensors: torch.Tensor) -> ValueError:
    got = ", ".join(f"{t.dtype} {tuple(t.shape)} with strides {t.stride()}" for t in tensors)
    return ValueError(f"{op} needs {wanted}, not {got}.")


def _scattered(x: torch.Tensor) -> bool:
    """Whether elements of the last dimension lie apart. Strides mean nothing where there is at most one of them."""
    return x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel() > 0


def _packed(w: Linear) -> NativeLinear:
    if not isinstance(w, NativeLinear):
        raise TypeError(f"the native kernels need matrices that they packed, not {type(w).__name__}")
    return w


def _vector(op: str, name: str, x: torch.Tensor, n: int, dtype: torch.dtype) -> int:
    """Address of a contiguous vector of n elements."""
    if x.shape != (n,) or x.dtype is not dtype or not x.is_contiguous():
        raise _bad(op, f"{name} as contiguous {dtype} ({n},)", x)
    return x.data_ptr()


def _empty(shape: Sequence[int], dtype: torch.dtype = _F32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _pool(op: str, kv: KV, heads: int, dim: int) -> _native.KvPool:
    keys, values, key_scales, value_scales = kv
    blocks = keys.shape[0]
    if (
        keys.shape[1:] != (heads, dim, 16)
        or values.shape != (blocks, heads, 16, dim)
        or keys.dtype not in _FORMATS
        or values.dtype is not keys.dtype
        or not keys.is_contiguous()
        or not values.is_contiguous()
    ):
        raise _bad(op, f"contiguous pools (B, {heads}, {dim}, 16) and (B, {heads}, 16, {dim})", keys, values)
    addresses = [0, 0]
    if has_scales(keys.dtype):
        for i, scales in enumerate((key_scales, value_scales)):
            if scales is None or scales.shape != (blocks, heads, 16) or scales.dtype is not _F32 or not scales.is_contiguous():
                raise _bad(op, f"contiguous float32 scales ({blocks}, {heads}, 16)", *(() if scales is None else (scales,)))
            addresses[i] = scales.data_ptr()
    return _native.KvPool(_FORMATS[keys.dtype], keys.data_ptr(), values.data_ptr(), *addresses)


class NativeRecording:
    """See `ops.Recording`. Keeps `function`, and with it the weights and inputs that the tape points to, alive."""

    __slots__ = ("_tape", "_function", "_arena", "_outputs")

    def __init__(self, tape: _native.Tape, function: Callable[[], Outputs], arena: Arena, outputs: list[Place]) -> None:
        self._tape = tape
        self._function = function
        self._arena = arena
        self._outputs = outputs

    def replay(self) -> Outputs:
        self._tape.run()
        return tuple(self._arena.tensor(place) for place in self._outputs)

    def replay_timed(self) -> Mapping[str, int]:
        return self._tape.run_timed()


class NativeOps:
    """See `ops.Ops`. Several threads may call (one at a time has the worker threads), but not beside `record`."""

    def __init__(self, threads: int, isa: str) -> None:
        if isa not in (*ISAS, EMULATED_AMX, "auto"):
            raise ConfigError(f"There is no instruction set {isa!r}; there are {', '.join(ISAS)}.")
        if not _native.runs(isa):
            here = ", ".join(name for name in ISAS if _native.runs(name))
            why = f" ({_native.amx_refusal()})" if isa == "amx" else ""
            raise ConfigError(f"This machine cannot run the instruction set {isa!r}{why}; it has {here}.")
        try:
            self._ops = _native.Ops(isa, threads)
        except RuntimeError as error:
            raise ConfigError(f"{threads} threads cannot be started ({error}): ask for fewer.") from error
        self.name = f"native {self._ops.name}"
        self.threads = self._ops.threads
        self._arena = Arena()
        self._new: Callable[..., torch.Tensor] = _empty

    def record(self, function: Callable[[], Outputs]) -> NativeRecording:
        tape = _native.Tape()
        try:
            self._ops.record(tape)
            self._new = self._arena.take
            outputs = function()
        finally:
            self._new = _empty
            self._ops.record(None)
        return NativeRecording(tape, function, self._arena, [self._arena.place(t) for t in outputs])

    def pack_linear(self, parts: Sequence[WeightTensor], biases: Sequence[Bias], read: Read = ignored) -> NativeLinear:
        inputs = check_parts(parts, biases)
        packed = _native.Packed(inputs)
        for part, bias in zip(parts, biases, strict=True):
            vector = None if bias is None else np.ascontiguousarray(bias, dtype=np.float32)
            rows, row_bytes = part.data.shape
            packed.add(part.kind, rows, 0 if vector is None else vector.ctypes.data)
            most = max(1, PIECE_BYTES // max(1, row_bytes * COLUMNS)) * COLUMNS
            for first in range(0, rows, most):
                data = np.ascontiguousarray(part.data[first : first + most])
                packed.fill(self._ops, data.ctypes.data, row_bytes, first, data.shape[0])
                read(data.nbytes)
        return NativeLinear(inputs, packed)

    def linear(self, x: torch.Tensor, w: Linear) -> torch.Tensor:
        w = _packed(w)
        if x.dim() != 2 or x.dtype is not _F32 or x.shape[1] != w.in_features or _scattered(x):
            raise _bad("linear", f"float32 rows of {w.in_features}", x)
        rows = x.shape[0]
        out = self._new((rows, w.out_features))
        self._ops.linear(w.packed, x.data_ptr(), x.stride(0), rows, out.data_ptr())
        return out

    def adapt_(self, out: torch.Tensor, x: torch.Tensor, down: Linear, up: Linear, ids: torch.Tensor, id: int) -> None:
        first, second = _packed(down), _packed(up)
        rows = x.shape[0]
        if x.dim() != 2 or x.dtype is not _F32 or x.shape[1] != first.in_features or _scattered(x):
            raise _bad("adapt_", f"float32 rows of {first.in_features}", x)
        if out.shape != (rows, second.out_features) or out.dtype is not _F32 or _scattered(out):
            raise _bad("adapt_", f"an output of float32 ({rows}, {second.out_features})", out)
        if second.in_features != first.out_features:
            raise ValueError(f"adapt_ needs {first.out_features} inputs of the second product, not {second.in_features}.")
        which = _vector("adapt_", "ids", ids, rows, _I32)
        self._ops.adapt(
            first.packed, second.packed, x.data_ptr(), x.stride(0), which, id, rows, out.data_ptr(), out.stride(0)
        )  # fmt: skip

    def embed(self, ids: torch.Tensor, w: Linear, scale: float) -> torch.Tensor:
        w = _packed(w)
        rows = ids.numel()
        address = _vector("embed", "ids", ids, rows, _I32)
        out = self._new((rows, w.in_features))
        self._ops.embed(w.packed, address, rows, scale, out.data_ptr())
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        shape, stride = x.shape, x.stride()
        if x.dtype is not _F32 or not 2 <= len(shape) <= 3 or _scattered(x):
            raise _bad("rms_norm", "float32 (R, D) or (R, H, D), contiguous in the last dimension", x)
        n = shape[-1]
        w = _vector("rms_norm", "weight", weight, n, _F32)
        out = self._new(shape)
        heads, head_stride = (shape[1], stride[1]) if len(shape) == 3 else (1, 0)
        self._ops.rms_norm(x.data_ptr(), shape[0], stride[0], heads, head_stride, n, w, eps, out.data_ptr())
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        rows, n = self._same_rows("add_rms_norm", x, residual)
        w = _vector("add_rms_norm", "weight", weight, n, _F32)
        out = self._new((rows, n))
        self._ops.add_rms_norm(
            x.data_ptr(), x.stride(0), residual.data_ptr(), residual.stride(0), rows, n, w, eps, out.data_ptr()
        )
        return out

    def add_(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        rows, n = self._same_rows("add_", x, residual)
        self._ops.add(residual.data_ptr(), residual.stride(0), x.data_ptr(), x.stride(0), rows, n)

    def rope_(self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        shape, stride = x.shape, x.stride()
        if x.dtype is not _F32 or len(shape) != 3 or shape[2] % 2 or _scattered(x):
            raise _bad("rope_", "float32 (R, H, hd), contiguous in the last dimension, hd even", x)
        half = shape[2] // 2
        for table in (cos, sin):
            if table.dtype is not _F32 or table.dim() != 2 or table.shape[1] != half or not table.is_contiguous():
                raise _bad("rope_", f"contiguous float32 tables (P, {half})", table)
        where = _vector("rope_", "positions", positions, shape[0], _I32)
        self._ops.rope(
            x.data_ptr(), shape[0], stride[0], shape[1], stride[1], half, where, cos.data_ptr(), sin.data_ptr()
        )  # fmt: skip

    def kv_write(self, k: torch.Tensor, v: torch.Tensor, kv: KV, slots: torch.Tensor) -> None:
        shape, k_stride, v_stride = k.shape, k.stride(), v.stride()
        if k.dtype is not _F32 or v.dtype is not _F32 or len(shape) != 3 or v.shape != shape or _scattered(k) or _scattered(v):
            raise _bad("kv_write", "k and v as float32 (R, KVH, hd), contiguous in the last dimension", k, v)
        rows, heads, dim = shape
        pool = _pool("kv_write", kv, heads, dim)
        where = _vector("kv_write", "slots", slots, rows, _I32)
        self._ops.kv_write(
            k.data_ptr(), k_stride[0], k_stride[1], v.data_ptr(), v_stride[0], v_stride[1], rows, heads, dim,
            pool, where,
        )  # fmt: skip

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
        shape, stride = q.shape, q.stride()
        if q.dtype is not _F32 or len(shape) != 3 or _scattered(q):
            raise _bad("attention", "q as float32 (R, H, hd), contiguous in the last dimension", q)
        rows, heads, dim = shape
        kv_heads = kv.keys.shape[1]
        if heads % kv_heads:
            raise ValueError(f"attention needs a multiple of {kv_heads} query heads, not {heads}.")
        pool = _pool("attention", kv, kv_heads, dim)
        if table.dtype is not _I32 or table.dim() != 2 or not table.is_contiguous():
            raise _bad("attention", "the table as contiguous int32 (S, blocks)", table)
        sequences = table.shape[0]
        if window is not None and window < 1:
            raise ValueError(f"attention needs a window of at least 1, not {window}.")
        out = self._new((rows, heads * dim))
        self._ops.attention(
            q.data_ptr(), stride[0], stride[1], pool, table.data_ptr(), table.shape[1],
            _vector("attention", "row_starts", row_starts, sequences + 1, _I32),
            _vector("attention", "pos_starts", pos_starts, sequences, _I32), sequences, rows, heads, kv_heads, dim,
            scale, window or NO_WINDOW, softcap or 0.0, out.data_ptr(),
        )  # fmt: skip
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gated(True, gate_up)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gated(False, gate_up)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        if logits.dim() != 2 or logits.dtype is not _F32 or not logits.shape[1] or _scattered(logits):
            raise _bad("argmax", "float32 rows (R, V) that are not empty", logits)
        rows, n = logits.shape
        out = self._new((rows,), torch.int64)
        self._ops.argmax(logits.data_ptr(), logits.stride(0), rows, n, out.data_ptr())
        return out

    def confidence(self, logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        if logits.dim() != 2 or logits.dtype is not _F32 or not logits.shape[1] or _scattered(logits):
            raise _bad("confidence", "float32 rows (R, V) that are not empty", logits)
        rows, n = logits.shape
        which = _vector("confidence", "best", best, rows, torch.int64)
        out = self._new((rows,))
        self._ops.confidence(logits.data_ptr(), logits.stride(0), which, rows, n, out.data_ptr())
        return out

    def gumbel(self, seed: int, position: int, ids: torch.Tensor | int) -> torch.Tensor:
        if isinstance(ids, int):
            n, address = ids, 0
        else:
            n = ids.numel()
            address = _vector("gumbel", "ids", ids, n, torch.int64)
        out = torch.empty(n, dtype=_F32)
        self._ops.gumbel(seed & (1 << 64) - 1, position, address, n, out.data_ptr())
        return out

    def _gated(self, silu: bool, gate_up: torch.Tensor) -> torch.Tensor:
        if gate_up.dim() != 2 or gate_up.dtype is not _F32 or gate_up.shape[1] % 2 or _scattered(gate_up):
            raise _bad("silu_mul and gelu_tanh_mul", "float32 rows (R, 2F)", gate_up)
        rows, n = gate_up.shape
        out = self._new((rows, n // 2))
        self._ops.gated(silu, gate_up.data_ptr(), gate_up.stride(0), rows, n // 2, out.data_ptr())
        return out

    @staticmethod
    def _same_rows(op: str, x: torch.Tensor, residual: torch.Tensor) -> tuple[int, int]:
        if (
            x.dim() != 2
            or x.shape != residual.shape
            or x.dtype is not _F32
            or residual.dtype is not _F32
            or _scattered(x)
            or _scattered(residual)
        ):
            raise _bad(op, "two float32 (R, D) of the same shape", x, residual)
        return x.shape[0], x.shape[1]
