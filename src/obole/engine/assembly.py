"""Puts the parts of an engine together: checkpoint, kernels, model, cache, scheduler, drafters, text."""

from __future__ import annotations

import dataclasses
import functools
import time
from dataclasses import dataclass

import torch

from obole.config import BLOCK_SIZE, DRAFT_MEMORY, EngineConfig
from obole.engine.calibration import calibrate, fastest
from obole.engine.core import Core, load_core, parameter_count, pick_context, pool_bytes
from obole.engine.draft_model import DraftModel
from obole.engine.machine import usable_processors
from obole.engine.results import EngineInfo
from obole.engine.runner import Runner
from obole.engine.tiering import Tiering, open_tiering
from obole.errors import ConfigError, ModelError
from obole.kernels.dispatch import load_ops
from obole.kernels.ops import KV_FORMATS, Ops
from obole.models.loading import Progress
from obole.scheduler.loading import Loader
from obole.scheduler.scheduler import Scheduler
from obole.speculate.controller import Controller
from obole.speculate.lookup import IndexStore
from obole.speculate.memory import Memory
from obole.text.folder_tokenizer import tokenizer_from_folder
from obole.text.gguf_tokenizer import tokenizer_from_gguf
from obole.text.grammar import GrammarCompiler
from obole.text.templates import ChatTemplate, chat_templates_from_folder, chat_templates_from_gguf
from obole.text.tokenizer import Tokenizer
from obole.weights.checkpoint import Checkpoint, open_checkpoint
from obole.weights.hub import resolve
from obole.weights.store import models_dir

DRAFT_POOL_SHARE = 0.25  # of the bytes of the KV pool, beside these, that a draft model may have for its own
LEAST_DRAFT_TOKENS = 2 * BLOCK_SIZE  # that a draft model's pool holds in any case


@dataclass(frozen=True, slots=True)
class Parts:
    info: EngineInfo
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    scheduler: Scheduler
    runner: Runner
    controller: Controller
    tiering: Tiering | None
    vocab_size: int
    eos_ids: frozenset[int]
    grammars: GrammarCompiler | None


def assemble(model: str, revision: str | None, config: EngineConfig, progress: Progress | None) -> Parts:
    """Load everything. Raises `ModelError` or `ConfigError`; nothing is left running in that case."""
    started = time.perf_counter()
    torch.set_num_threads(1)  # the kernels have their own pool; a second one would fight over the same cores
    checkpoint = open_checkpoint(resolve(model, revision, progress))
    tokenizer, template = load_text(checkpoint)
    ops = load_ops(config.kernels, config.threads or usable_processors())
    core = load_core(checkpoint, ops, config, progress)
    draft = None
    if config.draft is not None:
        draft = load_draft(config.draft, checkpoint, tokenizer, ops, config, core, progress)
    vocab_size = count_tokens(checkpoint, tokenizer)
    remembered = DRAFT_MEMORY if config.draft_memory is None else config.draft_memory
    cost = core.scheduler.cost = calibrate(core.runner.steps, core.runner.num_groups, core.scheduler.max_prompt)
    controller = Controller(
        mode=config.speculate,
        cost=cost,
        vocab_size=vocab_size,
        memory=Memory(remembered, config.draft_memory_seconds),
        store=IndexStore(remembered, config.draft_memory_seconds),
        clock=time.perf_counter,
        draft_model=draft,
        multi_token=checkpoint.config.multi_token,
        stretch=config.scheduler.step_stretch,
    )
    ends = frozenset(checkpoint.config.eos_ids) | (tokenizer.end_ids if tokenizer is not None else frozenset())
    eos_ids = frozenset(token for token in ends if token < vocab_size)  # others never come
    info = describe(model, checkpoint, core, ops, time.perf_counter() - started)
    grammars = None if tokenizer is None else GrammarCompiler(tokenizer, eos_ids, checkpoint.config.vocab_size)
    runner = dataclasses.replace(core.runner, vocab_size=vocab_size)
    tiering = open_tiering(config, core.pool, core.cache, controller.memory, time.perf_counter)
    if tiering is not None:
        controller.saved = None if tiering.recall is None else tiering.recall.save
        chunk = config.scheduler.max_batch_tokens
        recompute = functools.partial(cost.prefill, chunk=chunk)
        core.scheduler.loader = Loader(core.cache, tiering.store, core.pool.block_bytes, recompute)
    return Parts(info, tokenizer, template, core.scheduler, runner, controller, tiering, vocab_size, eos_ids, grammars)


def describe(model: str, checkpoint: Checkpoint, core: Core, ops: Ops, load_seconds: float) -> EngineInfo:
    return EngineInfo(
        model=model,
        architecture=checkpoint.config.architecture,
        parameters=parameter_count(checkpoint),
        weight_bytes=core.weight_bytes,
        weights_digest=checkpoint.digest.hex(),
        kernels=ops.name,
        threads=ops.threads,
        kv_dtype=next(name for name, dtype in KV_FORMATS.items() if dtype == core.pool.dtype),
        kv_bytes=core.pool.nbytes,
        kv_tokens=core.pool.num_blocks * BLOCK_SIZE // core.runner.num_groups,
        kv_bytes_per_token=sum(size for _, size in core.runner.kv_layers),
        max_context=core.context,
        load_seconds=load_seconds,
    )


def load_draft(
    model: str,
    target: Checkpoint,
    tokenizer: Tokenizer | None,
    ops: Ops,
    config: EngineConfig,
    core: Core,
    progress: Progress | None,
) -> DraftModel:
    """A smaller model that drafts for `target`. Raises `ConfigError` unless their tokens mean the same.

    Its KV pool holds as many tokens as the target's, at most a share of that one's bytes; the least recently used make way.
    """
    checkpoint = open_checkpoint(resolve(model, None, progress))
    check_vocabulary(model, target, tokenizer, checkpoint)
    everything = pool_bytes(checkpoint, config, core.pool.num_blocks * BLOCK_SIZE // core.runner.num_groups)
    least = pool_bytes(checkpoint, config, LEAST_DRAFT_TOKENS)
    own_config = dataclasses.replace(
        config,
        max_context=min(core.context, pick_context(checkpoint, dataclasses.replace(config, max_context=None))),
        kv_device=max(least, min(everything, int(core.pool.nbytes * DRAFT_POOL_SHARE))),
    )
    own = load_core(checkpoint, ops, own_config, progress)
    seconds = fastest(own.runner.steps, own.runner.num_groups, 1, 0)
    runner = dataclasses.replace(
        own.runner, vocab_size=count_tokens(target, tokenizer), keeps_distributions=config.draft_acceptance == "resample"
    )
    return DraftModel(runner, own.cache, own.cache.chunk, own.scheduler.max_prompt, seconds)


def count_tokens(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> int:
    """Ids that mean something: a model may have rows beyond its tokenizer's vocabulary, and its mask is no token to choose."""
    size = checkpoint.config.vocab_size if tokenizer is None else tokenizer.vocab_size
    multi_token = checkpoint.config.multi_token
    return size if multi_token is None else min(size, multi_token.mask_id)


def check_vocabulary(model: str, target: Checkpoint, tokenizer: Tokenizer | None, draft: Checkpoint) -> None:
    sizes = target.config.vocab_size, draft.config.vocab_size
    other, _ = load_text(draft)
    if tokenizer is None or other is None:
        alike = sizes[0] == sizes[1]
    else:
        count = tokenizer.vocab_size
        alike = count == other.vocab_size and all(tokenizer.token_bytes(i) == other.token_bytes(i) for i in range(count))
    if not alike:
        raise ConfigError(
            f"draft: the tokens of {model} are not those of the model it should draft for ({sizes[1]} and {sizes[0]} of them): "
            "choose a smaller model of the same family."
        )


def load_text(checkpoint: Checkpoint) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """The tokenizer and chat template that came with the weights; None for what there is not."""
    multi_token = checkpoint.config.multi_token
    if checkpoint.gguf_metadata is not None:
        tokenizer: Tokenizer | None = tokenizer_from_gguf(checkpoint.gguf_metadata, models_dir().parent / "tokenizers")
        sources = chat_templates_from_gguf(checkpoint.gguf_metadata)
    elif checkpoint.folder is not None:
        tokenizer = tokenizer_from_folder(checkpoint.folder, None if multi_token is None else multi_token.mask_id)
        sources = chat_templates_from_folder(checkpoint.folder)
    if tokenizer is not None and tokenizer.vocab_size > checkpoint.config.vocab_size:
        raise ModelError(
            f"{checkpoint.path}: the tokenizer has {tokenizer.vocab_size} tokens, but the model only "
            f"{checkpoint.config.vocab_size}: they do not belong together."
        )
    if tokenizer is not None and multi_token is not None and tokenizer.vocab_size > multi_token.mask_id + 1:
        raise ModelError(
            f"{checkpoint.path}: multi_token.mask_token_id is {multi_token.mask_id}, but the tokenizer has "
            f"{tokenizer.vocab_size} tokens, and the mask must be the last one: correct config.json."
        )
    return tokenizer, ChatTemplate(sources, tokenizer) if tokenizer is not None and sources else None
