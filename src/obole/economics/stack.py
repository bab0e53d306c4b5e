"""How large a cache must be for a block to be found again: LRU stack distances, and the hits that follow for any size.

A cache of C blocks that drops the least recently used one finds a block if fewer than C others were used since it was used
last (Mattson et al. 1970, "Evaluation techniques for storage hierarchies"). Distances are those at the moment a request is
looked up; then its blocks count as used from last to first, so that no block is dropped before those that come after it in the
same text, as in `cache/ledger.py`. A tree of counts over the order of use (Fenwick 1994) answers a request in one go.

Logs with more blocks than memory are sampled by the hash of the block (SHARDS, Waldspurger et al., FAST 2015): of every
block in the sample all uses are seen, and its distance in the sample, divided by the rate, estimates the true one. Where the
sample has more or fewer uses than its rate says, since it has or lacks a very common block, the difference is taken for uses at
the shortest distance (SHARDS-adj of the same paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

NEVER = np.inf  # distance of a block that was not used before
HASH_BITS = 24  # of a block's key that decide whether it is in the sample
STEPS = 32  # sizes of the curve for each doubling: within 2.2 % of any size
LARGEST = 40  # doublings


@dataclass(frozen=True, slots=True)
class Lookup:
    """Blocks of a request that are in the sample: `places` of them in the request, and at what distance they were found.

    Each stands for `weight` blocks.
    """

    places: Ints
    distances: Floats
    weight: float


class StackDistances:
    """Takes requests one by one. Owns at most about 150 bytes for each of `most` blocks."""

    def __init__(self, most: int = 1 << 20) -> None:
        self._most = most
        self._threshold = 1 << HASH_BITS
        self._last: dict[int, int] = {}  # block -> slot of its last use; later uses have higher slots
        self._size = 1 << 16
        self._tree = np.zeros(self._size + 1, np.int64)
        self._next = 1

    @property
    def rate(self) -> float:
        """Share of all blocks that is looked at."""
        return self._threshold / (1 << HASH_BITS)

    def request(self, keys: Sequence[int], used: Sequence[int] = ()) -> Lookup:
        """Look up `keys` in this order, then count them and those of `used` after them as used. Keys are well-mixed hashes of
        at least 24 bits; one that comes twice is the same block."""
        places = [place for place, key in enumerate(keys) if self._sampled(key)]
        mine = [keys[place] for place in places]
        rate = self.rate
        slots = np.array([self._last.get(key, 0) for key in mine], np.int64)
        found = slots > 0
        distances = np.full(slots.size, NEVER)
        later = len(self._last) - self._before(slots[found])  # used at the same time as it or since, itself counted
        distances[found] = later / rate
        self._use([*mine, *(key for key in used if self._sampled(key))])
        return Lookup(np.array(places, np.int64), distances, 1.0 / rate)

    def _sampled(self, key: int) -> bool:
        return key & ((1 << HASH_BITS) - 1) < self._threshold

    def _before(self, slots: Ints) -> Ints:
        """Blocks whose last use is before each of these slots."""
        at, count = slots - 1, np.zeros(slots.size, np.int64)
        while at.any():
            count += self._tree[at]  # of slot 0 there is nothing
            at &= at - 1
        return count

    def _add(self, slots: Ints, value: int) -> None:
        while slots.size:
            np.add.at(self._tree, slots, value)
            slots = slots + (slots & -slots)
            slots = slots[slots <= self._size]

    def _use(self, keys: Sequence[int]) -> None:
        order = list(dict.fromkeys(keys))[::-1]
        if self._next + len(order) > self._size:
            self._compact(len(order))
        old = [slot for key in order if (slot := self._last.get(key)) is not None]
        self._add(np.array(old, np.int64), -1)
        new = range(self._next, self._next + len(order))
        self._add(np.arange(new.start, new.stop, dtype=np.int64), 1)
        self._last.update(zip(order, new, strict=True))
        self._next = new.stop
        while len(self._last) > self._most:
            self._threshold //= 2
            self._last = {key: slot for key, slot in self._last.items() if self._sampled(key)}
            self._compact(0)

    def _compact(self, room: int) -> None:
        """Number the last uses anew, in order, without gaps."""
        keys = sorted(self._last, key=self._last.__getitem__)
        while self._size < 2 * (len(keys) + room):
            self._size *= 2
        self._last = {key: slot for slot, key in enumerate(keys, 1)}
        self._next = len(keys) + 1
        self._tree = np.zeros(self._size + 1, np.int64)
        self._add(np.arange(1, self._next, dtype=np.int64), 1)


def sizes() -> Ints:
    """Sizes, in blocks, at which curves are known: all small ones, then so many for each doubling."""
    return np.unique(np.exp2(np.arange(LARGEST * STEPS + 1) / STEPS).astype(np.int64))


@dataclass(slots=True)
class HitCurve:
    """Tokens that a cache of a given size would find. `tokens`: all that were looked for."""

    tokens: float = 0.0
    missed: float = 0.0  # tokens of blocks that were looked up, less those that the sample stands for
    _hits: Floats = field(default_factory=lambda: np.zeros(sizes().size))  # at a distance up to each size, not summed up
    _sizes: Ints = field(default_factory=sizes)

    def add(self, lookup: Lookup, tokens: Sequence[int], total: int) -> None:
        """A request of `total` tokens. `tokens[i]`: of block i that can be found, whose distance `lookup` has."""
        self.tokens += total
        if lookup.weight != 1.0:
            self.missed += float(sum(tokens)) - lookup.weight * sum(tokens[place] for place in lookup.places)
        if not lookup.places.size:
            return
        weights = np.asarray(tokens, np.float64)[lookup.places] * lookup.weight
        known = np.isfinite(lookup.distances)
        at = np.searchsorted(self._sizes, np.ceil(lookup.distances[known]))
        np.add.at(self._hits, np.minimum(at, self._hits.size - 1), weights[known])

    def hits(self, blocks: float) -> float:
        """Tokens found by a cache of so many blocks, rounded down to the next size at which that is known."""
        place = int(np.searchsorted(self._sizes, blocks, side="right"))
        return max(0.0, float(self._hits[:place].sum()) + self.missed) if place else 0.0

    def ratio(self, blocks: float) -> float:
        return min(1.0, self.hits(blocks) / self.tokens) if self.tokens else 0.0

    def points(self) -> list[tuple[int, float]]:
        """(blocks, hit ratio), from a single block to the smallest size that finds all that can be found."""
        if not self.tokens:
            return []
        last = int(np.flatnonzero(self._hits)[-1]) if self._hits.any() else 0
        ratios = np.clip((np.cumsum(self._hits) + self.missed) / self.tokens, 0.0, 1.0)
        return [(int(self._sizes[i]), float(ratios[i])) for i in range(last + 1)]
