"""A step as tensors: what every layer of a model gets to see."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """R rows (tokens to compute) of S sequences; the rows of a sequence lie together, in order.

    One entry of `tables` and `slots` for each cache group.
    """

    token_ids: torch.Tensor  # int32 (R,)
    positions: torch.Tensor  # int32 (R,)
    row_starts: torch.Tensor  # int32 (S + 1,): rows row_starts[s] to row_starts[s + 1] belong to sequence s
    pos_starts: torch.Tensor  # int32 (S,): position of the first row of each sequence
    tables: tuple[torch.Tensor, ...]  # int32 (S, blocks): block ids, -1 where nothing may be read
    slots: tuple[torch.Tensor, ...]  # int32 (R,): where a row's keys and values go, block id * 16 + offset
