"""How receipts tell of tiers."""

from __future__ import annotations

from obole.cli.receipts import receipt_rows
from obole.engine.results import Choice
from obole.types import FinishReason, Receipt, SamplingParams


def rows(**tiers: object) -> dict[str, str]:
    receipt = Receipt(
        prompt_tokens=100, cached_tokens=96, computed_tokens=4, unread_tokens=0, output_tokens=1, sources={"model": 1},
        forward_passes=1, weight_bytes=1, kv_bytes=1, preemptions=0, recomputed_tokens=0, queued_seconds=0.5,
        prefill_seconds=0.1, decode_seconds=0.0, total_seconds=0.6, seed=1, **tiers,
    )  # fmt: skip
    return dict(receipt_rows(Choice(0, "a", (1,), FinishReason.LENGTH, None, receipt), SamplingParams()))


def test_cached_tokens_are_split_where_any_came_from_below():
    told = rows(cached_by_tier={"device": 16, "ram": 0, "ssd": 80}, load_seconds=0.25)
    assert told["prompt"] == "100 tokens: 96 cached (16 from device, 80 from ssd) + 4 computed"
    assert "0.50 s queued, 0.25 s of it for cached blocks, + 0.10 s prefill" in told["time"]
    told = rows(cached_by_tier={"device": 96, "ram": 0, "ssd": 0})
    assert told["prompt"] == "100 tokens: 96 cached + 4 computed"
    assert "0.50 s queued + 0.10 s prefill" in told["time"]
