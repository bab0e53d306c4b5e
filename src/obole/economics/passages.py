"""Text that many prompts have in common, but not at their beginning, where the prefix cache would find it.

Prompts of a sample are compared by the hashes of all runs of `SHINGLE` tokens behind the part that they share with another one.
Runs of tokens that many prompts have are passages; at the front of the prompt they would be found in the cache each time but
the first.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Tokens = np.ndarray[Any, np.dtype[np.int32]]
Hashes = np.ndarray[Any, np.dtype[np.uint64]]

SHINGLE = 32  # tokens; a power of two
LEAST_SHARE = 0.05  # of the prompts that have a passage
LEAST_PROMPTS = 3
SAME = 0.1  # by how much the number of prompts may change within a passage
MOST = 12  # passages told
ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Passage:
    """`prompts`: of the sample that have it. `position`: tokens before it, the median. `gain`: tokens of all these prompts that
    would be found in the cache if it stood in front, in whole blocks. `before`: tokens in front of it in one prompt."""

    tokens: Tokens
    prompts: int
    position: int
    gain: int
    before: Tokens


@dataclass(slots=True)
class Sample:
    """Prompts drawn evenly from a stream of any length (Vitter 1985, algorithm R): at most `most`, each cut to `longest`."""

    most: int = 400
    longest: int = 1 << 14
    seen: int = 0
    prompts: list[Tokens] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, prompt: Sequence[int]) -> None:
        self.seen += 1
        place = self._random.randrange(self.seen)
        if len(self.prompts) < self.most:
            self.prompts.append(self._cut(prompt))
        elif place < self.most:
            self.prompts[place] = self._cut(prompt)

    def _cut(self, prompt: Sequence[int]) -> Tokens:
        return np.asarray(prompt[: self.longest], np.int32)


def passages(prompts: Sequence[Tokens], block: int) -> list[Passage]:
    """The passages that would gain most, best first; no two have the same text."""
    tails = [prompt[shared:] for prompt, shared in zip(prompts, shared_prefixes(prompts), strict=True)]
    offsets = [len(prompt) - len(tail) for prompt, tail in zip(prompts, tails, strict=True)]
    hashes = [shingles(tail) for tail in tails]
    distinct = [np.unique(own) for own in hashes]
    known, counts = np.unique(np.concatenate([*distinct, np.empty(0, np.uint64)]), return_counts=True)
    least = max(LEAST_PROMPTS, int(np.ceil(LEAST_SHARE * len(prompts))))
    found: dict[int, tuple[int, int, int, int]] = {}  # hash of the run -> (gain, prompt, start, end)
    for number, own in enumerate(hashes):
        if own.size:
            often = counts[np.searchsorted(known, own)]
            for start, end in runs(often, least):
                length = end - start + SHINGLE - 1
                gain = (int(often[start:end].min()) - 1) * (length // block) * block
                found.setdefault(int(own[start]) ^ length, (gain, number, start, end))
    chosen: list[Passage] = []
    taken: set[int] = set()
    for _, number, start, end in sorted(found.values(), reverse=True):
        if len(chosen) == MOST:
            break
        own = hashes[number]
        first, last = fresh(covered([int(one) in taken for one in own])[start : end + SHINGLE - 1])
        length = last - first
        if length < SHINGLE:
            continue
        at, until = start + first, start + last - SHINGLE + 1  # shingles that are wholly new
        count = int(counts[np.searchsorted(known, own[at:until])].min())
        gain = (count - 1) * (length // block) * block
        if gain > 0:
            taken.update(map(int, own[at:until]))
            places = [np.flatnonzero(other == own[at]) for other in hashes]
            begins = [offset + int(place[0]) for place, offset in zip(places, offsets, strict=True) if place.size]
            begin, prompt = offsets[number] + at, prompts[number]
            before = prompt[max(0, begin - SHINGLE) : begin]
            chosen.append(Passage(prompt[begin : begin + length], count, int(np.median(begins)), gain, before))
    return sorted(chosen, key=lambda one: -one.gain)


def covered(known: Sequence[bool]) -> list[bool]:
    """Of the tokens of a text, whether one of the shingles that have it is known."""
    cover = [False] * (len(known) + SHINGLE - 1)
    for place, one in enumerate(known):
        if one:
            cover[place : place + SHINGLE] = [True] * SHINGLE
    return cover


def fresh(known: Sequence[bool]) -> tuple[int, int]:
    """[start, end) of the longest run of what is not known yet."""
    best = start = 0, 0
    for place, one in enumerate(known):
        start = (place + 1, place + 1) if one else (start[0], place + 1)
        best = max(best, start, key=lambda run: run[1] - run[0])
    return best


def runs(often: np.ndarray[Any, np.dtype[np.int64]], least: int) -> list[tuple[int, int]]:
    """[start, end) of places whose shingles occur in at least so many prompts, cut where that number changes."""
    found: list[tuple[int, int]] = []
    start = 0
    while start < often.size:
        if often[start] < least:
            start += 1
            continue
        other = np.abs(often[start:] - often[start]) > SAME * often[start]
        end = start + int(other.argmax()) if other.any() else int(often.size)
        found.append((start, end))
        start = end
    return found


def shared_prefixes(prompts: Sequence[Tokens]) -> list[int]:
    """Tokens that each prompt begins with as another one does: the most that any other has in common with it."""
    spelled = [prompt.astype(">i4").tobytes() for prompt in prompts]
    order = sorted(range(len(prompts)), key=spelled.__getitem__)
    shared = [0] * len(prompts)
    for one, next_ in itertools.pairwise(order):
        size = min(len(prompts[one]), len(prompts[next_]))
        different = prompts[one][:size] != prompts[next_][:size]
        common = int(different.argmax()) if different.any() else size
        shared[one], shared[next_] = max(shared[one], common), max(shared[next_], common)
    return shared


def shingles(tokens: Tokens) -> Hashes:
    """Hashes of the `SHINGLE` tokens from each place on, (len - SHINGLE + 1,): doubled five times from hashes of one token."""
    with np.errstate(over="ignore"):
        own = (tokens.astype(np.uint64) + np.uint64(1)) * ODD
        own ^= own >> np.uint64(29)
        width = 1
        while width < SHINGLE:
            if own.size <= width:
                return np.empty(0, np.uint64)
            own = own[:-width] * (ODD + np.uint64(2 * width)) + own[width:]
            own ^= own >> np.uint64(31)
            width *= 2
    return own
