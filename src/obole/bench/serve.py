"""A server under load: how many requests and tokens a second, how long until the first token, how long between tokens.

Also the same requests without a server, by an engine with as many sequences at once, to tell what HTTP, tokenisation and
streaming cost.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np

from obole.bench import inside
from obole.bench.answers import Answer
from obole.bench.client import Client
from obole.bench.drive import check_repeat
from obole.bench.load import Lengths, Load, Messages, Run, conversations, find_lengths, run, warm_up
from obole.bench.samples import Report, Samples, silent
from obole.engine.engine import Engine
from obole.prices import added, tokens_by_kind
from obole.types import SamplingParams

GATHER = 1 << 16  # bytes: some two hundred tokens


@dataclass(frozen=True, slots=True)
class ServeRow:
    """`prompt_tokens`, `cached_tokens` (of them) and `output_tokens` are means of the requests, as the server counts.

    `output_tokens_per_second`: of all requests together, from the first to the end of the last. First token: from when the
    request was sent to the first event that brings something. Between tokens: from one such event to the next of the same
    answer; `tokens_per_event` come together. Whole answer: from when the request was sent to the end. `client_cores`:
    processors that this process took. `errors`: requests that failed, by reason; no other number counts them. `totals`: of all
    rounds, by receipts: see `totals_of`. `drafted_accepted`: share of drafted tokens that were right, NaN where the server
    tells of none. `answers_digest`: of the texts of all answers, in whatever order they came.
    """

    concurrency: int
    requests: int
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    errors: Mapping[str, int]
    seconds: Samples
    requests_per_second: Samples
    output_tokens_per_second: Samples
    first_token_p50_milliseconds: Samples
    first_token_p90_milliseconds: Samples
    first_token_p99_milliseconds: Samples
    between_tokens_p50_milliseconds: Samples
    between_tokens_p90_milliseconds: Samples
    between_tokens_p99_milliseconds: Samples
    whole_answer_p50_milliseconds: Samples
    whole_answer_p90_milliseconds: Samples
    whole_answer_p99_milliseconds: Samples
    tokens_per_event: Samples
    client_cores: Samples
    totals: Mapping[str, Any]
    drafted_accepted: float
    answers_digest: str


@dataclass(frozen=True, slots=True)
class LongRow:
    """What long prompts do to others. `requests` in all rounds; `first_token_milliseconds` of them, the mean.

    Of the other answers: time between tokens, its p99 over its median, and the time between tokens of those intervals that
    fell together with the wait for a long prompt (`meanwhile_`). NaN where there were none.
    """

    every_seconds: float
    requests: int
    prompt_tokens: float
    errors: Mapping[str, int]
    first_token_milliseconds: Samples
    between_tokens_p99_to_p50: Samples
    meanwhile_p50_milliseconds: Samples
    meanwhile_p99_milliseconds: Samples


@dataclass(frozen=True, slots=True)
class OfflineRow:
    """Other requests of the same kind, by a server and by an engine alone, from token ids.

    `cost_percent`: by how much the server is slower. Its `served_tokens_per_second` are read by a client that is woken for
    `GATHER` bytes or the end of an answer: one that is woken for every token takes the server's processors for itself.
    `client_cores`: what it takes nevertheless. `errors`: as those of the other requests.
    """

    output_tokens_per_second: Samples
    served_tokens_per_second: Samples
    client_cores: Samples
    cost_percent: Samples
    errors: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Served:
    """`long` and `offline` are None where that was not measured."""

    row: ServeRow
    long: LongRow | None = None
    offline: OfflineRow | None = None


def serve(client: Client, load: Load, repeat: int = 3, offline: Engine | None = None, report: Report = silent) -> Served:
    """Put a load on a server `repeat` times. `offline`: an engine with the same model that does the same in between.

    Raises `ConfigError` when the server cannot be measured, and `InvalidRequest` for prompts that are too short or do not fit.
    """
    check_repeat(repeat)
    report("warming up", 0, 0)
    lengths = asyncio.run(_prepare(client, load))
    runs: list[Run] = []
    gathered: list[Run] = []
    rates: list[float] = []
    if offline is not None:
        generate(offline, load, conversations(load, lengths, 2 * repeat)[: load.concurrency])  # records the steps
    for round_ in range(repeat):
        runs.append(asyncio.run(run(client, load, lengths, round_, _counting(report, round_, repeat, load))))
        if offline is not None:
            other = repeat + round_
            report(f"round {round_ + 1} of {repeat}, for the cost", 0, 0)
            gathered.append(asyncio.run(run(client.gathering(GATHER), load, lengths, other, lambda: None)))
            report(f"round {round_ + 1} of {repeat}, without a server", 0, 0)
            rates.append(generate(offline, load, conversations(load, lengths, other)))
    return Served(
        summary(load, runs),
        disturbance(load, runs) if load.long_prompt_every else None,
        against(summary(load, gathered), rates) if offline is not None else None,
    )


async def _prepare(client: Client, load: Load) -> Lengths | None:
    lengths = await find_lengths(client, load) if load.prompts is None or load.long_prompt_every else None
    await warm_up(client, load, lengths)
    return lengths


def _counting(report: Report, round_: int, repeat: int, load: Load) -> Callable[[], None]:
    done = 0

    def ended() -> None:
        nonlocal done
        done += 1
        report(f"round {round_ + 1} of {repeat}", done, load.requests)

    return ended


def generate(engine: Engine, load: Load, asked: Sequence[Messages]) -> float:
    """Tokens per second of these conversations. The engine must have been opened for `concurrency` sequences at once.

    The first one has a step to itself, as at a server, which does not wait for others: they find somebody decoding, for whose
    sake their prompts are read in small parts. What that costs is not the server's.
    """
    prompts = [inside.token_ids(engine, messages) for messages in asked]
    params = SamplingParams(max_tokens=load.output_tokens, ignore_eos=load.ignore_eos)
    tenant = inside.new_tenant()
    start = time.perf_counter()
    streams = [engine.stream(prompts[0], params, tenant=tenant)]
    inside.step(engine)
    streams += [engine.stream(prompt, params, tenant=tenant) for prompt in prompts[1:]]
    for stream in streams:
        for _ in stream:
            pass
    seconds = time.perf_counter() - start
    return sum(stream.result.receipt.output_tokens for stream in streams if stream.result is not None) / seconds


def summary(load: Load, runs: Sequence[Run]) -> ServeRow:
    """A row from the rounds."""
    good = [[a for a in one.answers if not a.problem] for one in runs]
    all_good = [a for answers in good for a in answers]
    seconds = [one.ended - one.started for one in runs]
    tokens = [sum(a.output_tokens for a in answers) for answers in good]
    first = [[a.first_token_seconds for a in answers] for answers in good]
    between = [[gap for a in answers for gap in a.intervals] for answers in good]
    whole = [[a.ended - a.sent for a in answers] for answers in good]
    drafted = [(a.accepted_tokens, a.rejected_tokens) for a in all_good]
    accepted, rejected = sum(a for a, _ in drafted), sum(r for _, r in drafted)
    return ServeRow(
        concurrency=load.concurrency,
        requests=load.requests,
        prompt_tokens=_mean(a.prompt_tokens for a in all_good),
        cached_tokens=_mean(a.cached_tokens for a in all_good),
        output_tokens=_mean(a.output_tokens for a in all_good),
        errors=_problems(a for one in runs for a in one.answers),
        seconds=Samples.of(seconds),
        requests_per_second=Samples.of(len(answers) / s for answers, s in zip(good, seconds, strict=True)),
        output_tokens_per_second=Samples.of(n / s for n, s in zip(tokens, seconds, strict=True)),
        first_token_p50_milliseconds=_percentiles(first, 50),
        first_token_p90_milliseconds=_percentiles(first, 90),
        first_token_p99_milliseconds=_percentiles(first, 99),
        between_tokens_p50_milliseconds=_percentiles(between, 50),
        between_tokens_p90_milliseconds=_percentiles(between, 90),
        between_tokens_p99_milliseconds=_percentiles(between, 99),
        whole_answer_p50_milliseconds=_percentiles(whole, 50),
        whole_answer_p90_milliseconds=_percentiles(whole, 90),
        whole_answer_p99_milliseconds=_percentiles(whole, 99),
        tokens_per_event=Samples.of(_mean(a.output_tokens / len(a.arrivals) for a in answers) for answers in good),
        client_cores=Samples.of(one.client_seconds / s for one, s in zip(runs, seconds, strict=True)),
        totals=totals_of(all_good),
        drafted_accepted=accepted / (accepted + rejected) if accepted + rejected else float("nan"),
        answers_digest=blake2b(b"".join(sorted(a.digest for a in all_good)), digest_size=16).hexdigest(),
    )


def totals_of(answers: Iterable[Answer]) -> dict[str, Any]:
    """What the receipts of all answers say together, for prices; empty where a server gives none.

    `tokens`: by kind of price. `passes`: that chose tokens one sequence decoded, the first ones of answers aside; `rejected`:
    tokens drafted in vain; `decode_seconds`: of all answers, so that divided by the time it is how many decoded at once;
    `load_seconds`: that they waited for cached blocks to come up.
    """
    found = [(i, receipt) for answer in answers for i, receipt in enumerate(answer.receipts)]
    if not found:
        return {}
    kinds = added(tokens_by_kind(_Receipt(receipt), prompt=i == 0) for i, receipt in found)  # type: ignore[arg-type]
    return {
        "tokens": kinds,
        "passes": sum(max(0, receipt["sources"].get("model", 0) - 1) for _, receipt in found),
        "rejected": sum(sum(receipt["rejected"].values()) for _, receipt in found),
        "decode_seconds": sum(receipt["decode_seconds"] for _, receipt in found),
        "load_seconds": sum(receipt.get("load_seconds", 0.0) for i, receipt in found if i == 0),
    }


class _Receipt:
    """A receipt as it comes over the wire."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.__dict__.update(document)


def disturbance(load: Load, runs: Sequence[Run]) -> LongRow:
    """What long prompts did to the other answers of these rounds."""
    good = [[a for a in one.answers if not a.problem] for one in runs]
    long = [[a for a in one.long if not a.problem] for one in runs]
    between = [[gap for a in answers for gap in a.intervals] for answers in good]
    meanwhile = [_during(answers, disturbing) for answers, disturbing in zip(good, long, strict=True)]
    p50, p99 = _percentiles(between, 50), _percentiles(between, 99)
    return LongRow(
        every_seconds=load.long_prompt_every,
        requests=sum(map(len, long)),
        prompt_tokens=_mean(a.prompt_tokens for answers in long for a in answers),
        errors=_problems(a for one in runs for a in one.long),
        first_token_milliseconds=Samples.of(1e3 * _mean(a.first_token_seconds for a in answers) for answers in long),
        between_tokens_p99_to_p50=Samples.of(b / a if a else float("nan") for a, b in zip(p50.values, p99.values, strict=True)),
        meanwhile_p50_milliseconds=_percentiles(meanwhile, 50),
        meanwhile_p99_milliseconds=_percentiles(meanwhile, 99),
    )


def against(row: ServeRow, rates: Sequence[float]) -> OfflineRow:
    """What the server costs, round by round. `rates`: tokens per second without it."""
    served = row.output_tokens_per_second
    cost = Samples.of(100 * (1 - s / r) for s, r in zip(served.values, rates, strict=True))
    return OfflineRow(Samples.of(rates), served, row.client_cores, cost, row.errors)


def _during(answers: Iterable[Answer], long: Sequence[Answer]) -> list[float]:
    """Intervals between events that a wait for a long prompt falls into, in whole or in part."""
    waits = [(a.sent, a.arrivals[0]) for a in long]
    return [
        later - earlier
        for answer in answers
        for earlier, later in pairwise(answer.arrivals)
        if any(later >= since and earlier <= until for since, until in waits)
    ]


def _problems(answers: Iterable[Answer]) -> dict[str, int]:
    return dict(Counter(a.problem for a in answers if a.problem).most_common())


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else float("nan")


def _percentiles(rounds: Sequence[Sequence[float]], share: float) -> Samples:
    """Milliseconds, of each round; NaN for rounds without any."""
    return Samples.of(1e3 * float(np.percentile(values, share)) if values else float("nan") for values in rounds)
