"""What `obole top` makes of a server's /metrics: pure functions from its text to rates, shares and percentiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PREFIX = "obole_"
QUANTILES = (0.5, 0.9, 0.99)
LATENCIES = {
    "first_token": "time_to_first_token_seconds",
    "between_tokens": "inter_token_latency_seconds",
    "request": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
}


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations not above each of `bounds`, as Prometheus has them: cumulative, the last bound infinite."""

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()

    @property
    def total(self) -> float:
        return self.counts[-1] if self.counts else 0.0

    def since(self, before: Histogram) -> Histogram:
        """What was observed since `before`."""
        if before.bounds != self.bounds:
            return self
        return Histogram(self.bounds, tuple(now - then for now, then in zip(self.counts, before.counts, strict=True)))

    def quantile(self, share: float) -> float | None:
        """The value that `share` of the observations do not exceed, linear within a bucket as Prometheus'
        `histogram_quantile`: the last finite bound for what lies above it, None where nothing was observed."""
        rank = share * self.total
        if self.total <= 0:
            return None
        lower, below = 0.0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            if count >= rank and count > below:
                return lower if math.isinf(bound) else lower + (bound - lower) * (rank - below) / (count - below)
            lower, below = bound, count
        return lower


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The counters of a server at a time (seconds on the monotonic clock). Token counts are by source."""

    at: float
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # of the KV blocks, from 0 to 1
    generated: Mapping[str, float] = field(default_factory=dict)
    drafted: Mapping[str, float] = field(default_factory=dict)
    accepted: Mapping[str, float] = field(default_factory=dict)
    prompt_tokens: float = 0.0  # looked up in the prefix cache
    cached_tokens: float = 0.0  # found there
    cached_by_tier: Mapping[str, float] = field(default_factory=dict)
    latencies: Mapping[str, Histogram] = field(default_factory=dict)


def read_samples(text: str) -> dict[str, list[tuple[Mapping[str, str], float]]]:
    """Samples by name, from Prometheus' text format. Raises ValueError for what is not that, or not of this engine."""
    from prometheus_client.parser import text_string_to_metric_families

    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    if f"{PREFIX}num_requests_running" not in samples:
        raise ValueError("no figures of an obole server")
    return samples


def read_snapshot(text: str, at: float) -> Snapshot:
    """A snapshot from Prometheus' text format. Raises ValueError as `read_samples` does."""
    samples = read_samples(text)

    def total(name: str) -> float:
        return math.fsum(value for _, value in samples.get(PREFIX + name, ()))

    def by(label: str, name: str) -> dict[str, float]:
        return {labels[label]: value for labels, value in samples.get(PREFIX + name, ())}

    return Snapshot(
        at=at,
        running=round(total("num_requests_running")),
        waiting=round(total("num_requests_waiting")),
        kv_usage=total("kv_cache_usage_perc"),
        generated=by("source", "generation_tokens_total"),
        drafted=by("source", "spec_decode_num_draft_tokens_total"),
        accepted=by("source", "spec_decode_num_accepted_tokens_total"),
        prompt_tokens=total("prefix_cache_queries_total"),
        cached_tokens=total("prefix_cache_hits_total"),
        cached_by_tier=by("tier", "prefix_cache_hits_by_tier_total"),
        latencies={name: _histogram(samples.get(f"{PREFIX}{metric}_bucket", ())) for name, metric in LATENCIES.items()},
    )


def _histogram(buckets: Iterable[tuple[Mapping[str, str], float]]) -> Histogram:
    ordered = sorted((float(labels["le"]), count) for labels, count in buckets)
    return Histogram(tuple(bound for bound, _ in ordered), tuple(count for _, count in ordered))


@dataclass(frozen=True, slots=True)
class Figures:
    """What is shown. Rates are tokens per second; shares from 0 to 1, None of nothing; latencies seconds by quantile."""

    running: int
    waiting: int
    kv_usage: float
    tokens_per_second: float
    by_source: Mapping[str, float]
    prompt_tokens: int
    cache_hit_rate: float | None
    hits_by_tier: Mapping[str, float | None]  # shares of the tokens of prompts, which sum to the hit rate
    drafted: Mapping[str, int]
    acceptance: Mapping[str, float | None]
    latencies: Mapping[str, Mapping[str, float | None]]


def figures(now: Snapshot, before: Snapshot, since: Snapshot) -> Figures:
    """Rates from `before` to `now`; shares and latencies from `since` to `now`."""
    seconds = max(now.at - before.at, 1e-9)
    rates = {source: (count - before.generated.get(source, 0.0)) / seconds for source, count in now.generated.items()}
    prompt = now.prompt_tokens - since.prompt_tokens
    drafted = {source: count - since.drafted.get(source, 0.0) for source, count in now.drafted.items()}
    accepted = {source: count - since.accepted.get(source, 0.0) for source, count in now.accepted.items()}
    return Figures(
        running=now.running,
        waiting=now.waiting,
        kv_usage=now.kv_usage,
        tokens_per_second=math.fsum(rates.values()),
        by_source=rates,
        prompt_tokens=round(prompt),
        cache_hit_rate=_share(now.cached_tokens - since.cached_tokens, prompt),
        hits_by_tier={
            tier: _share(count - since.cached_by_tier.get(tier, 0.0), prompt) for tier, count in now.cached_by_tier.items()
        },
        drafted={source: round(count) for source, count in drafted.items()},
        acceptance={source: _share(accepted.get(source, 0.0), count) for source, count in drafted.items()},
        latencies={name: _quantiles(h.since(since.latencies.get(name, Histogram()))) for name, h in now.latencies.items()},
    )


def restarted(now: Snapshot, before: Snapshot) -> bool:
    """Whether the counters began anew between two snapshots."""
    return math.fsum(now.generated.values()) < math.fsum(before.generated.values()) or now.prompt_tokens < before.prompt_tokens


def _quantiles(histogram: Histogram) -> dict[str, float | None]:
    return {f"p{round(100 * share)}": histogram.quantile(share) for share in QUANTILES}


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def figures_json(shown: Figures, url: str, health: str) -> dict[str, Any]:
    """For `--json`."""
    return {"url": url, "health": health, **dataclasses.asdict(shown)}


BARS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float]) -> str:
    """One character for each value, as high as its share of the largest."""
    most = max(values, default=0.0)
    return "".join(BARS[math.ceil(value / most * (len(BARS) - 1))] if most > 0 else BARS[0] for value in values)
