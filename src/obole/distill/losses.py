"""What a student is taught in one step: to say at its masks what its teacher says after the student's own words.

On-policy self-distillation (arXiv 2602.06019): the student's most likely tokens y at the masks are put in the masks' place,
the frozen teacher reads the same sequence, and its most likely tokens are the student's targets. No gradient flows through y.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from obole.distill.layout import Layout
from obole.distill.recipe import SOFT, TRUTH, Objective

CONFIDENT = 0.9  # the threshold at which accepted lengths are reported

Forward = Callable[..., torch.Tensor]  # (ids, positions, allow, wanted=, masks=) -> logits (B, n, V): see model.Decoder


@dataclass(frozen=True, slots=True)
class Losses:
    """`total`: scalar with a gradient. The rest are sums over the regions that count, for a mean over several batches.

    `cross_entropy` (predictions), `accepted` (tokens that ConfAdapt would emit at a threshold of 0.9), `agreed` (tokens
    until the first that is not its target: what verification would emit), `predictions`, `regions`: scalars.
    """

    total: torch.Tensor
    cross_entropy: torch.Tensor
    accepted: torch.Tensor
    agreed: torch.Tensor
    predictions: torch.Tensor
    regions: torch.Tensor


def kept_regions(lengths: torch.Tensor, layout: Layout) -> torch.Tensor:
    """(B, M) bool: the regions that count, those whose first hidden token is still in the text of its row.

    So the region whose predictions meet the end of the text is the last one, and nothing is asked about what follows it.
    """
    return layout.hidden[:, 0] < lengths[:, None]


def prefix_slots(lengths: torch.Tensor, layout: Layout) -> torch.Tensor:
    """(B, S) bool: slots of text whose next token is in the text, too."""
    return ~layout.is_mask & (layout.source + 1 < lengths[:, None])


def run_lengths(holds: torch.Tensor) -> torch.Tensor:
    """The length of the run of True that begins the last axis, and at least 1, since one token is always emitted."""
    return holds.long().cumprod(-1).sum(-1).clamp(min=1)


def step_losses(
    student: Forward,
    teacher: Forward,
    rows: torch.Tensor,
    lengths: torch.Tensor,
    layout: Layout,
    mask_id: int,
    objective: Objective,
    divisors: tuple[float, float] | None = None,
) -> Losses:
    """The losses of one batch: one pass of the student with a gradient and, unless targets are "truth", one of the teacher.

    `rows` (B, W) int64: texts, padded; W must reach to the last token that the layout hides. `lengths` (B,) int64: tokens
    of each that are text. `mask_id` must be above the ids of all tokens. `divisors`: numbers of predictions and of prefix
    tokens that sums are divided by (those of a batch of which this is a part); None: this batch's own.
    """
    text = rows[:, layout.source]
    ids = torch.where(layout.is_mask, mask_id, text)
    wanted = None if objective.prefix else layout.predict.flatten()
    logits = student(ids, layout.positions, layout.allow, wanted=wanted, masks=layout.is_mask)
    predicted = logits[:, layout.predict] if wanted is None else logits.view(*ids.shape[:1], *layout.predict.shape, -1)
    log_probs = predicted.log_softmax(-1)  # (B, M, k, V)
    with torch.no_grad():
        confidence, said = log_probs[..., :mask_id].max(-1)
    kept = kept_regions(lengths, layout)
    each, targets = _each(log_probs, said, rows, text, teacher, layout, mask_id, objective.targets)
    if objective.entropy:
        each = each - objective.entropy * (log_probs.exp() * log_probs).sum(-1)
    predictions = kept.sum() * said.shape[-1]
    shares = divisors or (predictions, prefix_slots(lengths, layout).sum())
    total = (each * kept[..., None]).sum() / max(shares[0], 1)
    if objective.prefix:
        total = total + objective.prefix * _prefix_sum(logits, rows, lengths, layout) / max(shares[1], 1)
    with torch.no_grad():
        nll = -log_probs.gather(-1, targets[..., None])[..., 0]
        return Losses(
            total,
            (nll * kept[..., None]).sum(),
            (run_lengths(confidence >= math.log(CONFIDENT)) * kept).sum(),
            (run_lengths(said == targets) * kept).sum(),
            predictions,
            kept.sum(),
        )


def _each(
    log_probs: torch.Tensor,
    said: torch.Tensor,
    rows: torch.Tensor,
    text: torch.Tensor,
    teacher: Forward,
    layout: Layout,
    mask_id: int,
    targets: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, M, k) losses of the predictions, and (B, M, k) the tokens that would have been right."""
    if targets == TRUTH:
        right = rows[:, layout.hidden]
    else:
        with torch.no_grad():
            ids = text.index_copy(1, layout.predict[:, 1:].flatten(), said[..., :-1].flatten(1))
            seen = teacher(ids, layout.positions, layout.allow, wanted=layout.predict.flatten())
            taught = seen[..., :mask_id].reshape(*said.shape, mask_id)
            right = taught.argmax(-1)
        if targets == SOFT:
            ours = log_probs[..., :mask_id]
            return functional.kl_div(ours, taught.log_softmax(-1), reduction="none", log_target=True).sum(-1), right
    return -log_probs.gather(-1, right[..., None])[..., 0], right


def _prefix_sum(logits: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Sum of the next-token losses of `logits` (B, S, V) over the text."""
    following = rows[:, (layout.source + 1).clamp(max=rows.shape[1] - 1)]
    each = functional.cross_entropy(logits.transpose(1, 2), following, reduction="none")
    return (each * prefix_slots(lengths, layout)).sum()
