"""What an unbounded cache would have found, and after how long blocks come back, in bounded memory.

Spatially hashed sampling: a key is followed if its hash is below a threshold, so that a block is followed always or never, and
counts are scaled up. Where too many keys are followed the threshold falls and those above it are let go of. Source: Waldspurger
et al., Efficient MRC construction with SHARDS, FAST 2015. Exact as long as no more than `limit` different keys were seen.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

_SPACE = 1 << 64
BUCKETS = 24  # of gaps: under 1 s, under 2 s, under 4 s, ... up to 97 days


@dataclass(frozen=True, slots=True)
class Reuse:
    """Blocks asked for and found so far, and estimates: found by a cache that never forgets, and found by it after how long.

    `gaps[i]`: after less than 2**i s (and at least half of that). `followed_hits`: an estimate of `hits` from the same
    sample as the others, so that both err alike.
    """

    asked: int
    hits: int
    followed_hits: float
    ideal_hits: float
    gaps: tuple[float, ...]
    followed: int
    rate: float  # share of the keys that are followed now

    @property
    def share_of_ideal(self) -> float | None:
        """Hits as a share of those of a cache that never forgets; None where that had none either."""
        return self.followed_hits / self.ideal_hits if self.ideal_hits else None


class ReuseEstimator:
    """Fed with every prompt's blocks in order. Not safe to be called by several threads at a time."""

    def __init__(self, limit: int = 1 << 16) -> None:
        self._limit = limit
        self._threshold = _SPACE
        self._last: dict[int, float] = {}  # hash of a key: when it was seen last
        self._largest: list[int] = []  # a heap of the hashes that are followed, negated
        self._asked = self._hits = 0
        self._sampled = self._sampled_hits = self._ideal = 0.0  # weighted, as the gaps are
        self._gaps = [0.0] * BUCKETS

    def prompt(self, keys: Sequence[bytes], now: float, hits: int) -> None:
        """A prompt of these blocks began, of which the first `hits` were found."""
        for index, key in enumerate(keys):
            self.add(key, now, index < hits)

    def add(self, key: bytes, now: float, was_hit: bool) -> None:
        """A block was asked for. `now`: seconds on any clock that does not go back; keys are hashes already."""
        self._asked += 1
        self._hits += was_hit
        mark = _mark(key)
        if mark >= self._threshold:
            return
        weight = _SPACE / self._threshold
        self._sampled += weight
        self._sampled_hits += weight * was_hit
        last = self._last.get(mark)
        if last is not None:
            self._ideal += weight
            self._gaps[bucket(now - last)] += weight
        else:
            heapq.heappush(self._largest, -mark)
        self._last[mark] = now
        while len(self._last) > self._limit:
            self._threshold = -heapq.heappop(self._largest)
            del self._last[self._threshold]

    def value(self) -> Reuse:
        scale = self._asked / self._sampled if self._sampled else 1.0  # popular keys are in the sample, or they are not
        gaps = tuple(scale * gap for gap in self._gaps)
        rate = self._threshold / _SPACE
        return Reuse(self._asked, self._hits, scale * self._sampled_hits, scale * self._ideal, gaps, len(self._last), rate)


def bucket(seconds: float) -> int:
    """Place of a gap in the histogram."""
    return 0 if seconds < 1 else min(BUCKETS - 1, int(math.log2(seconds)) + 1)


def _mark(key: bytes) -> int:
    """64 bits of a key, which is a cryptographic hash with at most a short suffix, spread over the whole space again."""
    folded = int.from_bytes(key[:8], "little") ^ int.from_bytes(key[-8:], "little") * 0x9E3779B97F4A7C15
    return folded % _SPACE
