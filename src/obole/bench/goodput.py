"""Requests that come by themselves, and how many a second meet objectives of latency: all, by class, at the highest rate.

Goodput as in DistServe (Zhong et al. 2024, arXiv 2401.09670): requests a second of which each meets all objectives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from obole.bench.answers import Answer, read_answer
from obole.bench.arrivals import of_trace, poisson
from obole.bench.classes import NOTHING_TO_COPY, RANDOM, Asked, check, stream_of
from obole.bench.client import Client
from obole.bench.drive import check_repeat
from obole.bench.load import CHAT, Lengths, Load, Run, find_lengths, random_messages
from obole.bench.openloop import OpenRun, run_open, run_punctually
from obole.bench.samples import Report, Samples, silent
from obole.bench.serve import ServeRow, summary
from obole.errors import ConfigError, InvalidRequest

WARMING_REQUESTS = 4
WARMING_TOKENS = 8
WARMING_SECONDS = 5.0  # before the highest rate is looked for
NARROW = 1.1  # the highest rate is known when one this much higher missed the objectives
PROBES = 12  # at most
LEAST_REQUESTS = 10  # of a probe, on average: fewer say too little
WARMING_SEED, PROBE_SEED = 1 << 33, 1 << 34


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Milliseconds that a request may take, None for any: until the first token, between tokens (the mean of the request), and
    until the end. `share`: of the requests that must meet all of them. Raises `InvalidRequest`."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None
    share: float = 0.95

    def __post_init__(self) -> None:
        for name in ("ttft", "itl", "e2e"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InvalidRequest(name, f"{name} must be a number of milliseconds above 0, not {value}.")
        if not 0 < self.share <= 1:
            raise InvalidRequest("share", f"share must be above 0 and at most 1, not {self.share}.")

    @property
    def any(self) -> bool:
        return not self.ttft is self.itl is self.e2e is None

    def met(self, answer: Answer) -> bool:
        """Whether an answer came, and came in time. Answers of one token have nothing between tokens."""
        if answer.problem:
            return False
        between = (answer.arrivals[-1] - answer.arrivals[0]) / max(1, answer.output_tokens - 1)
        took = ((self.ttft, answer.first_token_seconds), (self.itl, between), (self.e2e, answer.ended - answer.sent))
        return all(most is None or 1e3 * seconds <= most for most, seconds in took)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How requests come: by Poisson at `rate` a second, or at the `times` of a trace multiplied by `scale`; for `seconds`."""

    rate: float = 1.0
    seconds: float = 30.0
    times: tuple[float, ...] | None = None
    scale: float = 1.0

    def offsets(self, *seed: int) -> list[float]:
        if self.times is not None:
            return of_trace(self.times, self.scale, self.seconds)
        return poisson(self.rate, self.seconds, *seed)


@dataclass(frozen=True, slots=True)
class Round:
    """What was asked, and what came of it, both in the order of the requests."""

    asked: tuple[Asked, ...]
    run: OpenRun


@dataclass(frozen=True, slots=True)
class ClassRow:
    """The requests of one class, or of several. `goodput`: of them that met all objectives, a second; `met`: their share."""

    kind: str
    met: Samples
    goodput: Samples
    row: ServeRow


@dataclass(frozen=True, slots=True)
class Found:
    """`floor`: of the classes with nothing to copy, None without any. `late_p99_milliseconds`: by which this client sent later
    than meant. `offered`: requests that came a second. `at_once`: requests in flight, the mean. `probes`: rate and share that
    met the objectives, of the search for the highest rate, which is `highest`: None if there was none, NaN if even the lowest
    rate missed them."""

    every: ClassRow
    classes: tuple[ClassRow, ...]
    floor: ClassRow | None
    offered: Samples
    at_once: Samples
    late_p99_milliseconds: Samples
    probes: tuple[tuple[float, float], ...] = ()
    highest: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """`kinds`: workloads by class, or none for random words of `load.prompt_tokens` or the prompts of `load`."""

    load: Load
    kinds: tuple[str, ...] = ()
    arrivals: Arrivals = field(default_factory=Arrivals)
    objectives: Objectives = field(default_factory=Objectives)

    def __post_init__(self) -> None:
        if self.kinds:
            check(self.kinds)

    def asked(self, lengths: Lengths | None, *seed: int) -> Iterator[Asked]:
        """Requests without an end; another seed, other requests."""
        if self.kinds:
            return stream_of(self.kinds, self.load.output_tokens, *seed)
        if self.load.prompts is not None:
            return (Asked("prompts", messages, self.load.output_tokens) for messages in itertools.cycle(self.load.prompts))
        assert lengths is not None
        words = lengths.words(self.load.prompt_tokens, "prompt_tokens")
        return (Asked(RANDOM, random_messages(words, *seed, i), self.load.output_tokens) for i in itertools.count())


def measure(client: Client, traffic: Traffic, repeat: int, report: Report = silent, search: bool = False) -> Found:
    """Let the traffic come `repeat` times; with `search`, at the highest rate that meets the objectives, which is found before.

    Raises `ConfigError` when the server cannot be measured, `InvalidRequest` for a search without objectives.
    """
    check_repeat(repeat)
    if search and (not traffic.objectives.any or traffic.arrivals.times is not None):
        raise InvalidRequest(
            "find_rate", "The highest rate is looked for with Poisson arrivals and objectives: give ttft, itl or e2e."
        )
    report("warming up", 0, 0)
    lengths = run_punctually(_prepare(client, traffic))
    probes: list[tuple[float, float]] = []
    highest: float | None = None
    arrivals = traffic.arrivals
    if search:

        def share_at(rate: float) -> float:
            report(f"{rate:.3g} requests/s", 0, 0)
            number = PROBE_SEED + len(probes)
            probe = Arrivals(rate=rate, seconds=arrivals.seconds)
            missed = Missed(traffic.objectives, len(probe.offsets(traffic.load.seed, number)))
            one = _round(client, traffic, lengths, probe, number, lambda: None, missed)
            share = _share(traffic.objectives, one.run.answers)
            probes.append((rate, share))
            return share

        # what a server does for the first time, such as recording its steps, is no matter of the rate
        warming = Arrivals(rate=arrivals.rate, seconds=min(arrivals.seconds, WARMING_SECONDS))
        _round(client, traffic, lengths, warming, WARMING_SEED, lambda: None)
        highest = highest_rate(share_at, traffic.objectives.share, arrivals.rate, LEAST_REQUESTS / arrivals.seconds)
        arrivals = Arrivals(rate=min(probes)[0] if np.isnan(highest) else highest, seconds=arrivals.seconds)
    rounds = [_counted(client, traffic, lengths, arrivals, number, repeat, report) for number in range(repeat)]
    return found_in(traffic, rounds, tuple(probes), highest)


class Missed:
    """Whether so many of `count` requests have missed the objectives that the wanted share is out of reach."""

    def __init__(self, objectives: Objectives, count: int) -> None:
        self._objectives = objectives
        self._left = math.floor(count * (1 - objectives.share) + 1e-9)

    def __call__(self, answer: Answer) -> bool:
        self._left -= not self._objectives.met(answer)
        return self._left < 0


def highest_rate(share_at: Callable[[float], float], wanted: float, start: float, least: float = 0.0) -> float:
    """The highest rate at which a share of at least `wanted` meets the objectives, by doubling and bisection; NaN if none of
    those tried does. `share_at` measures one rate; after the first one, none below `least` is tried."""
    low, high = 0.0, float("inf")
    rate = start
    for _ in range(PROBES):
        if share_at(rate) >= wanted:
            low = rate
        else:
            high = rate
        rate = low * 2 if high == float("inf") else high / 2 if low == 0 else (low * high) ** 0.5
        if high <= low * NARROW or rate < least:
            break
    return low or float("nan")


def found_in(
    traffic: Traffic, rounds: Sequence[Round], probes: tuple[tuple[float, float], ...] = (), highest: float | None = None
) -> Found:
    """Everything that the rounds say."""
    kinds = list(dict.fromkeys(asked.kind for one in rounds for asked in one.asked))
    ordered = [kind for kind in traffic.kinds if kind in kinds] or kinds
    lowest = tuple(kind for kind in ordered if kind in NOTHING_TO_COPY)
    at_once = [sum(a.ended - a.sent for a in one.run.answers) / (one.run.ended - one.run.started) for one in rounds]
    return Found(
        every=_row(traffic, rounds, "all", tuple(kinds), at_once),
        classes=tuple(_row(traffic, rounds, kind, (kind,), at_once) for kind in ordered),
        floor=_row(traffic, rounds, "nothing to copy", lowest, at_once) if lowest else None,
        offered=Samples.of(len(one.asked) / _window(traffic, one) for one in rounds),
        at_once=Samples.of(at_once),
        late_p99_milliseconds=Samples.of(1e3 * float(np.percentile(one.run.late, 99)) for one in rounds),
        probes=probes,
        highest=highest,
    )


def _window(traffic: Traffic, one: Round) -> float:
    """Seconds in which requests came: those asked for, or those of a trace that is shorter."""
    if traffic.arrivals.times is None:
        return traffic.arrivals.seconds
    count = len(one.asked)
    last = max(answer.sent for answer in one.run.answers) - one.run.started
    return min(traffic.arrivals.seconds, last * count / (count - 1) if count > 1 and last > 0 else traffic.arrivals.seconds)


def _row(traffic: Traffic, rounds: Sequence[Round], name: str, kinds: tuple[str, ...], at_once: Sequence[float]) -> ClassRow:
    runs, good, lengths = [], [], []
    for one in rounds:
        answers = tuple(a for asked, a in zip(one.asked, one.run.answers, strict=True) if asked.kind in kinds)
        if not answers:  # none of this class happened to come
            continue
        lengths.append(max(one.run.ended - one.run.started, _window(traffic, one)))
        good.append([traffic.objectives.met(answer) for answer in answers])
        runs.append(Run(answers, (), one.run.started, one.run.ended, one.run.client_seconds))
    load = Load(
        concurrency=max(1, round(float(np.median(at_once)))),
        requests=max(1, round(float(np.median([len(run.answers) for run in runs])))),
        output_tokens=traffic.load.output_tokens,
    )
    return ClassRow(
        name,
        Samples.of(sum(met) / len(met) for met in good),
        Samples.of(sum(met) / seconds for met, seconds in zip(good, lengths, strict=True)),
        summary(load, runs),
    )


def _share(objectives: Objectives, answers: Sequence[Answer]) -> float:
    return sum(map(objectives.met, answers)) / len(answers)


async def _prepare(client: Client, traffic: Traffic) -> Lengths | None:
    """Some requests that are not counted, and how many tokens random words have. Raises `ConfigError` if one fails."""
    load = traffic.load
    lengths = await find_lengths(client, load) if not traffic.kinds and load.prompts is None else None
    line = client.line()
    try:
        count = max(WARMING_REQUESTS, len(traffic.kinds))
        for asked in itertools.islice(traffic.asked(lengths, load.seed + WARMING_SEED), count):
            request = client.request("POST", CHAT, load.body(asked.messages, min(WARMING_TOKENS, asked.max_tokens)))
            answer = read_answer(await line.ask(request))
            if answer.problem:
                raise ConfigError(f"{client.address.url} cannot be measured: {answer.problem.rstrip('.')}.")
    finally:
        line.close()
    return lengths


def _counted(
    client: Client, traffic: Traffic, lengths: Lengths | None, arrivals: Arrivals, number: int, repeat: int, report: Report
) -> Round:
    done = 0

    def ended() -> None:
        nonlocal done
        done += 1
        report(f"round {number + 1} of {repeat}", done, total)

    total = len(arrivals.offsets(traffic.load.seed, number))
    return _round(client, traffic, lengths, arrivals, number, ended)


def _round(
    client: Client,
    traffic: Traffic,
    lengths: Lengths | None,
    arrivals: Arrivals,
    number: int,
    ended: Callable[[], None],
    hopeless: Callable[[Answer], bool] | None = None,
) -> Round:
    seed = traffic.load.seed
    offsets = arrivals.offsets(seed, number)
    asked = tuple(itertools.islice(traffic.asked(lengths, seed, number), len(offsets)))
    requests = [client.request("POST", CHAT, traffic.load.body(one.messages, one.max_tokens)) for one in asked]
    return Round(asked, run_punctually(run_open(client, requests, offsets, ended, hopeless)))


def goodput_json(found: Found, traffic: Traffic) -> dict[str, Any]:
    """What a document says beside the row of all requests."""
    from obole.bench.report import to_json

    def one(row: ClassRow) -> dict[str, Any]:
        inner = to_json(row.row)
        both = {"met": list(row.met.values), "goodput": list(row.goodput.values)}
        inner["repetitions"] = {**both, **inner["repetitions"]}
        return {"kind": row.kind, "met": row.met.median, "goodput": row.goodput.median, **inner}

    objectives: Mapping[str, float | None] = {
        name: getattr(traffic.objectives, name) for name in ("ttft", "itl", "e2e", "share")
    }
    return {
        "rows": [one(found.every)],
        "objectives": dict(objectives),
        "classes": [one(row) for row in found.classes],
        "floor": None if found.floor is None else one(found.floor),
        "arrivals": {
            "kind": "trace" if traffic.arrivals.times is not None else "poisson",
            "rate": traffic.arrivals.rate if traffic.arrivals.times is None else None,
            "time_scale": traffic.arrivals.scale,
            "seconds": traffic.arrivals.seconds,
            "offered": found.offered.median,
        },
        "in_flight": found.at_once.median,
        "late_p99_milliseconds": found.late_p99_milliseconds.median,
        "probes": [{"rate": rate, "met": share} for rate, share in found.probes],
        "highest_rate": found.highest,
    }
