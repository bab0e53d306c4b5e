"""When requests come, whatever became of those before them: seconds after the beginning of a round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from obole.errors import InvalidRequest

MOST = 1_000_000  # requests of a round


def poisson(rate: float, seconds: float, *seed: int) -> list[float]:
    """Independent arrivals, `rate` a second on average, within `seconds`; the same seed, the same times. At least one.

    Raises `InvalidRequest` for a rate or a time that is none, and for more requests than are kept in memory.
    """
    if not 0 < rate < float("inf"):
        raise InvalidRequest("rate", f"rate must be a number of requests a second above 0, not {rate}.")
    if not 0 < seconds < float("inf"):
        raise InvalidRequest("seconds", f"seconds must be a number above 0, not {seconds}.")
    if rate * seconds > MOST:
        raise InvalidRequest("rate", f"These are more than {MOST:,} requests: ask for a lower rate or for fewer seconds.")
    draws = np.random.default_rng(seed)
    # given how many there are, the times of a Poisson process are uniform and independent
    count = max(1, int(draws.poisson(rate * seconds)))
    return [float(at) for at in np.sort(draws.uniform(0.0, seconds, count))]


def of_trace(times: Sequence[float], scale: float, seconds: float) -> list[float]:
    """The arrivals of a trace within the first `seconds`, its first one at 0, all times multiplied by `scale`.

    Raises `InvalidRequest` for a scale that is none.
    """
    if not 0 < scale < float("inf"):
        raise InvalidRequest("time_scale", f"time_scale must be a number above 0, not {scale}.")
    if not times:
        raise InvalidRequest("arrivals", "There are no arrivals in the trace.")
    first = min(times)
    found = sorted(at for time in times if (at := (time - first) * scale) < seconds)
    if len(found) > MOST:
        raise InvalidRequest("arrivals", f"These are more than {MOST:,} requests: ask for fewer seconds.")
    return found


def overlaid(sessions: Sequence[Sequence[float]], *seed: int) -> list[float]:
    """Times of the requests of sessions, each of which has a clock of its own that begins at 0, on one clock: every session
    begins at a random time within the length of the longest, and what goes beyond that comes at the beginning, so that as
    many run at any time. The same seed, the same times."""
    if not sessions:
        return []
    length = max(max(times) for times in sessions)
    if length <= 0:
        return [0.0 for times in sessions for _ in times]
    begun = np.random.default_rng(seed).uniform(0.0, length, len(sessions))
    return [float((start + at) % length) for start, times in zip(begun, sessions, strict=True) for at in times]
