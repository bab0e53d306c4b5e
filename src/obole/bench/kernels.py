"""Each operation by itself, on made-up data: time a call, and what that means in bytes, products or positions a second.

An operation is recorded many times over and replayed in one native call, so that neither Python nor the clock is part of
what is measured. Weights and keys lie in several copies, more than the last-level cache holds together, and are read in
turn, as those of a model's layers are; activations are the same each time, and so in the cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from obole.bench.drive import check_repeat
from obole.bench.machine import last_level_cache
from obole.bench.samples import Report, Samples, silent
from obole.config import BLOCK_SIZE
from obole.errors import InvalidRequest
from obole.kernels.formats import BLOCKS
from obole.kernels.ops import KV, Linear, Ops, Recording
from obole.types import WeightTensor

QUANTISED = tuple(kind for kind in BLOCKS if kind.startswith("Q"))
DEFAULT_KINDS = (*QUANTISED, "BF16")
CONTEXTS = (128, 2048, 8192)
HEADS, KV_HEADS, HEAD_DIM = 14, 2, 64  # Qwen2.5-0.5B
VOCABULARY = 131_072
COPIES = 16  # of an operation without weights, in a recording
MOST_COPIES = 512
CACHES = 8  # not all caches drop what was read longest ago: of three times their size a good part would still be there
MEASURED_SECONDS = 0.02  # at least, for each repetition
# where a block of a quantised kind holds half-precision scales: byte offsets
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip


class Shape(NamedTuple):
    outputs: int
    inputs: int


DEFAULT_SHAPE = Shape(4864, 896)  # gate or up of Qwen2.5-0.5B


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One operation on so many rows. What does not apply to it is None.

    `bytes_per_second`: weights read; `products_per_second`: multiplications of a weight and an input (with their additions);
    `positions_per_second`: cached positions that attention visits, for all heads.
    """

    operation: str
    shape: str
    rows: int
    microseconds: Samples
    bytes_per_second: Samples | None = None
    products_per_second: Samples | None = None
    positions_per_second: Samples | None = None


def kernels(
    ops: Ops,
    kinds: Sequence[str] = DEFAULT_KINDS,
    rows: Sequence[int] = (1, 2, 4, 8, 16, 64, 128),
    shape: Shape = DEFAULT_SHAPE,
    repeat: int = 3,
    contexts: Sequence[int] = CONTEXTS,
    report: Report = silent,
) -> list[KernelRow]:
    """Products of each kind, attention over each context, and the rest of a layer's operations, for each number of rows.

    A kind whose blocks do not fill the inputs (256 for the K kinds) is measured with the inputs rounded up. Raises
    `InvalidRequest` for a kind that is not known, or sizes below 1.
    """
    check_repeat(repeat)
    unknown = [kind for kind in kinds if kind not in BLOCKS]
    if unknown:
        raise InvalidRequest("kinds", f"There is no kind {unknown[0]!r}; there are {', '.join(BLOCKS)}.")
    if min(*shape, *rows, *contexts) < 1:
        raise InvalidRequest("shape", "rows, contexts and both sides of the shape must be at least 1.")
    found: list[KernelRow] = []
    total = len(kinds) + len(contexts) + 1
    for i, kind in enumerate(kinds):
        report(f"product {kind}", i, total)
        found += _products(ops, kind, rows, shape, repeat)
    for i, context in enumerate(contexts):
        report(f"attention over {context}", len(kinds) + i, total)
        found.append(_attention(ops, context, repeat))
    report("other operations", total - 1, total)
    for n in rows:
        found += _row_operations(ops, n, shape, repeat)
    return found


def measure(recording: Recording, calls: int, repeat: int) -> Samples:
    """Seconds a call; the recording makes `calls` of them."""
    start = time.perf_counter()
    recording.replay()  # warms up, and tells how often to replay
    replays = max(1, round(MEASURED_SECONDS / (time.perf_counter() - start)))
    values = []
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(replays):
            recording.replay()
        values.append((time.perf_counter() - start) / (replays * calls))
    return Samples.of(values)


def random_weights(kind: str, outputs: int, inputs: int) -> WeightTensor:
    """A matrix of random codes. The scales are all the same: their values take no time, except odd ones."""
    size, width = BLOCKS[kind]
    rng = np.random.default_rng(outputs * inputs)
    if kind in SCALES:
        blocks = rng.integers(0, 256, (outputs * inputs // size, width), dtype=np.uint8)
        for at in SCALES[kind]:
            blocks[:, at : at + 2] = np.frombuffer(np.float16(0.001).tobytes(), dtype=np.uint8)
        data = blocks.reshape(outputs, -1)
    else:
        values = rng.standard_normal((outputs, inputs), dtype=np.float32) * np.float32(0.02)
        if kind == "F16":
            data = values.astype(np.float16).view(np.uint8)
        elif kind == "BF16":
            data = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            data = values.view(np.uint8)
    return WeightTensor(f"{kind} weights", kind, (outputs, inputs), data)


def copies_for(nbytes: int) -> int:
    """Copies of something of that size that are `CACHES` times the last-level cache, within reason."""
    return min(MOST_COPIES, max(1, -(-CACHES * last_level_cache() // nbytes)))


def _products(ops: Ops, kind: str, rows: Sequence[int], shape: Shape, repeat: int) -> Iterator[KernelRow]:
    block = max(BLOCKS[kind][0], 32)
    inputs = -(-shape.inputs // block) * block
    source = random_weights(kind, shape.outputs, inputs)
    first = ops.pack_linear([source], [None])
    weights = [first, *(ops.pack_linear([source], [None]) for _ in range(copies_for(first.nbytes) - 1))]
    for n in rows:
        seconds = measure(ops.record(_chain(ops, _activations(n, inputs), weights)), len(weights), repeat)
        yield KernelRow(
            operation=f"linear {kind}",
            shape=f"{shape.outputs}x{inputs}",
            rows=n,
            microseconds=_microseconds(seconds),
            bytes_per_second=_rate(first.nbytes, seconds),
            products_per_second=_rate(n * shape.outputs * inputs, seconds),
        )


def _chain(ops: Ops, x: torch.Tensor, weights: Sequence[Linear]) -> Callable[[], tuple[torch.Tensor, ...]]:
    def run() -> tuple[torch.Tensor, ...]:
        for w in weights:
            ops.linear(x, w)
        return ()

    return run


def _attention(ops: Ops, context: int, repeat: int) -> KernelRow:
    """One row that sees `context` positions, its own included; keys and values in bfloat16."""
    blocks = -(-context // BLOCK_SIZE)
    bytes_each = 2 * blocks * KV_HEADS * HEAD_DIM * BLOCK_SIZE * 2
    copies = min(copies_for(bytes_each), 32)  # of a short context no more than a model has layers: those do stay cached
    pools = [
        KV(
            torch.randn(blocks, KV_HEADS, HEAD_DIM, BLOCK_SIZE).to(torch.bfloat16),
            torch.randn(blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(torch.bfloat16),
        )
        for _ in range(copies)
    ]
    q = torch.randn(1, HEADS, HEAD_DIM)
    table = torch.arange(blocks, dtype=torch.int32)[None]
    row_starts = torch.tensor([0, 1], dtype=torch.int32)
    pos_starts = torch.tensor([context - 1], dtype=torch.int32)

    def run() -> tuple[torch.Tensor, ...]:
        for kv in pools:
            ops.attention(q, kv, table, row_starts, pos_starts, HEAD_DIM**-0.5, None, None)
        return ()

    seconds = measure(ops.record(run), copies, repeat)
    return KernelRow(
        operation=f"attention over {context:,}",
        shape=f"{HEADS} heads, {KV_HEADS} of KV, {HEAD_DIM} wide",
        rows=1,
        microseconds=_microseconds(seconds),
        bytes_per_second=_rate(bytes_each * context // (blocks * BLOCK_SIZE), seconds),
        positions_per_second=_rate(context, seconds),
    )


def _row_operations(ops: Ops, rows: int, shape: Shape, repeat: int) -> Iterator[KernelRow]:
    hidden = _activations(rows, shape.inputs)
    residual = torch.zeros(rows, shape.inputs)
    norm = torch.ones(shape.inputs)
    gate_up = _activations(rows, 2 * shape.outputs)
    logits = _activations(rows, VOCABULARY)
    heads = _activations(rows, HEADS * HEAD_DIM).view(rows, HEADS, HEAD_DIM)
    angles = torch.rand(rows, HEAD_DIM // 2)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.arange(rows, dtype=torch.int32)
    kv = _activations(rows, KV_HEADS * HEAD_DIM).view(rows, KV_HEADS, HEAD_DIM)
    blocks = -(-rows // BLOCK_SIZE)
    pool = KV(
        torch.zeros(blocks, KV_HEADS, HEAD_DIM, BLOCK_SIZE, dtype=torch.bfloat16),
        torch.zeros(blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16),
    )
    calls: tuple[tuple[str, str, Callable[[], object]], ...] = (
        ("rms_norm", f"{shape.inputs}", lambda: ops.rms_norm(hidden, norm, 1e-6)),
        ("add_rms_norm", f"{shape.inputs}", lambda: ops.add_rms_norm(hidden, residual, norm, 1e-6)),
        ("rope", f"{HEADS} heads, {HEAD_DIM} wide", lambda: ops.rope_(heads, positions, cos, sin)),
        ("kv_write", f"{KV_HEADS} heads, {HEAD_DIM} wide", lambda: ops.kv_write(kv, kv, pool, positions)),
        ("silu_mul", f"2 x {shape.outputs}", lambda: ops.silu_mul(gate_up)),
        ("gelu_tanh_mul", f"2 x {shape.outputs}", lambda: ops.gelu_tanh_mul(gate_up)),
        ("argmax", f"{VOCABULARY}", lambda: ops.argmax(logits)),
    )
    for name, width, call in calls:
        yield KernelRow(name, width, rows, _microseconds(measure(ops.record(_repeated(call)), COPIES, repeat)))


def _repeated(call: Callable[[], object]) -> Callable[[], tuple[torch.Tensor, ...]]:
    def run() -> tuple[torch.Tensor, ...]:
        for _ in range(COPIES):
            call()
        return ()

    return run


def _activations(rows: int, n: int) -> torch.Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(n)) * 0.1


def _microseconds(seconds: Samples) -> Samples:
    return Samples.of(value * 1e6 for value in seconds.values)


def _rate(amount: int, seconds: Samples) -> Samples:
    return Samples.of(amount / value for value in seconds.values)
