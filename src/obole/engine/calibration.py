"""What a step costs on this machine with this model: a few steps on free blocks of the KV pool, timed at start."""

from __future__ import annotations

import time

import numpy as np

from obole.config import BLOCK_SIZE
from obole.costmodel import StepCost
from obole.engine.batch import Arrays
from obole.engine.steps import Steps

ROWS = (1, 2, 4, 8, 16, 32, 64)  # between them the curve is straight
ROWS_IN_CONTEXT = 8
CONTEXT = 1024  # tokens before the rows for which the cost of context is measured
BUDGET = 0.7  # seconds for the curve; what is too slow to be measured in that time is guessed from what was
ROW_SHARE = 0.15  # guess: of the time of a single row, what a further one adds, once arithmetic is the limit


def calibrate(steps: Steps, num_groups: int, max_tokens: int) -> StepCost:
    """Measure the cost of steps of one sequence. Writes to free blocks, so nothing may be running.

    `max_tokens`: most that one sequence can have.
    """
    began = time.perf_counter()
    rows: list[int] = []
    seconds: list[float] = []
    for count in ROWS:
        if count > max_tokens:
            break
        guess = 0.0
        if seconds:
            guess = seconds[-1] + (count - rows[-1]) * ROW_SHARE * seconds[0]
        rows.append(count)
        left = BUDGET - (time.perf_counter() - began)
        seconds.append(fastest(steps, num_groups, count, 0) if 3 * guess <= left or count <= 2 else guess)
    cost = StepCost(rows, seconds)
    context = min(CONTEXT, max_tokens - ROWS_IN_CONTEXT)
    if context > 0:
        one = fastest(steps, num_groups, 1, context) - seconds[0]
        many = fastest(steps, num_groups, ROWS_IN_CONTEXT, context) - float(cost.curve(ROWS_IN_CONTEXT)[ROWS_IN_CONTEXT])
        cost.context_seconds = max(0.0, (many - one) / (ROWS_IN_CONTEXT - 1) / context)
        cost.read_seconds = max(0.0, one / context - cost.context_seconds)
    return cost


def fastest(steps: Steps, num_groups: int, rows: int, context: int) -> float:
    """Seconds of a step of one sequence: the faster of two, after one that records it. Writes to free blocks."""
    batch = _batch(steps, num_groups, rows, context)
    steps.compute(batch, True)
    times = []
    for _ in range(2):
        began = time.perf_counter()
        steps.compute(batch, True)
        times.append(time.perf_counter() - began)
    return min(times)


def _batch(steps: Steps, num_groups: int, rows: int, context: int) -> Arrays:
    """Rows at positions [context, context + rows) of one sequence, in whatever blocks there are."""
    positions = np.arange(context, context + rows, dtype=np.int32)
    blocks = -(-(context + rows) // BLOCK_SIZE)
    tables = tuple(
        (np.arange(blocks, dtype=np.int32) * num_groups + group)[None] % steps.pool.num_blocks for group in range(num_groups)
    )
    slots = tuple(table[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE for table in tables)
    starts = np.array([0, rows], dtype=np.int32)
    return Arrays(np.zeros(rows, np.int32), positions, starts, np.array([context], np.int32), tables, slots)
