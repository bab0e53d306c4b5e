"""Engines on tiny random checkpoints whose answers depend on their whole context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fakes.checkpoints import random_weights, tiny_config, write_hf
from obole import Engine
from obole.cache.pool import KVPool
from obole.cache.spec import group_layers
from obole.models.registry import cache_spec
from obole.weights.checkpoint import open_checkpoint

TinyEngine = Callable[..., Engine]


def write_tiny(folder: Path, arch: str, **overrides: Any) -> Path:
    """A checkpoint with fp32 weights, large enough to make every token matter to every later one."""
    config = tiny_config(arch, **overrides)
    return write_hf(folder, config, random_weights(config, seed=1, scale=0.25))


def pool_bytes(folder: Path, blocks: int, dtype: str = "float32") -> int:
    """What `kv_device` must be for a pool of so many blocks."""
    from obole.kernels.ops import KV_FORMATS

    spec = cache_spec(open_checkpoint(folder).config)
    return blocks * KVPool.bytes_per_block(spec, group_layers(spec), KV_FORMATS[dtype])
