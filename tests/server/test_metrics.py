"""What is counted for every token counts as the client library does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from obole.cache.tiers.reuse import Reuse
from obole.engine.async_engine import Snapshot
from obole.engine.results import Delta
from obole.server.metrics import Intervals, Metrics
from obole.types import Source

BOUNDS = (0.125, 0.25, 0.5, 2.5)  # as all times here, exact in binary, so that sums are


def page(collector) -> set[str]:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    return {line for line in generate_latest(registry).decode().splitlines() if "_created" not in line}


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.125, 0.25, 0.375, 2.5, 3.0, 64.0]), st.integers(1, 9))))
def test_intervals_are_the_librarys_histogram(seen):
    ours = Intervals("seconds_between", "About.", BOUNDS)
    theirs = Histogram("seconds_between", "About.", registry=None, buckets=BOUNDS)
    for seconds, times in seen:
        ours.observe(seconds, times)
        for _ in range(times):
            theirs.observe(seconds)
    assert page(ours) == page(theirs)


class Idle:
    def snapshot(self) -> Snapshot:
        return Snapshot(0, 0, 0, 8)

    def tier_stats(self) -> None:
        return None

    def reuse(self) -> Reuse:
        return Reuse(0, 0, 0.0, 0.0, (0.0,), 0, 1.0)


def test_tokens_by_source():
    metrics = Metrics(Idle())
    metrics.tokens(Delta(0, "", (1, 2, 3), None, None, (Source.MODEL, Source.LOOKUP, Source.MODEL)))
    lines = metrics.page().decode().splitlines()
    assert 'obole_generation_tokens_total{source="model"} 2.0' in lines
    assert 'obole_generation_tokens_total{source="lookup"} 1.0' in lines
    assert 'obole_generation_tokens_total{source="forced"} 0.0' in lines
    assert "# TYPE obole_generation_tokens_total counter" in lines
