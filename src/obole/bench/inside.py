"""The few things about a running engine that only benchmarks look at; no other benchmark knows its insides."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from obole.config import SchedulerConfig
from obole.engine.engine import Engine, Stream
from obole.engine.prompts import Prompt
from obole.engine.results import Delta
from obole.engine.tiering import Tiering
from obole.errors import InvalidRequest
from obole.models.registry import Model
from obole.speculate.controller import always
from obole.types import Request, SamplingParams, Sequence, StepPlan


class BytesRead(NamedTuple):
    weights: int
    kv: int


def step(engine: Engine) -> None:
    """Compute one step for all requests."""
    engine._step()


def running(engine: Engine) -> int:
    """Sequences that take part in steps."""
    return engine._scheduler.num_running


def scheduling(engine: Engine) -> SchedulerConfig:
    return engine._scheduler.config


def vocab_size(engine: Engine) -> int:
    return engine.vocab_size


def model(engine: Engine) -> Model:
    return engine._runner.steps.model


def bytes_read(streams: list[Stream]) -> BytesRead:
    """What the receipts of these requests would say if they ended now."""
    tallies = [sequence.tally for stream in streams for sequence in stream._live.sequences]
    return BytesRead(sum(t.weight_bytes for t in tallies), sum(t.kv_bytes for t in tallies))


def new_tenant() -> str:
    """A tenant that nobody had before: nothing is cached or remembered for it."""
    return f"benchmark {secrets.token_hex(8)}"


def token_ids(engine: Engine, prompt: Prompt) -> tuple[int, ...]:
    return engine._ids(prompt)


def news(stream: Stream) -> list[Delta]:
    """The deltas that are there already, at most one a step. Computes nothing."""
    deltas = stream._live.deltas
    return [deltas.popleft() for _ in range(len(deltas))]


def speculation(engine: Engine) -> str:
    """Which drafts requests try that do not say."""
    return engine._controller.mode


def has_draft_model(engine: Engine) -> bool:
    return engine._controller.draft_model is not None


def predicts_ahead(engine: Engine) -> bool:
    """Whether the model predicts several tokens in one pass."""
    return engine._controller.multi_token is not None


def remember(engine: Engine, tenant: str, tokens: list[int]) -> None:
    """Let later requests of a tenant draft from these tokens, as from an earlier prompt and answer."""
    request = Request(
        id=f"remembered {secrets.token_hex(8)}", prompt_ids=tuple(tokens), params=SamplingParams(), seed=0, tenant=tenant
    )
    engine._controller.memory.remember(Sequence(request, 0, 0, len(tokens)), engine._clock())


@contextmanager
def always_drafting(engine: Engine, most: int) -> Iterator[None]:
    """Within, every proposal is followed for up to `most` tokens, whether that is likely to pay or not."""
    controller = engine._controller
    before = controller.lengths, controller.least_chance
    controller.lengths, controller.least_chance = always(most), 0.0
    try:
        yield
    finally:
        controller.lengths, controller.least_chance = before


@contextmanager
def small_steps(engine: Engine, rows: int) -> Iterator[None]:
    """Within, no step has more than `rows` rows, which must be no more than the engine was opened with."""
    scheduler = engine._scheduler
    before, scheduler.config = scheduler.config, dataclasses.replace(scheduler.config, max_batch_tokens=rows)
    try:
        yield
    finally:
        scheduler.config = before


def groups(engine: Engine) -> int:
    """Cache groups: blocks that 16 tokens take, where no window has passed."""
    return len(engine._scheduler.cache.groups)


def block_bytes(engine: Engine) -> int:
    return _tiering(engine).pool.block_bytes


def empty_pool(engine: Engine) -> None:
    """Have the pool give up all that is cached, as pressure would. Nothing may be running."""
    ledger, tiering = engine._scheduler.cache.ledger, _tiering(engine)
    blocks = [ledger.allocate() for _ in range(ledger.available)]
    tiering.carry(StepPlan([], [], [], [], [], demotions=ledger.take_given_up()))
    for block in blocks:
        ledger.release(block)


def write_all(engine: Engine) -> None:
    """Have all that waits for it written to disk."""
    tiering = _tiering(engine)
    tiering.after_step(0.0)
    while tiering.when_idle():
        pass
    tiering.store.flush()


@contextmanager
def with_tiers(engine: Engine, wanted: bool) -> Iterator[None]:
    """Within, blocks go down and come up, or if not `wanted`, what the pool gives up is lost as if there were no tiers."""
    if wanted:
        yield
        return
    tiering, loader = engine._tiering, engine._scheduler.loader
    engine._tiering = engine._scheduler.loader = None
    try:
        yield
    finally:
        ledger = engine._scheduler.cache.ledger
        ledger.take_given_up()
        ledger.take_named()
        engine._tiering, engine._scheduler.loader = tiering, loader


def _tiering(engine: Engine) -> Tiering:
    if engine._tiering is None:
        raise InvalidRequest("kv_ssd", "This engine has no tiers below its pool: set kv_ram or kv_ssd.")
    return engine._tiering
