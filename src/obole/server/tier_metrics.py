"""What the tiers below the KV pool hold and have moved, as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from obole.cache.tiers.store import StoreStats
from obole.config import BLOCK_SIZE


class TierMetrics(Collector):
    """`stats`: of now, or None where there are no tiers, and then no metrics."""

    def __init__(self, stats: Callable[[], StoreStats | None]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
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
