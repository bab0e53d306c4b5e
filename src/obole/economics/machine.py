"""What steps cost on this machine with a model, as the audit needs it: whole steps of the engine, measured in turn.

The engine's own curve (`engine/calibration.py`) is measured in under a second when it opens and corrected as it works. An audit
has nothing to correct it by, so it takes longer, and takes medians: a busy neighbour then slows all numbers of rows alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from obole.costmodel import StepCost
from obole.engine.engine import Engine, Stream
from obole.engine.results import EngineInfo
from obole.speculate.acceptance import Acceptance, kind_of
from obole.speculate.controller import Step
from obole.speculate.proposal import Proposal
from obole.types import SamplingParams, Source

DRAFTED = (0, 1, 3, 7, 15, 31, 63)  # beside one row
IN_CONTEXT = (0, 7)
SHORT, LONG = 32, 1024  # tokens of context
PROMPT = 512
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """`cost`: all that a step takes, drafting, planning and settling included. `told`: what the engine's controller hears of
    it, the computation, by which it decides what to draft. `prompt_seconds`: of a token of a long prompt."""

    info: EngineInfo
    cost: StepCost
    told: StepCost
    prompt_seconds: float
    vocab_size: int


class Timed(NamedTuple):
    """Seconds of one step: all of it, and what the controller was told."""

    whole: float
    told: float


class Listening(StepCost):
    """What a controller decides by while steps are measured: it notes what it is told, and learns nothing of it."""

    seconds_told = 0.0

    def observe(self, rows: int, context_rows: int, context: int, seconds: float) -> None:  # noqa: ARG002
        self.seconds_told = seconds


def measure(engine: Engine, rounds: int = ROUNDS) -> Machine:
    """Takes some seconds. The engine must be idle, and knows of drafts and steps afterwards what it knew before."""
    long = max(min(LONG, engine.max_context - 256), 1)
    short = min(SHORT, long)
    found: dict[tuple[int, int], list[Timed]] = {}
    for round_ in range(rounds + 1):  # the first one records the steps
        for context, counts in ((short, DRAFTED), (long, IN_CONTEXT)):
            with stepping(engine, context) as stream:
                for count in counts:
                    timed = timed_step(engine, stream, count)
                    if round_:
                        found.setdefault((context, count), []).append(timed)
    with unlearning(engine):
        prompts = [prompt_seconds(engine, min(PROMPT, long), round_) for round_ in range(3)]
    whole, told = (
        fitted({key: statistics.median(one[part] for one in times) for key, times in found.items()}, short, long)
        for part in range(2)
    )
    return Machine(engine.info, whole, told, statistics.median(prompts), engine.vocab_size)


def fitted(middle: Mapping[tuple[int, int], float], short: int, long: int) -> StepCost:
    """The cost of steps from seconds by (context, drafted rows), context taken off where it was short."""
    added = {count: max(0.0, middle[long, count] - middle[short, count]) for count in IN_CONTEXT} if long > short else {}
    per_token = {count: value / (long - short) for count, value in added.items()}
    context_seconds = max(0.0, (per_token.get(7, 0.0) - per_token.get(0, 0.0)) / 7)
    read_seconds = max(0.0, per_token.get(0, 0.0) - context_seconds)
    rows = [1 + count for count in DRAFTED]
    seconds = [max(middle[short, n] - short * (context_seconds * (1 + n) + read_seconds), 1e-6) for n in DRAFTED]
    return StepCost(rows, list(np.maximum.accumulate(seconds)), context_seconds, read_seconds)


@contextmanager
def stepping(engine: Engine, context: int) -> Iterator[Stream]:
    """A sequence that decodes after so many tokens, for as long as the block lasts. Its prompt is read once."""
    params = SamplingParams(ignore_eos=True, speculate="lookup")
    with unlearning(engine), engine.stream(_tokens(engine, context, 0), params) as stream:
        next(stream)
        yield stream


@contextmanager
def unlearning(engine: Engine) -> Iterator[None]:
    """Within, steps and drafts teach the engine nothing: those measured here, all of them wrong, are no traffic."""
    controller = engine._controller
    before = controller.cost, controller.acceptance
    cost = controller.cost
    controller.cost = Listening(list(cost.rows), list(cost.seconds), cost.context_seconds, cost.read_seconds, cost.pace)
    controller.acceptance = Acceptance()
    try:
        yield
    finally:
        controller.cost, controller.acceptance = before


def timed_step(engine: Engine, stream: Stream, count: int) -> Timed:
    """The step that yields the next token of a sequence (`stepping`), with so many drafted ones beside it. No other is
    computed."""
    controller = engine._controller
    before, cost = controller.lengths, controller.cost
    assert isinstance(cost, Listening)

    def lengths(step: Step) -> list[int]:
        for state in step.states:
            state.proposal = Proposal(Source.LOOKUP, 1, 1.0, [0] * max(count, 1))
            state.kind = kind_of(state.proposal)
        return [count] * len(step.states)

    controller.lengths = lengths
    try:
        began = time.perf_counter()
        next(stream)
        return Timed(time.perf_counter() - began, cost.seconds_told)
    finally:
        controller.lengths = before


def prompt_seconds(engine: Engine, length: int, seed: int) -> float:
    """Seconds a token of a new prompt."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, speculate="off")
    [result] = engine.generate([_tokens(engine, length, 1 + seed)], params, tenant=f"measured {time.perf_counter_ns()}")
    return result.receipt.prefill_seconds / length


def _tokens(engine: Engine, count: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, engine.vocab_size, count).tolist()
    return ids
