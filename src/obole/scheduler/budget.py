"""How many rows a step may have: what prompts may take beside the sequences that are waiting for their next token. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from obole.config import SchedulerConfig
from obole.costmodel import StepCost

LEAST_ROWS = 16  # of prompts in a step, so that they go on however slow the machine


@dataclass(slots=True)
class StepBudget:
    """`rows` at most, and where sequences decode no more of prompts than keep the step within `seconds`.

    The rows of a prompt are reckoned with the context that they see. `drafted`: rows that drafts will add, which take time, but
    no prompt's place. `cost` None: rows are all that counts.
    """

    rows: int
    taken: int  # rows of the step so far
    seconds: float = 0.0
    drafted: int = 0
    cost: StepCost | None = None
    _prompt_rows: int = 0
    _context_seconds: float = 0.0  # of the prompts so far

    def room(self, start: int) -> int:
        """Rows that a prompt of which `start` tokens are computed may take."""
        room = self.rows - self.taken
        if self.cost is None or room <= 0:
            return max(0, room)
        left = self.seconds - self._context_seconds
        fitting = self.cost.rows_within(left, self.taken + self.drafted, start, room)
        return min(room, max(LEAST_ROWS - self._prompt_rows, fitting))

    def take(self, rows: int, start: int) -> None:
        self.taken += rows
        self._prompt_rows += rows
        if self.cost is not None:
            self._context_seconds += self.cost.context_of(rows, start)


def step_budget(config: SchedulerConfig, decoding: int, contexts: int, cost: StepCost | None, drafted: int = 0) -> StepBudget:
    """Of a step in which `decoding` sequences, with so many cached tokens and drafted ones in all, wait for a token."""
    if cost is None or decoding == 0:
        return StepBudget(config.max_batch_tokens, decoding)
    plain = cost.of(decoding, contexts, contexts)
    # the decoding rows' own context is part of both sides
    own = plain - cost.of(decoding, 0, 0)
    return StepBudget(config.max_batch_tokens, decoding, config.step_stretch * plain - own, drafted, cost)
