"""A step plan as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from obole.config import BLOCK_SIZE
from obole.layers.batch import Batch
from obole.types import StepPlan

Ints = np.ndarray[Any, np.dtype[np.int32]]


class LogitRow(NamedTuple):
    sequence: int  # index in the plan
    row: int  # index in the batch
    position: int  # of the row's token in its sequence
    offset: int = 0  # drafted tokens up to and including the row's own; -1: a prompt token to be scored


@dataclass(frozen=True, slots=True)
class Arrays:
    """A `Batch` before it becomes one: the same fields as arrays, which cost less to make and to copy."""

    token_ids: Ints
    positions: Ints
    row_starts: Ints
    pos_starts: Ints
    tables: tuple[Ints, ...]
    slots: tuple[Ints, ...]

    def as_batch(self) -> Batch:
        """Tensors over the same memory."""
        return Batch(
            token_ids=torch.from_numpy(self.token_ids),
            positions=torch.from_numpy(self.positions),
            row_starts=torch.from_numpy(self.row_starts),
            pos_starts=torch.from_numpy(self.pos_starts),
            tables=tuple(torch.from_numpy(t) for t in self.tables),
            slots=tuple(torch.from_numpy(s) for s in self.slots),
        )


def build_batch(plan: StepPlan, num_groups: int) -> Arrays:
    """Lay the planned tokens of each sequence side by side."""
    count = len(plan.sequences)
    starts = np.array(plan.starts, dtype=np.int32)
    token_ids: list[int] = []
    if plan.total_rows == count:  # one row each: nothing to spread
        token_ids = [s.tokens[start] for s, start in zip(plan.sequences, plan.starts, strict=True)]
        row_starts, positions, owner = np.arange(count + 1, dtype=np.int32), starts, np.arange(count)
    else:
        for sequence, start, n in zip(plan.sequences, plan.starts, plan.rows, strict=True):
            token_ids.extend(sequence.tokens[start : start + n])
            if sequence.draft is not None:
                token_ids.extend(sequence.draft.tokens)
        rows = np.array(plan.rows, dtype=np.int32)
        row_starts = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(rows, out=row_starts[1:])
        positions = np.repeat(starts - row_starts[:-1], rows) + np.arange(row_starts[-1], dtype=np.int32)
        owner = np.repeat(np.arange(count), rows)
    tables = tuple(_table(plan, group) for group in range(num_groups))
    blocks, offsets = positions // BLOCK_SIZE, positions % BLOCK_SIZE
    slots = tuple(table[owner, blocks] * BLOCK_SIZE + offsets for table in tables)
    return Arrays(np.array(token_ids, dtype=np.int32), positions, row_starts, starts, tables, slots)


def _table(plan: StepPlan, group: int) -> Ints:
    tables = [s.tables[group] for s in plan.sequences]
    if len(tables) == 1:
        return np.array(tables, dtype=np.int32)
    padded = np.full((len(tables), max(map(len, tables))), -1, dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def logit_rows(plan: StepPlan) -> list[LogitRow]:
    """Rows that want logits, in order: each row followed by a prompt token still to be scored, each newest token, its draft."""
    wanted: list[LogitRow] = []
    first = 0
    for i, (sequence, start, n) in enumerate(zip(plan.sequences, plan.starts, plan.rows, strict=True)):
        if sequence.request.params.prompt_logprobs is not None:
            known = len(sequence.prompt_logprobs)  # after preemption the prompt is computed again, but not scored again
            for position in range(max(start, known), min(start + n, sequence.prompt_len - 1)):
                wanted.append(LogitRow(i, first + position - start, position, -1))
        if plan.samples[i]:
            drafted = 0 if sequence.draft is None else len(sequence.draft.tokens)
            for offset in range(drafted + 1):
                row = n - 1 - drafted + offset
                wanted.append(LogitRow(i, first + row, start + row, offset))
        first += n
    return wanted
