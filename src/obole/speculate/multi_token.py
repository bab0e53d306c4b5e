"""Drafts that the model itself predicts: masks behind the newest token, at which it says what comes several places later.

A pass over masks shows what may follow; the next pass confirms that as it does any draft, with new masks behind it. Or, where
the request allows it, what the model is sure of is taken as it is (ConfAdapt, arXiv 2602.06019): this is lossy.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from obole.config import MultiToken
from obole.speculate.acceptance import GUESS_WEIGHT, MOST_TRIALS, Acceptance, Counts, Kind
from obole.speculate.proposal import Proposal
from obole.types import DEFAULT_MTP_TOKENS, DEFAULT_TAU, Ahead, Draft, SamplingParams, Sequence, Source

MASKS = Kind(Source.MTP, False, 3)  # what was predicted at masks, whatever the confidence
LEVELS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)  # edges of buckets of confidence
LEAST_CHANCE = 0.4  # of all predictions up to one for it to be drafted: what comes after a wrong one is predicted in vain
LATER = 0.5  # of a token that is only predicted by this pass, and costs another row in the next one
TAKEN = 3.0  # tokens that a pass may be expected to yield unverified, before any was seen
RECENT = 0.3  # share of the newest pass in what is expected
MARGIN = 1.5  # masks for each token that is expected


@dataclass(slots=True)
class Calibration:
    """How often predictions of a confidence were right, of all sequences together; before any was seen: that often."""

    counts: list[Counts] = field(default_factory=lambda: [Counts() for _ in range(len(LEVELS) + 1)])

    def chance(self, confidence: float) -> float:
        return self.counts[bisect_right(LEVELS, confidence)].estimate(confidence, GUESS_WEIGHT)

    def observe(self, ahead: list[Ahead], right: int, tested: int) -> None:
        """Of the first `tested` predictions, `right` were right: all of them, or all but the last one."""
        for i, (_, confidence) in enumerate(ahead[:tested]):
            self.counts[bisect_right(LEVELS, confidence)].add(i < right, 1, MOST_TRIALS)

    def survival(self, ahead: list[Ahead], least: float) -> list[float]:
        """Chance that all of the first j predictions are right, for j from 1, as long as it is at least `least`."""
        alive, curve = 1.0, []
        for _, confidence in ahead:
            alive *= self.chance(confidence)
            if alive < least:
                break
            curve.append(alive)
        return curve


@dataclass(slots=True)
class Foresight:
    """What one sequence does with the masks of its model. `most`: masks of a pass at most.

    `ahead`: what was predicted to come after the newest token, to draft from, where `threshold` is None. Otherwise predictions
    of at least that probability are taken unverified. Then the text depends on the number of masks, so that is a function of
    the sequence's own past alone: the same request gets the same answer whatever runs beside it and however fast.
    """

    mask_id: int
    most: int
    threshold: float | None = None
    fixed: bool = False  # as many masks as may be
    ahead: list[Ahead] = field(default_factory=list)
    taken: float = TAKEN  # tokens that a pass yields unverified, on average of late

    def masks(self) -> int:
        """Masks of the next pass of a sequence whose predictions are taken unverified."""
        return self.most if self.fixed else min(self.most, round(MARGIN * self.taken) + 2)

    def took(self, count: int, masks: int) -> None:
        """So many predictions were taken of those at `masks` masks."""
        self.taken += RECENT * (count * (MARGIN if count == masks else 1.0) - self.taken)

    def proposal(self, room: int) -> Proposal | None:
        """Predictions to be confirmed and masks behind them, `room` in all. None if there is room for none."""
        tokens = [token for token, _ in self.ahead[:room]]
        masks = min(self.most, room - len(tokens))
        if not tokens and masks <= 0:
            return None
        return Proposal(Source.MTP, 1, 1.0, tokens + [self.mask_id] * masks, masks=masks)


def foresight(model: MultiToken, params: SamplingParams) -> Foresight:
    """How a request is served by a model that predicts several tokens."""
    most = min(model.most, params.mtp_tokens or DEFAULT_MTP_TOKENS) - 1
    threshold = DEFAULT_TAU if params.tau is None else params.tau
    if params.mtp == "static":
        return Foresight(model.mask_id, most, 0.0, fixed=True)
    return Foresight(model.mask_id, most, threshold if params.mtp == "confadapt" else None)


def unverified(seq: Sequence, ahead: Foresight, room: int) -> Draft | None:
    """Masks whose predictions are taken as they are. The first token of an answer comes alone, also where its prompt was
    cached and there are few rows to compute."""
    masks = min(ahead.masks(), room)
    if masks <= 0 or len(seq.tokens) == seq.prompt_len:
        return None
    return Draft([ahead.mask_id] * masks, [], None, masks, ahead.threshold)


def expected(proposal: Proposal, chances: list[float], acceptance: Acceptance, own: dict[Kind, Counts]) -> list[float]:
    """What each row of a proposal is worth in tokens: predictions by their chances, masks by what will be drafted of them."""
    chances = chances[: len(proposal.tokens) - proposal.masks]
    reached = LATER * (chances[-1] if chances else 1.0)
    return chances + [reached * chance for chance in acceptance.survival(MASKS, own, 1, proposal.masks)]
