"""One model with its KV pool, its cache's books and its scheduler, ready to run steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from obole.cache.managers import KVCacheManager
from obole.cache.pool import KVPool, bytes_per_token
from obole.cache.prefix import Value
from obole.cache.spec import CacheSpec, group_layers
from obole.config import BLOCK_SIZE, EngineConfig
from obole.engine.machine import available_memory, total_memory
from obole.engine.runner import Runner
from obole.engine.steps import Steps
from obole.errors import ConfigError
from obole.kernels.ops import KV_FORMATS, Ops
from obole.layers.rope import context_limit
from obole.models.loading import Loader, Progress
from obole.models.registry import build_model, cache_spec
from obole.scheduler.scheduler import Scheduler
from obole.weights.checkpoint import Checkpoint

FREE_MEMORY_SHARE = 0.5  # of what is available after the weights are loaded; pages are taken as they are first written
MAX_BLOCKS = (1 << 31) // BLOCK_SIZE - 1  # slots are 32-bit numbers
CONTEXTS = 64  # full contexts beyond which a larger pool would serve nobody on one machine


@dataclass(frozen=True, slots=True)
class Core:
    """`context`: positions that are served. The runner is the only one to write to the pool, the scheduler to the cache."""

    pool: KVPool
    cache: KVCacheManager
    scheduler: Scheduler
    runner: Runner
    context: int

    @property
    def weight_bytes(self) -> int:
        model = self.runner.steps.model
        return model.layer_bytes + sum(x.nbytes for x in {id(x): x for x in (model.embedding, model.head)}.values())


def load_core(checkpoint: Checkpoint, ops: Ops, config: EngineConfig, progress: Progress | None) -> Core:
    """Read the weights and lay out the cache. Raises `ModelError` or `ConfigError`."""
    context = pick_context(checkpoint, config)
    spec = cache_spec(checkpoint.config)
    groups = group_layers(spec)
    dtype = pick_kv_dtype(checkpoint, config)
    block_bytes = KVPool.bytes_per_block(spec, groups, dtype)
    pool = KVPool(spec, groups, pick_num_blocks(config, block_bytes, len(groups), context, checkpoint.nbytes), dtype)
    identity: dict[str, Value] = {
        "weights": checkpoint.digest.hex(),
        "kv_dtype": str(dtype),
        "kernels": ops.name,
        "rope_context": context if checkpoint.config.rope.kind == "dynamic" else 0,
    }
    if config.quantize != "none":
        identity["quantize"] = config.quantize
    chunk = config.scheduler.max_batch_tokens
    manager = KVCacheManager(groups, pool.num_blocks, identity, prefix_cache=config.scheduler.prefix_cache, chunk=chunk)
    scheduler = Scheduler(config.scheduler, manager, context)
    loader = Loader(checkpoint, ops, progress, quantize=config.quantize != "none")
    model = build_model(loader, context, scheduler.max_length)
    runner = Runner(Steps(model, pool, ops), len(groups), kv_layers(spec, dtype))
    return Core(pool, manager, scheduler, runner, context)


def kv_layers(spec: CacheSpec, dtype: torch.dtype) -> tuple[tuple[int | None, int], ...]:
    """(window, bytes per token) of the layers that see the same window, summed."""
    totals: dict[int | None, int] = {}
    for layer in spec.layers:
        totals[layer.window] = totals.get(layer.window, 0) + bytes_per_token(layer.kv_heads, layer.head_dim, dtype)
    return tuple(totals.items())


def pick_context(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Positions to serve: what the model was made for, or fewer or, with a scaled position embedding, more if asked."""
    limit = context_limit(checkpoint.config)
    if config.max_context is None:
        return min(checkpoint.config.max_position, limit)
    if config.max_context > limit:
        raise ConfigError(f"max_context {config.max_context} is beyond this model's {limit} positions: ask for less.")
    return config.max_context


def pick_kv_dtype(checkpoint: Checkpoint, config: EngineConfig) -> torch.dtype:
    if config.kv_dtype == "auto":
        exact = checkpoint.tensors["model.embed_tokens.weight"].kind == "F32" and config.quantize == "none"
        return torch.float32 if exact else torch.bfloat16
    return KV_FORMATS[config.kv_dtype]


def pool_bytes(checkpoint: Checkpoint, config: EngineConfig, tokens: int) -> int:
    """Bytes of a KV pool with room for so many tokens."""
    spec = cache_spec(checkpoint.config)
    groups = group_layers(spec)
    return -(-tokens // BLOCK_SIZE) * len(groups) * KVPool.bytes_per_block(spec, groups, pick_kv_dtype(checkpoint, config))


def pick_num_blocks(config: EngineConfig, block_bytes: int, num_groups: int, context: int, weight_bytes: int) -> int:
    """Blocks in the pool: what --kv-device holds, else half of what weights and --kv-ram leave free, at most 64 contexts."""
    smallest = 2 * num_groups  # two blocks in each group: room for a prompt of one token and its continuation
    if config.kv_device is not None:
        blocks = config.kv_device // block_bytes
        if blocks < smallest:
            need = smallest * block_bytes
            raise ConfigError(f"A KV pool of {config.kv_device} bytes is too small: this model needs at least {need} bytes.")
        if config.kv_device > total_memory():
            raise ConfigError(
                f"A KV pool of {config.kv_device} bytes is more than the machine's memory ({total_memory()} bytes): "
                "set kv_device to less."
            )
        return min(blocks, MAX_BLOCKS)
    available = int((available_memory() - weight_bytes - (config.kv_ram or 0)) * FREE_MEMORY_SHARE)
    most = CONTEXTS * num_groups * -(-context // BLOCK_SIZE)
    blocks = min(available // block_bytes, most, MAX_BLOCKS)
    if blocks < smallest:
        beside, less = (
            ("", "") if config.kv_ram is None else (f" beside kv_ram of {config.kv_ram} bytes", ", or kv_ram to less")
        )
        raise ConfigError(
            f"There is not enough free memory for a KV pool ({max(available, 0)} bytes){beside}: free some, or set "
            f"kv_device{less}."
        )
    return blocks


def parameter_count(checkpoint: Checkpoint) -> int:
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
