"""What steps cost on this machine with a model, as the audit needs it: whole steps of the engine, measured in turn.

The engine's own curve (`engine/calibration.py`) is measured in under a second when it opens and corrected as it works. An audit
has nothing to correct it by, so it takes longer, and takes medians: a busy neighbour then slows all numbers of rows alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from obole.costmodel import StepCost
from obole.engine.engine import Engine, Stream
from obole.engine.results import EngineInfo
from obole.speculate.acceptance import kind_of
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
    """`prompt_seconds`: of a token of a long prompt. `cost` has everything that a step takes, sampling included."""

    info: EngineInfo
    cost: StepCost
    prompt_seconds: float
    vocab_size: int


def measure(engine: Engine, rounds: int = ROUNDS) -> Machine:
    """Takes some seconds. The engine must be idle; what it then expects of drafts from lookup is wrong."""
    long = max(min(LONG, engine.max_context - 256), 1)
    short = min(SHORT, long)
    found: dict[tuple[int, int], list[float]] = {}
    prompts: list[float] = []
    for round_ in range(rounds + 1):  # the first one records the steps
        for context, counts in ((short, DRAFTED), (long, IN_CONTEXT)):
            with stepping(engine, context) as stream:
                for count in counts:
                    seconds = timed_step(engine, stream, count)
                    if round_:
                        found.setdefault((context, count), []).append(seconds)
    for round_ in range(3):
        prompts.append(prompt_seconds(engine, min(PROMPT, long), round_))
    return Machine(engine.info, fitted(found, short, long), statistics.median(prompts), engine.vocab_size)


def fitted(found: dict[tuple[int, int], list[float]], short: int, long: int) -> StepCost:
    """The cost of steps from times by (context, drafted rows), context taken off where it was short."""
    middle = {key: statistics.median(times) for key, times in found.items()}
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
    with engine.stream(_tokens(engine, context, 0), SamplingParams(ignore_eos=True, speculate="lookup")) as stream:
        next(stream)
        yield stream


def timed_step(engine: Engine, stream: Stream, count: int) -> float:
    """Seconds of a step that yields this sequence's next token, with so many drafted ones beside it. No other is computed."""
    controller = engine._controller
    before = controller.lengths

    def lengths(step: Step) -> list[int]:
        for state in step.states:
            state.proposal = Proposal(Source.LOOKUP, 1, 1.0, [0] * max(count, 1))
            state.kind = kind_of(state.proposal)
        return [count] * len(step.states)

    controller.lengths = lengths
    try:
        began = time.perf_counter()
        next(stream)
        return time.perf_counter() - began
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
