"""What state each layer of a model keeps for each token, declared by the model and served by the cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MAX_GROUPS = 8


class StateKind(Enum):
    FULL = "full"  # keys and values of every token
    SLIDING = "sliding"  # keys and values of the last `window` tokens


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """State of one layer. With a window w, the token at position p sees positions p - w + 1 to p."""

    kind: StateKind
    kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class CacheSpec:
    layers: tuple[LayerSpec, ...]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share one block table. A block holds 16 tokens for as many layers as the largest group has.

    All groups take blocks from one pool: layer `layers[i]` uses slot i of the pool's tensors, at the block ids in the
    sequence's table of this group.
    """

    kind: StateKind
    window: int | None
    layers: tuple[int, ...]


def group_layers(spec: CacheSpec) -> tuple[CacheGroup, ...]:
    """Split layers into at most 8 groups of equal size (the last of a kind may be smaller), so that a block fits any.

    The smaller the groups, the less of a block is left unused; the more there are, the more tables each sequence has.
    Gemma 3 with 26 layers (4 full, 22 sliding) becomes one full group of 4 and six sliding ones of at most 4.
    All layers must agree in heads and head size; full groups come first.
    """
    by_kind: dict[tuple[StateKind, int | None], list[int]] = {}
    for i, layer in enumerate(spec.layers):
        by_kind.setdefault((layer.kind, layer.window), []).append(i)
    size = min(len(layers) for layers in by_kind.values())
    while sum(-(-len(layers) // size) for layers in by_kind.values()) > max(MAX_GROUPS, len(by_kind)):
        size += 1
    groups = [
        CacheGroup(kind, window, tuple(layers[i : i + size]))
        for (kind, window), layers in by_kind.items()
        for i in range(0, len(layers), size)
    ]
    return tuple(sorted(groups, key=lambda g: g.kind is not StateKind.FULL))
