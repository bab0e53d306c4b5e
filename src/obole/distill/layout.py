"""Where ground truth and masks go in a training sequence (arXiv 2602.06019, section on the training layout).

A row of text is cut into regions of P tokens. After each region K = k - 1 masks stand for the tokens that follow it, and
then the text goes on as if there were none: masks see the text before them and one another, the text sees only text. One
pass so trains the prediction of k tokens after every region, at the cost of the masks alone.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache

import torch

from obole.distill.recipe import ground_truth
from obole.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Layout:
    """S slots, of which M * K hold masks and the others the first tokens of the text, one after the other.

    `source` (S,) int64: the token of the text that a slot holds or, for a mask, the one it hides. It is also the slot's
    position, so the text that follows a region repeats the positions of its masks.
    `is_mask` (S,) bool. `allow` (S, S) bool: the query in row q may see the slot in column c.
    `predict` (M, k) int64: the slots that predict k tokens in a row, a region's last token and its masks.
    """

    source: torch.Tensor
    is_mask: torch.Tensor
    allow: torch.Tensor
    predict: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        return self.source

    @property
    def hidden(self) -> torch.Tensor:
        """(M, k): the tokens of the text that the slots in `predict` predict."""
        return self.source[self.predict] + 1

    def to(self, device: torch.device | str) -> Layout:
        return Layout(*(getattr(self, field.name).to(device) for field in fields(self)))


@lru_cache(maxsize=64)
def layout(slots: int, regions: int, k: int, roll: int = 0) -> Layout:
    """The layout of at most `slots` slots: the first region has P - roll tokens of text, the others P, each then k - 1 masks.

    `roll`, from 0 to P - 1, moves the ends of the regions along the text, which always starts at its beginning; it is the
    pattern rolled to the left, without the text that would come out on the right, after the last masks, to train nothing.
    Raises `ConfigError` for regions without room for text.
    """
    p, masks = ground_truth(slots, regions, k), k - 1
    if not 0 <= roll < p:
        raise ConfigError(f"roll must be from 0 to {p - 1}, not {roll}.")
    slot = torch.arange(roll, regions * (p + masks))  # of the pattern that is not rolled
    region, place = slot // (p + masks), slot % (p + masks)
    is_mask = place >= p
    source = region * p + place - roll
    at = torch.arange(len(slot))
    own = region[:, None] == region
    allow = (at[:, None] >= at) & (~is_mask | (is_mask[:, None] & own))
    ends = torch.arange(1, regions + 1) * (p + masks) - roll - k
    return Layout(source, is_mask, allow, ends[:, None] + torch.arange(k))


def reaching(slots: int, regions: int, k: int, roll: int, length: int, *, prefix: bool = False) -> Layout:
    """The layout without the regions that only predict what is behind the first `length` tokens of the text; at least one.

    `prefix`: with as many as it takes for all of these tokens but the last to be in slots of text.
    """
    tokens, p = length - 1 + roll, ground_truth(slots, regions, k)
    left = min(regions, max(1, -(-tokens // p) if prefix else tokens // p))
    return layout(left * (slots // regions), left, k, roll)
