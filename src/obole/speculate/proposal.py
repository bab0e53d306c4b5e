"""What a drafter says: these tokens may come next, and why it thinks so. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from obole.types import Distribution, Draft, Source

LONGEST_DRAFT = 64  # tokens: beyond, the pass costs more for each further token than it can save


@dataclass(slots=True)
class Proposal:
    """`length`: tokens before the place that the drafter has seen before, in this order; `sure`: the share of the times that
    it then saw `tokens[0]` come next. `tokens` is never empty.

    `distributions`, `masks`: as in `types.Draft`.
    """

    source: Source
    length: int
    sure: float
    tokens: list[int]
    distributions: list[Distribution] | None = None
    masks: int = 0

    def draft(self, length: int) -> Draft:
        """The first `length` tokens, as they are hung on a sequence."""
        sources = [self.source] * (len(self.tokens) - self.masks)
        return Draft(self.tokens, sources, self.distributions, self.masks).first(length)
