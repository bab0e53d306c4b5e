"""What the tiers below the KV pool hold and have moved, and how often blocks of prompts come back, as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from obole.cache.tiers.reuse import Reuse
from obole.cache.tiers.store import StoreStats
from obole.config import BLOCK_SIZE


class TierMetrics(Collector):
    """`stats`: of now, or None where there are no tiers, and then no metrics of them."""

    def __init__(self, stats: Callable[[], StoreStats | None], reuse: Callable[[], Reuse]) -> None:
        self._stats = stats
        self._reuse = reuse

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from _reused(self._reuse())
        stats = self._stats()
        if stats is None:
            return
        blocks = GaugeMetricFamily("obole_kv_tier_blocks", "Cached blocks in a tier.", labels=["tier"])
        size = GaugeMetricFamily("obole_kv_tier_bytes", "Bytes of cached blocks in a tier.", labels=["tier"])
        written = CounterMetricFamily("obole_kv_tier_tokens_written", "Tokens written to a tier.", labels=["tier"])
        read = CounterMetricFamily("obole_kv_tier_tokens_read", "Tokens read from a tier.", labels=["tier"])
        for tier, one in stats.tiers.items():
            blocks.add_metric([tier], one.blocks)
            size.add_metric([tier], one.bytes)
            written.add_metric([tier], one.blocks_written * BLOCK_SIZE)
            read.add_metric([tier], one.blocks_read * BLOCK_SIZE)
        misses = CounterMetricFamily("obole_kv_tier_misses", "Blocks found on disk and not served.", labels=["reason"])
        for reason, count in stats.misses.items():
            misses.add_metric([reason], count)
        yield from (blocks, size, written, read, misses)
        yield CounterMetricFamily("obole_kv_tier_dropped_writes", "Blocks the disk had no time for.", stats.dropped_writes)
        yield CounterMetricFamily("obole_kv_tier_write_errors", "Writes that failed.", stats.write_errors)


def _reused(reuse: Reuse) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "obole_prefix_cache_ideal_hits",
        "Tokens that a cache that never forgets would have found.",
        reuse.ideal_hits * BLOCK_SIZE,
    )
    share = reuse.share_of_ideal
    if share is not None:
        yield GaugeMetricFamily("obole_prefix_cache_share_of_ideal", "Hits as a share of those.", share)
    total, buckets = 0.0, []
    for i, count in enumerate(reuse.gaps):
        total += count
        buckets.append((f"{2.0**i}" if i < len(reuse.gaps) - 1 else "+Inf", total))
    histogram = HistogramMetricFamily("obole_prefix_reuse_gap_seconds", "Until a block of a prompt is asked for again.")
    histogram.add_metric([], buckets, sum_value=None)
    yield histogram
