"""Self-attention over the paged cache: from fused q, k, v to the heads' outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from obole.config import ModelConfig
from obole.kernels.ops import KV, Ops
from obole.layers.batch import Batch
from obole.layers.rope import RopeTable


@dataclass(frozen=True, slots=True)
class AttentionShape:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    eps: float = 0.0  # of the per-head norms, where a model has them


def attention_shape(config: ModelConfig, layer: int) -> AttentionShape:
    return AttentionShape(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale if config.attention_scale is not None else config.head_dim**-0.5,
        window=config.window_of(layer),
        softcap=config.attention_softcap,
        eps=config.rms_eps,
    )


def attend(
    ops: Ops,
    shape: AttentionShape,
    qkv: torch.Tensor,  # (R, (heads + 2 * kv_heads) * head_dim)
    norms: tuple[torch.Tensor, torch.Tensor] | None,  # per-head weights for q and k, (head_dim,) each
    rope: RopeTable,
    batch: Batch,
    cache: tuple[KV, int],  # the layer's keys and values, and its cache group
) -> torch.Tensor:
    """Returns (R, heads * head_dim). Writes the rows' keys and values into the pool first."""
    h, kv, d = shape.heads, shape.kv_heads, shape.head_dim
    rows = qkv.view(-1, h + 2 * kv, d)
    q, k, v = rows[:, :h], rows[:, h : h + kv], rows[:, h + kv :]
    if norms is not None:
        q = ops.rms_norm(q, norms[0], shape.eps)
        k = ops.rms_norm(k, norms[1], shape.eps)
    ops.rope_(q, batch.positions, rope.cos, rope.sin)
    ops.rope_(k, batch.positions, rope.cos, rope.sin)
    kv_pool, group = cache
    ops.kv_write(k, v, kv_pool, batch.slots[group])
    return ops.attention(
        q, kv_pool, batch.tables[group], batch.row_starts, batch.pos_starts, shape.scale, shape.window, shape.softcap
    )
