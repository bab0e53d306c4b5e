"""What a step reads from memory and how long it takes, as functions of rows and context. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

ROW_TILE = 4  # kernels compute rows in multiples of this, once there are more than two
PACE_GAIN = 0.2  # share of a step's deviation that counts as a change of the machine's pace
SHAPE_GAIN = 0.05  # and as one of the curve at that number of rows


def visible_tokens(start: int, rows: int, window: int | None) -> int:
    """Cached tokens that rows at positions [start, start + rows) see between them, their own included.

    The attention kernel reads keys and values once for all rows of a sequence, so this is what comes from memory.
    """
    end = start + rows
    return end if window is None else end - max(0, start - window + 1)


def kv_bytes_read(start: int, rows: int, layers: tuple[tuple[int | None, int], ...]) -> int:
    """Bytes of keys and values read for [start, start + rows); `layers`: (window, bytes per token) of each kind summed."""
    return sum(visible_tokens(start, rows, window) * bytes_per_token for window, bytes_per_token in layers)


def weight_bytes_read(rows: int, heads: int, layer_bytes: int, head_bytes: int, embedding_row_bytes: int) -> int:
    """Bytes of weights that one pass over `rows` rows reads: those of each product once, the head's `heads` times.

    A product of more rows than fit the cache reads its weights again for every few dozen rows; that is not counted.
    """
    return layer_bytes + rows * embedding_row_bytes + heads * head_bytes


@dataclass(slots=True)
class StepCost:
    """Seconds that a step takes: a curve over its rows, and what context adds. Calibrated once, corrected by every step.

    `rows` (ascending, from 1) and `seconds` are measured with hardly any context; `context_seconds` is what a cached token
    adds for each row that sees it, `read_seconds` what it adds for each sequence. Machines that share their memory change
    their pace within seconds, so `pace` follows quickly, while the shape of the curve, on which decisions rest, follows
    slowly.
    """

    rows: list[int]
    seconds: list[float]
    context_seconds: float = 0.0
    read_seconds: float = 0.0
    pace: float = 1.0
    _curve: np.ndarray[Any, np.dtype[np.float64]] | None = None

    def curve(self, most: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Seconds (most + 1,) of steps of 0 to `most` rows at the reference pace, context aside. Beyond
        the last point, time is proportional to rows."""
        if self._curve is None or self._curve.size <= most:
            at = np.arange(max(most, self.rows[-1]) + 1, dtype=np.float64)
            whole = np.where(at > 2, np.ceil(at / ROW_TILE) * ROW_TILE, at)
            curve = np.maximum.accumulate(np.interp(whole, self.rows, self.seconds))  # more rows never take less time
            beyond = at > self.rows[-1]
            curve[beyond] = curve[self.rows[-1]] * at[beyond] / self.rows[-1]
            self._curve = curve
        return self._curve[: most + 1]

    def of(self, rows: int, context_rows: int, context: int) -> float:
        """Seconds of a step now; `context`: cached tokens of all its sequences, `context_rows`: each counted once a row."""
        reference = float(self.curve(rows)[rows]) + self.context_seconds * context_rows + self.read_seconds * context
        return self.pace * reference

    def prefill(self, start: int, end: int, chunk: int) -> float:
        """Seconds to compute the tokens [start, end) of one sequence alone, at most `chunk` of them in a step."""
        rows = end - start
        if rows <= 0:
            return 0.0
        whole, rest = divmod(rows, chunk)
        curve = self.curve(min(chunk, rows))
        steps = whole * float(curve[-1]) + float(curve[rest] if rest else 0.0)
        context_rows = (start + end) * rows / 2
        context = (whole + (rest > 0)) * (start + end) / 2  # each step reads what is before it once
        return self.pace * (steps + self.context_seconds * context_rows + self.read_seconds * context)

    def context_of(self, rows: int, start: int) -> float:
        """Seconds now that context adds for rows of one sequence at [start, start + rows): each sees what is before it."""
        return self.pace * (self.context_seconds * rows * (start + rows / 2) + self.read_seconds * (start + rows))

    def rows_within(self, seconds: float, rows: int, start: int, most: int) -> int:
        """Rows, at most `most`, at positions from `start` on that a step of `rows` others can take to be done in so many
        seconds; the context of the others is not counted."""
        added = np.arange(1, most + 1)
        context = self.context_seconds * added * (start + added / 2) + self.read_seconds * (start + added)
        taken = self.pace * (self.curve(rows + most)[rows + 1 :] + context)
        return int(np.searchsorted(taken, seconds, side="right"))

    def observe(self, rows: int, context_rows: int, context: int, seconds: float) -> None:
        """Learn from a step that took `seconds`. Outliers (a step of more than four times what was expected) count as such."""
        ratio = min(4.0, max(0.25, seconds / self.of(rows, context_rows, context)))
        self.pace *= ratio**PACE_GAIN
        if rows > self.rows[0]:
            whole = rows if rows <= 2 else -(-rows // ROW_TILE) * ROW_TILE  # what the curve says of these rows comes from there
            nearest = min(range(len(self.rows)), key=lambda i: abs(self.rows[i] - whole))
            self.seconds[nearest] *= ratio**SHAPE_GAIN
            self._curve = None
