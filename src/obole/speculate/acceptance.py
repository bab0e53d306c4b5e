"""How likely a drafted token is to be what the model chooses: learnt from what was observed, for every kind of proposal.

A kind is (source, whether the match was ambiguous, length of the match); for each kind and each place in the draft there is the
chance that the token there is right given that all before it were. Places seldom reached borrow from the first place of
longer matches, since a match of four and three right tokens is a match of seven. Counts fade, so a change of text is followed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from obole.speculate.proposal import Proposal
from obole.types import Source

UNAMBIGUOUS = 0.9  # share of the times that the same token came next
FIRST_GUESS = (0.15, 0.3, 0.5, 0.62, 0.74, 0.85, 0.92)  # before anything was observed, by bucket of match length
GUESS_WEIGHT = 4.0  # observations that a guess counts for
MOST_TRIALS = 200.0  # of one kind and place remembered at most: half of the weight is gone after 140 more
OWN_WEIGHT = 6.0  # observations of others that one's own are weighed against
OWN_TRIALS = 32.0
FADE = 0.99  # of what is known of a drafter, with every step in which it was not asked: it is tried again some day
PLACES = (0, 1, 2, 4, 8, 16, 32)  # first place of each bucket


class Kind(NamedTuple):
    source: Source
    ambiguous: bool
    bucket: int  # of match length


def bucket_of(length: int) -> int:
    """Bucket of a match length: 1, 2, 3-4, 5-8, 9-16, 17-32, more."""
    return min(6, max(0, length - 1).bit_length())


def kind_of(proposal: Proposal) -> Kind:
    return Kind(proposal.source, proposal.sure < UNAMBIGUOUS, bucket_of(proposal.length))


@dataclass(slots=True)
class Counts:
    right: float = 0.0
    trials: float = 0.0

    def add(self, right: int, trials: int, most: float) -> None:
        self.right += right
        self.trials += trials
        if self.trials > most:
            self.right *= most / self.trials
            self.trials = most

    def fade(self) -> None:
        self.right *= FADE
        self.trials *= FADE

    def estimate(self, guess: float, weight: float) -> float:
        return (self.right + weight * guess) / (self.trials + weight)


@dataclass(slots=True)
class Acceptance:
    """What is known of all sequences together; what one sequence adds is in its own table of `Counts`, which it owns."""

    counts: dict[tuple[Kind, int], Counts] = field(default_factory=dict)

    def first(self, kind: Kind, own: dict[Kind, Counts]) -> float:
        """Chance that the first token of a proposal is right."""
        chance = self._first(kind)
        mine = own.get(kind)
        return chance if mine is None else mine.estimate(chance, OWN_WEIGHT)

    def survival(self, kind: Kind, own: dict[Kind, Counts], length: int, tokens: int) -> list[float]:
        """Chance that all of the first j tokens are right, for j = 1 to `tokens`; `length`: of the match."""
        if kind.source is Source.FORCED:
            return [1.0] * tokens
        mine = own.get(kind)
        alive, curve = 1.0, []
        for bucket, start in enumerate(PLACES):
            end = PLACES[bucket + 1] if bucket + 1 < len(PLACES) else tokens
            chance = self._first(kind)
            if bucket:
                later = self._first(Kind(kind.source, False, bucket_of(length + start)))
                known = self.counts.get((kind, bucket))
                chance = later if known is None else known.estimate(later, GUESS_WEIGHT)
            if mine is not None:
                chance = mine.estimate(chance, OWN_WEIGHT)
            for _ in range(start, min(end, tokens)):
                alive *= chance
                curve.append(alive)
            if end >= tokens:
                break
        return curve

    def observe(self, kind: Kind, own: dict[Kind, Counts], right: int, tested: int) -> None:
        """Of the first `tested` tokens of a proposal, `right` were right: all of them, or all but the last one."""
        for bucket, start in enumerate(PLACES):
            if start >= tested:
                break
            end = PLACES[bucket + 1] if bucket + 1 < len(PLACES) else tested
            trials = min(end, tested) - start
            self.counts.setdefault((kind, bucket), Counts()).add(max(0, min(end, right) - start), trials, MOST_TRIALS)
        own.setdefault(kind, Counts()).add(right, tested, OWN_TRIALS)

    def fade(self, kind: Kind, own: dict[Kind, Counts]) -> None:
        """Forget a little of a kind of proposal that was not asked for, and so could not be observed."""
        for counts in (*(self.counts.get((kind, bucket)) for bucket in range(len(PLACES))), own.get(kind)):
            if counts is not None:
                counts.fade()

    def _first(self, kind: Kind) -> float:
        guess = FIRST_GUESS[kind.bucket] * (0.6 if kind.ambiguous else 1.0)
        known = self.counts.get((kind, 0))
        return guess if known is None else known.estimate(guess, GUESS_WEIGHT)
