"""Puts the parts of an engine together: checkpoint, kernels, model, cache, scheduler, text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from obole.cache.managers import KVCacheManager
from obole.cache.pool import KVPool
from obole.cache.prefix import Value
from obole.cache.spec import group_layers
from obole.config import BLOCK_SIZE, EngineConfig
from obole.engine.calibration import calibrate
from obole.engine.machine import available_memory, total_memory, usable_processors
from obole.engine.results import EngineInfo
from obole.engine.runner import Runner
from obole.engine.steps import Steps
from obole.errors import ConfigError, ModelError
from obole.kernels.dispatch import load_ops
from obole.layers.rope import context_limit
from obole.models.loading import Loader
from obole.models.registry import build_model, cache_spec
from obole.scheduler.scheduler import Scheduler
from obole.speculate.controller import Controller
from obole.speculate.lookup import IndexStore
from obole.speculate.memory import Memory
from obole.text.folder_tokenizer import tokenizer_from_folder
from obole.text.gguf_tokenizer import tokenizer_from_gguf
from obole.text.templates import ChatTemplate, chat_templates_from_folder, chat_templates_from_gguf
from obole.text.tokenizer import Tokenizer
from obole.weights.checkpoint import Checkpoint, open_checkpoint
from obole.weights.hub import resolve
from obole.weights.store import models_dir

Progress: TypeAlias = Callable[[str, int, int], None]  # (stage, done, total); a total of 0 is unknown

FREE_MEMORY_SHARE = 0.5  # of what is available after the weights are loaded; pages are taken as they are first written
MAX_BLOCKS = (1 << 31) // BLOCK_SIZE - 1  # slots are 32-bit numbers
CONTEXTS = 64  # full contexts beyond which a larger pool would serve nobody on one machine


@dataclass(frozen=True, slots=True)
class Parts:
    info: EngineInfo
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    scheduler: Scheduler
    runner: Runner
    controller: Controller
    vocab_size: int
    eos_ids: frozenset[int]


def assemble(model: str, revision: str | None, config: EngineConfig, progress: Progress | None) -> Parts:
    """Load everything. Raises `ModelError` or `ConfigError`; nothing is left running in that case."""
    started = time.perf_counter()
    torch.set_num_threads(1)  # the kernels have their own pool; a second one would fight over the same cores
    checkpoint = open_checkpoint(resolve(model, revision, progress))
    tokenizer, template = load_text(checkpoint)
    ops = load_ops(config.kernels, config.threads or usable_processors())
    context = pick_context(checkpoint, config)
    spec = cache_spec(checkpoint.config)
    groups = group_layers(spec)
    dtype = pick_kv_dtype(checkpoint, config)
    block_bytes = KVPool.bytes_per_block(spec, groups, dtype)
    pool = KVPool(spec, groups, pick_num_blocks(config, block_bytes, len(groups), context, checkpoint.nbytes), dtype)
    digest = checkpoint.digest.hex()
    identity: dict[str, Value] = {
        "weights": digest,
        "kv_dtype": str(dtype),
        "kernels": ops.name,
        "rope_context": context if checkpoint.config.rope.kind == "dynamic" else 0,
    }
    chunk = config.scheduler.max_batch_tokens
    manager = KVCacheManager(groups, pool.num_blocks, identity, prefix_cache=config.scheduler.prefix_cache, chunk=chunk)
    scheduler = Scheduler(config.scheduler, manager, context)
    built = build_model(Loader(checkpoint, ops, progress), context, scheduler.max_length)
    per_layer = 2 * dtype.itemsize
    kv_layers = tuple((x.window, x.kv_heads * x.head_dim * per_layer) for x in spec.layers)
    info = EngineInfo(
        model=model,
        architecture=checkpoint.config.architecture,
        parameters=parameter_count(checkpoint),
        weight_bytes=built.layer_bytes + sum(x.nbytes for x in {id(x): x for x in (built.embedding, built.head)}.values()),
        weights_digest=digest,
        kernels=ops.name,
        threads=ops.threads,
        kv_dtype=str(dtype).removeprefix("torch."),
        kv_bytes=pool.nbytes,
        kv_tokens=pool.num_blocks * BLOCK_SIZE // len(groups),
        kv_bytes_per_token=sum(size for _, size in kv_layers),
        max_context=context,
        load_seconds=time.perf_counter() - started,
    )
    steps = Steps(built, pool, ops)
    runner = Runner(steps, len(groups), merge_layers(kv_layers))
    vocab_size = checkpoint.config.vocab_size if tokenizer is None else tokenizer.vocab_size
    controller = Controller(
        mode=config.speculate,
        cost=calibrate(steps, len(groups), scheduler.max_prompt),
        vocab_size=vocab_size,
        memory=Memory(config.draft_memory, config.draft_memory_seconds),
        store=IndexStore(config.draft_memory),
        clock=time.perf_counter,
    )
    eos_ids = frozenset(checkpoint.config.eos_ids) | (tokenizer.end_ids if tokenizer is not None else frozenset())
    return Parts(info, tokenizer, template, scheduler, runner, controller, vocab_size, eos_ids)


def load_text(checkpoint: Checkpoint) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """The tokenizer and chat template that came with the weights; None for what there is not."""
    if checkpoint.gguf_metadata is not None:
        tokenizer: Tokenizer | None = tokenizer_from_gguf(checkpoint.gguf_metadata, models_dir().parent / "tokenizers")
        sources = chat_templates_from_gguf(checkpoint.gguf_metadata)
    elif checkpoint.folder is not None:
        tokenizer = tokenizer_from_folder(checkpoint.folder)
        sources = chat_templates_from_folder(checkpoint.folder)
    if tokenizer is not None and tokenizer.vocab_size > checkpoint.config.vocab_size:
        raise ModelError(
            f"{checkpoint.path}: the tokenizer has {tokenizer.vocab_size} tokens, but the model only "
            f"{checkpoint.config.vocab_size}: they do not belong together."
        )
    return tokenizer, ChatTemplate(sources, tokenizer) if tokenizer is not None and sources else None


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
        exact = checkpoint.tensors["model.embed_tokens.weight"].kind == "F32"
        return torch.float32 if exact else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.kv_dtype]


def pick_num_blocks(config: EngineConfig, block_bytes: int, num_groups: int, context: int, weight_bytes: int) -> int:
    """Blocks in the pool: what --kv-device holds, else half of what the weights leave free, at most 64 full contexts."""
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
    available = int((available_memory() - weight_bytes) * FREE_MEMORY_SHARE)
    most = CONTEXTS * num_groups * -(-context // BLOCK_SIZE)
    blocks = min(available // block_bytes, most, MAX_BLOCKS)
    if blocks < smallest:
        raise ConfigError(
            f"There is not enough free memory for a KV pool ({max(available, 0)} bytes): free some or set kv_device."
        )
    return blocks


def parameter_count(checkpoint: Checkpoint) -> int:
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())


def merge_layers(layers: tuple[tuple[int | None, int], ...]) -> tuple[tuple[int | None, int], ...]:
    """Sum the bytes per token of layers that see the same window."""
    totals: dict[int | None, int] = {}
    for window, size in layers:
        totals[window] = totals.get(window, 0) + size
    return tuple(totals.items())
