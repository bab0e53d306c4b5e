"""The receipt of a finished answer, from the tally kept while it was made."""

from __future__ import annotations

from collections.abc import Mapping

from obole.types import Receipt, Sequence, Source, Tier


def receipt(seq: Sequence) -> Receipt:
    """Close the tally of a finished sequence. The sums of `Receipt` hold exactly.

    A sequence that was never scheduled has spent all its time in the queue, one without a token all the rest in prefill.

    Raises ValueError for a sequence that is still at work.
    """
    tally = seq.tally
    if tally.finished is None:
        raise ValueError(f"Choice {seq.index} of request {seq.request.id} is not finished and has no receipt yet.")
    scheduled = tally.finished if tally.first_scheduled is None else tally.first_scheduled
    first_token = tally.finished if tally.first_token is None else tally.first_token
    queued = scheduled - seq.request.arrival
    prefill = first_token - scheduled
    decode = tally.finished - first_token
    cached = max(0, tally.cached)
    outputs = len(seq.tokens) - seq.prompt_len
    unaided = outputs - sum(tally.accepted.values())
    sources = {Source.MODEL: unaided, **tally.accepted}
    return Receipt(
        prompt_tokens=seq.prompt_len,
        cached_tokens=cached,
        computed_tokens=seq.prompt_len - cached - tally.unread,
        unread_tokens=tally.unread,
        output_tokens=outputs,
        sources={str(name): count for name, count in sources.items() if count},
        forward_passes=tally.passes,
        weight_bytes=tally.weight_bytes,
        kv_bytes=tally.kv_bytes,
        preemptions=tally.preemptions,
        recomputed_tokens=tally.recomputed,
        queued_seconds=queued,
        prefill_seconds=prefill,
        decode_seconds=decode,
        total_seconds=queued + prefill + decode,
        seed=seq.seed,
        drafted={str(name): count for name, count in tally.drafted.items()},
        rejected={str(name): count - tally.accepted.get(name, 0) for name, count in tally.drafted.items()},
        draftless_passes=tally.draftless_passes,
        draft_seconds=tally.draft_seconds,
        saved_seconds=tally.saved_seconds,
        acceptance="lossy" if tally.confidences else "distribution" if tally.resampled else "exact",
        cached_by_tier=_by_tier(cached, tally.cached_by_tier),
        load_seconds=tally.load_seconds,
        held_tokens=tally.held,
        mask_rows=tally.masks,
        confidences=tuple(tally.confidences),
    )


def _by_tier(cached: int, below: Mapping[Tier, int]) -> dict[str, int]:
    """Cached tokens of every tier; what has not come up from a lower one was in the pool."""
    counts = {str(tier): below.get(tier, 0) if cached else 0 for tier in Tier}
    return counts | {str(Tier.DEVICE): cached - sum(counts.values())}
