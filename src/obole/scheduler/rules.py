"""What a step does to one sequence, the rows it takes and the tokens it yields; and where sequences may be. Pure."""

from __future__ import annotations

from obole.cache.ledger import LedgerError
from obole.types import Draft, FinishReason, Sequence, Source, Status, StepPlan


def append(plan: StepPlan, seq: Sequence, rows: int) -> None:
    """Have a step compute the next `rows` tokens of a sequence."""
    end = seq.num_computed + rows
    plan.sequences.append(seq)
    plan.starts.append(seq.num_computed)
    plan.rows.append(rows)
    plan.samples.append(end == len(seq.tokens) < seq.max_len)
    plan.total_rows += rows


def book_draft(seq: Sequence, taken: list[int]) -> tuple[Source, ...]:
    """Who proposed each of the tokens taken: those that are as drafted, from the first on. The draft is then done with."""
    tally, draft = seq.tally, seq.draft
    if draft is None:
        tally.draftless_passes += 1
        return (Source.MODEL,) * len(taken)
    seq.draft = None
    tally.masks += draft.masks
    if draft.threshold is not None:
        return _book_unverified(seq, draft, len(taken) - 1)
    tally.draftless_passes += not draft.sources
    tally.resampled |= draft.distributions is not None
    for source in draft.sources:
        tally.drafted[source] = tally.drafted.get(source, 0) + 1
    accepted = []
    for token, drafted, source in zip(taken, draft.tokens, draft.sources, strict=False):
        if token != drafted:
            break
        accepted.append(source)
        tally.accepted[source] = tally.accepted.get(source, 0) + 1
    return (*accepted, *[Source.MODEL] * (len(taken) - len(accepted)))


def _book_unverified(seq: Sequence, draft: Draft, ahead: int) -> tuple[Source, ...]:
    """All tokens but the first were predicted ahead, at as many of the masks."""
    tally = seq.tally
    tally.drafted[Source.MTP] = tally.drafted.get(Source.MTP, 0) + draft.masks
    tally.accepted[Source.MTP] = tally.accepted.get(Source.MTP, 0) + ahead
    return (Source.MODEL, *[Source.MTP] * ahead)


def lags(seq: Sequence) -> bool:
    """Whether more is to be computed than what its last step yielded: a prompt, or what preemption has taken away."""
    return len(seq.tokens) > seq.num_computed + seq.stride


def due(seq: Sequence) -> int:
    """Rows for which a sequence that lags wants a place.

    The newest token of an answer whose tokens are taken unverified is left for the step after: masks belong behind it, and the
    text must not depend on whether the sequence was preempted.
    """
    return seq.pending - (seq.stride > 1 and len(seq.tokens) > seq.prompt_len)


def most_rows(seq: Sequence) -> int:
    """Rows that a sequence which does not lag may want in a step, drafts aside, that wait for room: tokens and masks."""
    return 2 * seq.stride - 1


def masks_due(seq: Sequence) -> int:
    """Masks of a sequence without which a step would yield other tokens: its predictions are taken unverified."""
    return seq.draft.masks if seq.draft is not None and seq.draft.threshold is not None else 0


def take(seq: Sequence, new: list[int]) -> tuple[int, FinishReason | None]:
    """Append tokens one by one until one of them ends the answer; returns how many were taken.

    The rules apply in the order of the tokens, so a stop in the middle of several accepted at once comes before a length
    limit that they cross; on the same token, the stop wins.
    """
    tokens, text, stop_ids, max_len, constraint = seq.tokens, seq.text, seq.stop_ids, seq.max_len, seq.constraint
    taken = 0
    for token in new:
        tokens.append(token)
        taken += 1
        length = len(tokens)
        stops = length >= seq.min_len
        if stops and token in stop_ids:
            return taken, FinishReason.STOP
        if text is not None and text.push(token, stops=stops):
            return taken, FinishReason.STOP
        if constraint is not None and taken == len(new) and constraint.over:
            return taken, FinishReason.STOP
        if length >= max_len:
            return taken, FinishReason.LENGTH
    return taken, None


def end(seq: Sequence, reason: FinishReason, computed_before: int, now: float) -> None:
    """The sequence is over. `computed_before`: tokens that were computed before it was preempted."""
    seq.finish_reason = reason
    seq.status = Status.FINISHED
    seq.parent = None
    seq.tally.finished = now
    seq.tally.unread = max(0, seq.prompt_len - max(seq.num_computed, computed_before))


def check_places(
    live: set[Sequence], waiting: list[Sequence], running: list[Sequence], loading: list[Sequence], loads: set[Sequence]
) -> None:
    """Raise `LedgerError` unless every live sequence is in one of the lists, and there as it should be."""
    if len(live) != len(waiting) + len(running) + len(loading) or {*waiting, *running, *loading} != live:
        raise LedgerError("A sequence is lost, or in two places.")
    if any(seq.status is not Status.WAITING or seq.tables for seq in waiting):
        raise LedgerError("A waiting sequence owns blocks.")
    if any(seq.status is not Status.RUNNING for seq in running):
        raise LedgerError("A sequence runs that should not.")
    if any(seq.status is not Status.LOADING for seq in loading) or not loads >= set(loading):
        raise LedgerError("A sequence waits for blocks that do not come.")
