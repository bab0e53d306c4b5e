"""Architecture name -> model. One row for each; anything else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from obole.cache.pool import KVPool
from obole.cache.spec import CacheSpec, LayerSpec, StateKind
from obole.config import ModelConfig
from obole.errors import ModelError
from obole.kernels.ops import Linear
from obole.layers.batch import Batch
from obole.models.gemma import Gemma3
from obole.models.llama import Llama
from obole.models.loading import Loader


class Model(Protocol):
    """What the engine needs of a model. `layer_bytes`: weights read by each pass, without embedding and head."""

    config: ModelConfig
    layer_bytes: int
    head: Linear
    embedding: Linear

    def forward(self, batch: Batch, pool: KVPool) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


MODELS: dict[str, Callable[[Loader, ModelConfig, int, int], Model]] = {
    "llama": Llama,
    "qwen2": Llama,
    "qwen3": Llama,
    "gemma3": Gemma3,
}


def build_model(loader: Loader, context: int, positions: int) -> Model:
    """Pack a checkpoint for a context, of which the first `positions` positions can come up.

    Raises `ModelError` for an architecture without a row here.
    """
    config = loader.checkpoint.config
    model = MODELS.get(config.architecture)
    if model is None:
        raise ModelError(f"Architecture {config.architecture!r} is not supported; {', '.join(MODELS)} are.")
    return model(loader, config, context, positions)


def cache_spec(config: ModelConfig) -> CacheSpec:
    """Full attention everywhere but in the layers that have a window."""
    windows = map(config.window_of, range(config.num_layers))
    return CacheSpec(
        tuple(
            LayerSpec(StateKind.FULL if w is None else StateKind.SLIDING, config.num_kv_heads, config.head_dim, w)
            for w in windows
        )
    )
