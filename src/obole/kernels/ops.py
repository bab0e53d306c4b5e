"""The table of operations that models are made of.

Two implementations: `reference/` (plain torch, slow, the specification) and `cpu` (C++ in `csrc/`, for several instruction
sets). Both are row-independent: the bits of a row of output are a function of that row's input alone, whatever the number
of rows, threads or neighbours.

Activations are float32 tensors on the CPU whose last dimension is contiguous; rows may lie further apart than they are
long (views of a fused output). Results are new tensors, except where the name ends in an underscore.
R rows, S sequences, H heads, KVH key/value heads, hd head dimension, P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from obole.types import WeightTensor

Bias = np.ndarray[Any, np.dtype[Any]] | None
Read = Callable[[int], None]


def ignored(_nbytes: int) -> None:
    """Nobody wants to know what has been read."""


# How keys and values are stored, by the name of the format. The last two have a scale for each vector.
KV_FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def has_scales(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1


class KV(NamedTuple):
    """The pool's keys and values of one layer: (blocks, KVH, hd, 16) and (blocks, KVH, 16, hd) in a format of `KV_FORMATS`.

    int8 and fp8 are codes, with float32 scales (blocks, KVH, 16) for the keys and for the values, one for each vector, i.e.
    one token's key or value of one head: x is stored as x / scale, rounded to nearest, ties to even, with scale the largest
    magnitude / 127 (int8) or / 448 (fp8, e4m3). A vector whose scale would be no normal number is stored as zeros, its scale
    0; one that holds a NaN or an infinity has the scale NaN, and codes 0.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


class Linear(Protocol):
    """One or several matrices with the same inputs, packed. `nbytes`: what one pass over them reads."""

    @property
    def in_features(self) -> int: ...
    @property
    def out_features(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


Outputs = tuple[torch.Tensor, ...]


class Recording(Protocol):
    """A function of ops, taken down once."""

    def replay(self) -> Outputs:
        """Run it again on what its inputs hold now. The outputs are good until another recording of the same ops runs."""

    def replay_timed(self) -> Mapping[str, int]:
        """The same, for its cost: nanoseconds by kind of operation."""


class Ops(Protocol):
    """Wrong shapes and types raise `ValueError`; ids, slots and tables within their ranges are the caller's duty."""

    @property
    def name(self) -> str:
        """ "native avx512vnni", "native avx2", "native portable" or "reference"."""

    @property
    def threads(self) -> int: ...

    def pack_linear(self, parts: Sequence[WeightTensor], biases: Sequence[Bias], read: Read = ignored) -> Linear:
        """Fuse matrices (out_i, in) into one product with outputs side by side; the sources are not needed afterwards.

        `read` is told of every piece of the sources, in bytes, that is not needed any more.
        Raises `ModelError` for a kind that is not supported or data that do not fit the shape, naming the tensor.
        """

    def linear(self, x: torch.Tensor, w: Linear) -> torch.Tensor:
        """(R, in) -> (R, out). The arithmetic is defined in `reference/linear.py`."""

    def adapt_(self, out: torch.Tensor, x: torch.Tensor, down: Linear, up: Linear, ids: torch.Tensor, id: int) -> None:
        """out += up(down(x)) in the rows whose id in `ids`, int32 (R,), is `id`; all others are left as they are. out (R, out),
        x (R, in)."""

    def embed(self, ids: torch.Tensor, w: Linear, scale: float) -> torch.Tensor:
        """int32 (R,) -> (R, in): rows of the matrix, exactly as the file defines them, times `scale`."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """(R, D) or (R, H, D) -> the same shape: x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += x in place, then `rms_norm(residual)`; both (R, D)."""

    def add_(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """residual += x; both (R, D)."""

    def rope_(self, x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate (R, H, hd) in place: (x1 cos - x2 sin, x2 cos + x1 sin), halves x1 and x2, tables (P, hd / 2) in
        float32, positions int32 (R,)."""

    def kv_write(self, k: torch.Tensor, v: torch.Tensor, kv: KV, slots: torch.Tensor) -> None:
        """Put rows (R, KVH, hd) into the pool, rounded to nearest, ties to even; slot = block * 16 + offset, int32 (R,)."""

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
        """(R, H, hd) -> (R, H * hd). Rows row_starts[s] to row_starts[s + 1] are sequence s at positions pos_starts[s] on;
        position p sees the positions p - window + 1 to p. table: int32 (S, blocks); what lies outside the visible
        positions never counts and may be anything, -1 in the table included."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """(R, 2F) -> (R, F): silu(gate) * up."""

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """(R, 2F) -> (R, F): gelu(gate) * up, in the tanh form."""

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """(R, V) -> int64 (R,): the lowest index of the largest value; NaN never wins (0 if all are NaN)."""

    def confidence(self, logits: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """(R, V), and their argmax int64 (R,) -> float32 (R,): the softmax at the argmax; NaN counts as minus infinity. Not a
        number where the largest value is not finite."""

    def gumbel(self, seed: int, position: int, ids: torch.Tensor | int) -> torch.Tensor:
        """Noise float32 (n,) for the ids in an int64 tensor, or for 0 to n - 1: a function of (seed, position, id) alone.

        -log(-log(u)), u = (x + 1/2) / 2^32, x word id % 4 of Philox4x32-10 with key (seed low, seed high) and counter
        (id // 4, position low, position high, 0).
        """

    def record(self, function: Callable[[], Outputs]) -> Recording:
        """Take down a function that does nothing but call ops, without branches on data, and views of their results.

        Whatever else it uses (weights, pools, inputs) must stay where it is for the life of the recording. Recording
        computes nothing yet: the tensors that the function sees while it is recorded have no meaningful contents.
        """
