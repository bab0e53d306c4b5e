"""Prometheus metrics: the names that vLLM's dashboards know, with this project's prefix."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from obole.cache.tiers.reuse import Reuse
from obole.cache.tiers.store import StoreStats
from obole.costmodel import StepCost
from obole.engine.results import Choice, Delta, EngineInfo, Result
from obole.prices import PriceList, price, tokens_by_kind
from obole.server.tier_metrics import TierMetrics
from obole.types import Receipt, Source

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)


class Load(Protocol):
    """How busy the engine is."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def blocks_used(self) -> int: ...
    @property
    def blocks_total(self) -> int: ...


class Facts(Protocol):
    """What is known of the model and of what steps cost."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def step_cost(self) -> StepCost: ...


class Busy(Protocol):
    """Who can say how busy the engine is, from any thread."""

    def snapshot(self) -> Load: ...

    def tier_stats(self) -> StoreStats | None:
        """Of the tiers below the KV pool, if there are any."""

    def reuse(self) -> Reuse:
        """How often blocks of prompts come back."""


class Metrics:
    """The counters of one server. Tenants are labelled by their number, and there are as many as keys."""

    def __init__(self, engine: Busy, prices: PriceList | None = None, facts: Facts | None = None) -> None:
        self._prices = prices
        self._registry = registry = CollectorRegistry(auto_describe=True)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"obole_{name}", about, labels, registry=registry)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"obole_{name}", about, registry=registry, buckets=buckets)

        self.http_requests = counter("http_requests_total", "HTTP requests by their end.", "path", "status")
        self.requests = counter("requests_total", "Generating requests of each tenant.", "tenant")
        self.tenant_tokens = counter("tenant_tokens_total", "Tokens of prompts and answers.", "tenant", "kind")
        self.tenant_usage = counter(
            "tenant_usage_tokens_total", "Tokens of each tenant as price lists name them.", "tenant", "kind"
        )
        self.tenant_cost = counter("tenant_cost_total", "What they cost by the price list.", "tenant", "currency")
        self.prompt_tokens = counter("prompt_tokens_total", "Tokens of prompts.")
        self._generated = dict.fromkeys(Source, 0)
        self.queries = counter("prefix_cache_queries_total", "Tokens of prompts looked up in the prefix cache.")
        self.hits = counter("prefix_cache_hits_total", "Tokens of prompts found there.")
        self.drafts = counter("spec_decode_num_drafts_total", "Forward passes with a draft, that is not forced by a grammar.")
        self.drafted = counter("spec_decode_num_draft_tokens_total", "Tokens drafted.", "source")
        self.accepted = counter("spec_decode_num_accepted_tokens_total", "Tokens drafted that the model chose.", "source")
        self.finished = counter("request_success_total", "Answers by how they ended.", "finished_reason")
        self.first = histogram("time_to_first_token_seconds", "From the arrival of a request to its first token.", _LONG)
        self.between = Intervals("obole_inter_token_latency_seconds", "Between two tokens of an answer.", _SHORT)
        self.whole = histogram("e2e_request_latency_seconds", "From the arrival of a request to its end.", _LONG)
        self.queued = histogram("request_queue_time_seconds", "Spent waiting.", _LONG)
        self.prefill = histogram("request_prefill_time_seconds", "Spent on the prompt.", _LONG)
        self.decode = histogram("request_decode_time_seconds", "Spent on the answer.", _LONG)
        self.loading = counter("kv_load_seconds_total", "Seconds that requests waited for cached blocks to come up.")
        self.hits_by_tier = counter("prefix_cache_hits_by_tier_total", "Tokens of prompts found there, by where.", "tier")
        registry.register(self.between)
        registry.register(_Generated(self._generated))
        registry.register(_Gauges(engine, facts))
        registry.register(TierMetrics(engine.tier_stats, engine.reuse))

    def tokens(self, delta: Delta) -> None:
        """Count the tokens of a delta, when it is taken."""
        for source in delta.sources:
            self._generated[source] += 1

    def result(self, tenant: int, result: Result) -> None:
        """Count a request of the engine that has ended, complete or not."""
        seen = result.receipt.cached_tokens + result.receipt.computed_tokens
        self.prompt_tokens.inc(seen)
        self.queries.inc(seen)
        self.hits.inc(max(0, result.receipt.cached_tokens))
        for tier, count in result.receipt.cached_by_tier.items():
            self.hits_by_tier.labels(tier).inc(count)
        self.loading.inc(result.receipt.load_seconds)
        self.tenant_tokens.labels(tenant, "prompt").inc(seen)
        for choice in result.choices:
            self.finished.labels(str(choice.finish_reason)).inc()
            self.tenant_tokens.labels(tenant, "generation").inc(choice.receipt.output_tokens)
            self._receipt(choice.receipt)
            self._bill(tenant, choice)

    def _receipt(self, receipt: Receipt) -> None:
        self.queued.observe(receipt.queued_seconds)
        self.prefill.observe(receipt.prefill_seconds)
        self.decode.observe(receipt.decode_seconds)
        for source, count in receipt.drafted.items():
            self.drafted.labels(source).inc(count)
            self.accepted.labels(source).inc(count - receipt.rejected.get(source, 0))
        if receipt.drafted:
            self.drafts.inc(max(0, receipt.forward_passes - receipt.draftless_passes))

    def _bill(self, tenant: int, choice: Choice) -> None:
        first = choice.index == 0  # the prompt counts once
        for kind, count in tokens_by_kind(choice.receipt, prompt=first).items():
            self.tenant_usage.labels(tenant, kind).inc(count)
        if self._prices is not None:
            total = price(choice.receipt, self._prices, prompt=first).total
            self.tenant_cost.labels(tenant, self._prices.currency).inc(float(total))

    def page(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)


class Intervals(Collector):
    """A histogram for one thread. What comes with every token must cost less than the client library's, which takes locks."""

    def __init__(self, name: str, about: str, buckets: tuple[float, ...]) -> None:
        self._name = name
        self._about = about
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)  # within each bound and above the one before it; the last: above all
        self._sum = 0.0

    def observe(self, seconds: float, times: int) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._about)]

    def collect(self) -> Iterator[Metric]:
        bounds = [str(bound) for bound in self._bounds] + ["+Inf"]
        yield HistogramMetricFamily(
            self._name, self._about, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum
        )


class _Generated(Collector):
    """Tokens of answers by source, as they stand in `counts`."""

    def __init__(self, counts: Mapping[Source, int]) -> None:
        self._counts = counts

    def describe(self) -> Iterable[Metric]:
        return [self._family()]

    def collect(self) -> Iterator[Metric]:
        family = self._family()
        for source, count in self._counts.items():
            family.add_metric([source], count)
        yield family

    def _family(self) -> CounterMetricFamily:
        return CounterMetricFamily("obole_generation_tokens", "Tokens of answers, by who proposed them.", labels=["source"])


class _Gauges(Collector):
    def __init__(self, engine: Busy, facts: Facts | None) -> None:
        self._engine = engine
        self._facts = facts

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        load = self._engine.snapshot()
        used = load.blocks_used / load.blocks_total if load.blocks_total else 0.0
        yield GaugeMetricFamily("obole_num_requests_running", "Answers that are being computed.", load.running)
        yield GaugeMetricFamily("obole_num_requests_waiting", "Answers that wait to be computed.", load.waiting)
        yield GaugeMetricFamily("obole_kv_cache_usage_perc", "Share of the KV blocks in use, from 0 to 1.", used)
        if self._facts is not None:
            yield from _costs(self._facts.info, self._facts.step_cost)


def _costs(info: EngineInfo, cost: StepCost) -> Iterator[Metric]:
    """What a price is made of."""
    steps = GaugeMetricFamily("obole_step_seconds", "Of a step of so many rows, context aside.", labels=["rows"])
    for rows, seconds in zip(cost.rows, cost.seconds, strict=True):
        steps.add_metric([str(rows)], seconds)
    yield steps
    yield GaugeMetricFamily("obole_step_context_seconds", "Added by a cached token for each row.", cost.context_seconds)
    yield GaugeMetricFamily("obole_step_read_seconds", "Added by a cached token for each sequence.", cost.read_seconds)
    yield GaugeMetricFamily("obole_weight_bytes", "Bytes of the weights.", info.weight_bytes)
    yield GaugeMetricFamily("obole_parameters", "Parameters of the model.", info.parameters)
