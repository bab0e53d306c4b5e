"""What a step costs on this machine with this model: a few steps on free blocks of the KV pool, timed at start."""

from __future__ import annotations

import time

import numpy as np

from obole.config import BLOCK_SIZE
from obole.costmodel import StepCost
from obole.engine.batch import Arrays
from obole.engine.steps import Steps

ROWS = (1, 16, 4, 8, 2, 32, 64)  # in the order of what they are worth; between those measured the curve is straight
ROWS_IN_CONTEXT = 8
CONTEXT = 1024  # tokens before the rows for which the cost of context is measured
BUDGET = 0.7  # seconds for the curve; what is too slow to be measured in that time is guessed from what was
ROW_SHARE = 0.15  # guess: of the time of a single row, what a further one adds, once arithmetic is the limit


def calibrate(steps: Steps, num_groups: int, max_tokens: int) -> StepCost:
    """Measure the cost of steps of one sequence. Writes to free blocks, so nothing may be running.

    `max_tokens`: most that one sequence can have.
    """
    began = time.perf_counter()
    found: dict[int, float] = {}
    guessed: dict[int, float] = {}
    for count in ROWS:
        if count > max_tokens:
            continue
        below = max((rows for rows in found if rows < count), default=0)
        guess = found[below] + (count - below) * ROW_SHARE * found[1] if below else 0.0
        if 3 * guess <= BUDGET - (time.perf_counter() - began):
            found[count] = fastest(steps, num_groups, count, 0)
        else:
            guessed[count] = guess
    found |= {count: guess for count, guess in guessed.items() if count > max(found)}
    rows = sorted(found)
    seconds = [found[count] for count in rows]
    cost = StepCost(rows, seconds)
    context = min(CONTEXT, max_tokens - ROWS_IN_CONTEXT)
    if context > 0:
        # Pages never written are all the same page of zeros, which costs nothing to read.
        blocks = min(-(-(context + ROWS_IN_CONTEXT) // BLOCK_SIZE) * num_groups, steps.pool.num_blocks)
        steps.pool.copy([(0, block) for block in range(1, blocks)])
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
