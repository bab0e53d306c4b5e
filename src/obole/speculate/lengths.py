"""How many tokens to draft for each sequence of a step: the most tokens a second, by what is expected of each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

GAIN = 1.03  # a draft must promise at least this much more than none: costs and chances are only estimates


Floats = np.ndarray[Any, np.dtype[np.float64]]


def best_lengths(survival: Sequence[Sequence[float]], decoding: int, seconds: Floats, extra: float = 0.0) -> list[int]:
    """Tokens to draft for each sequence, 0 for none.

    `survival[i][j]`: chance that the first j + 1 drafted tokens of sequence i are all right, never increasing with j, so that
    taking the best tokens of all sequences takes a beginning of each draft. `decoding`: sequences of the step that yield a
    token whatever is drafted. `seconds[r]`: time of the step with r drafted rows. `extra`: seconds that each adds beside.
    """
    places = [(-chance, i) for i, chances in enumerate(survival) for chance in chances]
    places.sort(key=_by_chance)  # stable: equal chances of one sequence stay in their order
    del places[seconds.size - 1 :]
    lengths = [0] * len(survival)
    drafted, rate = _best([-chance for chance, _ in places], decoding, seconds, extra)
    if rate > GAIN * decoding / seconds[0]:
        for _, i in places[:drafted]:
            lengths[i] += 1
    return lengths


def best_alone(chances: Sequence[float], decoding: int, seconds: Floats, extra: float) -> tuple[int, float]:
    """Tokens to draft for one sequence of a step in which no other drafts, and the tokens a second that this promises."""
    drafted, rate = _best(chances, decoding, seconds, extra)
    plain = decoding / float(seconds[0])
    return (drafted, rate) if rate > GAIN * plain else (0, plain)


def _best(chances: Sequence[float], decoding: int, seconds: Floats, extra: float) -> tuple[int, float]:
    """How many drafted rows, taken in this order, give the most tokens a second, and how many those are."""
    if not chances:
        return 0, 0.0
    count = len(chances)
    rate = (decoding + np.cumsum(chances)) / (seconds[1 : count + 1] + extra * np.arange(1, count + 1))
    best = int(rate.argmax())
    return best + 1, float(rate[best])


def _by_chance(place: tuple[float, int]) -> float:
    return place[0]
