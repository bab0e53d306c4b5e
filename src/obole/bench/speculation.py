"""What speculation gains: the same requests without drafts and with them, in turn, and whether the answers are the same.

Every request has a tenant of its own, so that no cache or memory passes from one to the next; `asked_again` is about just that.
Only decoding is timed: from when all requests of a group have their first token to the end of the last one.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from obole.bench import inside
from obole.bench.drive import check_repeat
from obole.bench.samples import Report, Samples, silent
from obole.bench.workloads import Task
from obole.engine.engine import Engine, Stream
from obole.engine.results import Result
from obole.errors import InvalidRequest
from obole.types import SamplingParams

WARMING = 32  # tokens of the first answers, which record steps and are not counted
OFF = "off"
ALL = "all"
FIRST, AGAIN = "first time", "again"
PLAIN, DRAFTING = SamplingParams(speculate=OFF), SamplingParams()  # greedily, without drafts or as the engine is set


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answers:
    """To requests that were answered at once. `tokens` came in `seconds`, in `passes` (a step counts once for each sequence).

    `milliseconds`: of each of these tokens, those of one pass sharing its time.
    """

    results: tuple[Result, ...]
    seconds: float
    tokens: int
    passes: int
    milliseconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """The same requests without drafts and with them."""

    kind: str
    off: Answers
    on: Answers

    @property
    def identical(self) -> bool:
        return [r.token_ids for r in self.off.results] == [r.token_ids for r in self.on.results]


@dataclass(frozen=True, slots=True)
class SpeculationRow:
    """`off_`, `on_`: without drafts and with them. Milliseconds are percentiles of what a token of one sequence took.

    `tokens_per_pass`, with drafts: tokens that a pass yielded for a sequence; `sources`: shares of all tokens by who proposed
    them. `prompt_tokens` and `output_tokens` are means.
    """

    kind: str
    requests: int
    sequences: int
    prompt_tokens: float
    output_tokens: float
    off_tokens_per_second: Samples
    on_tokens_per_second: Samples
    speed_up: Samples
    off_p50_milliseconds: Samples
    on_p50_milliseconds: Samples
    off_p99_milliseconds: Samples
    on_p99_milliseconds: Samples
    tokens_per_pass: Samples
    sources: Mapping[str, float]
    identical: bool


def counter(engine: Engine) -> Callable[[str], int]:
    """Counts the tokens of texts. Raises `InvalidRequest` for a model that reads none."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise InvalidRequest("model", "This model has no tokenizer, and this benchmark asks in words: choose another model.")
    return lambda text: len(tokenizer.encode(text, special=False))


def questions(engine: Engine, tasks: Sequence[Task], output_tokens: int | None = None) -> tuple[list[Question], int]:
    """Tasks as this model reads them, and how many were left out because the context or the KV pool cannot hold them.

    They are sent as chat messages, or as they are without a chat template. `output_tokens`: in place of their own limits.
    Raises `InvalidRequest` if none is left.
    """
    fitting = []
    for task in tasks:
        prompt = [{"role": "user", "content": task.prompt}] if engine.has_chat_template else task.prompt
        asked = Question(task.kind, inside.token_ids(engine, prompt), output_tokens or task.max_tokens)
        if len(asked.token_ids) + asked.max_tokens <= engine.max_context:
            fitting.append(asked)
    if not fitting:
        raise InvalidRequest(
            "max_context", f"None of {len(tasks)} requests fits into a context of {engine.max_context}: make it longer."
        )
    return fitting, len(tasks) - len(fitting)


def speculation(
    engine: Engine, asked: Sequence[Question], sequences: int = 1, repeat: int = 3, report: Report = silent
) -> list[SpeculationRow]:
    """A row for each kind of question and, of several kinds, one for all; with more than one sequence at once, only that one.

    Each group of `sequences` questions is answered without drafts and with them, the other way round every second time.
    Raises `InvalidRequest` where there is nothing to compare, and for more sequences than run at once.
    """
    check_repeat(repeat)
    check_drafting(engine)
    groups = list(group(asked, sequences))
    check_together(engine, groups)
    warm_up(engine, groups[0])
    rounds: list[list[Pair]] = []
    for round_ in range(repeat):
        pairs = []
        for i, members in enumerate(groups):
            report("answering without drafts and with them", round_ * len(groups) + i, repeat * len(groups))
            tenants = [[inside.new_tenant() for _ in members] for _ in range(2)]
            kind = members[0].kind if sequences == 1 else ALL
            pairs.append(answer_both(engine, members, tenants, kind, swapped=bool((round_ + i) % 2)))
        rounds.append(pairs)
    return rows(rounds)


def asked_again(engine: Engine, asked: Sequence[Question], repeat: int = 3, report: Report = silent) -> list[SpeculationRow]:
    """Two rows: questions of one tenant asked for the first time, and again after all the others, with all that is remembered.

    Without drafts they are asked by another tenant, just as often. Raises `InvalidRequest` as `speculation` does.
    """
    check_repeat(repeat)
    check_drafting(engine)
    check_together(engine, [list(asked[:1])])
    warm_up(engine, asked[:1])
    rounds: list[list[Pair]] = []
    for round_ in range(repeat):
        tenants = [[inside.new_tenant()] for _ in range(2)]
        pairs = []
        for i, (kind, one) in enumerate(itertools.product((FIRST, AGAIN), asked)):
            report(f"asking, {kind}", 2 * round_ * len(asked) + i, 2 * repeat * len(asked))
            pairs.append(answer_both(engine, [one], tenants, kind, swapped=bool((round_ + i) % 2)))
        rounds.append(pairs)
    return [row for row in rows(rounds) if row.kind != ALL]


def check_drafting(engine: Engine) -> None:
    if inside.speculation(engine) == OFF:
        raise InvalidRequest("speculate", "There is nothing to compare without drafts: set speculate to auto.")


def check_together(engine: Engine, groups: Sequence[Sequence[Question]]) -> None:
    """Refuse groups of which not all members run at once."""
    limits = inside.scheduling(engine)
    most = min(limits.max_sequences, limits.max_batch_tokens)
    for members in groups:
        if len(members) > most:
            raise InvalidRequest("sequences", f"sequences must be from 1 to {most} (see max_sequences), not {len(members)}.")
        needed = sum(len(q.token_ids) + q.max_tokens for q in members)
        if needed > engine.info.kv_tokens:
            raise InvalidRequest(
                "sequences",
                f"{len(members)} sequences need room for {needed} tokens, but the KV pool holds {engine.info.kv_tokens}.",
            )


def group(asked: Sequence[Question], size: int) -> Iterator[list[Question]]:
    """All questions in groups of `size`; the last group is filled up from the beginning."""
    if size < 1:
        raise InvalidRequest("sequences", f"sequences must be at least 1, not {size}.")
    for start in range(0, len(asked), size):
        yield [asked[i % len(asked)] for i in range(start, start + size)]


def warm_up(engine: Engine, asked: Sequence[Question]) -> None:
    for how in (PLAIN, DRAFTING):
        answer(engine, shortened(asked), [inside.new_tenant() for _ in asked], how)


def shortened(asked: Sequence[Question]) -> list[Question]:
    """The questions with the beginnings of their answers only, to warm up."""
    return [Question(q.kind, q.token_ids, min(q.max_tokens, WARMING)) for q in asked]


def answer_both(
    engine: Engine, asked: Sequence[Question], tenants: Sequence[Sequence[str]], kind: str, *, swapped: bool
) -> Pair:
    """`tenants`: without drafts, and with them; one for each question."""
    if swapped:
        on = answer(engine, asked, tenants[1], DRAFTING)
        return Pair(kind, answer(engine, asked, tenants[0], PLAIN), on)
    off = answer(engine, asked, tenants[0], PLAIN)
    return Pair(kind, off, answer(engine, asked, tenants[1], DRAFTING))


def answer(engine: Engine, asked: Sequence[Question], tenants: Sequence[str], how: SamplingParams) -> Answers:
    """Answer questions at once. `how`: with these parameters, but for the most tokens of each."""
    streams: list[Stream] = []
    began: float | None = None
    tokens = passes = 0
    milliseconds: list[float] = []
    latest = [0.0] * len(asked)  # when each sequence had its newest token
    now = time.perf_counter()
    try:
        for question, tenant in zip(asked, tenants, strict=True):
            params = dataclasses.replace(how, max_tokens=question.max_tokens)
            streams.append(engine.stream(question.token_ids, params, tenant=tenant))
        while any(stream.result is None for stream in streams):
            inside.step(engine)
            now = time.perf_counter()
            for i, stream in enumerate(streams):
                count = sum(len(delta.token_ids) for delta in inside.news(stream))
                if not count:
                    continue
                if began is not None:
                    tokens += count
                    passes += 1
                    milliseconds += [(now - latest[i]) / count * 1e3] * count
                latest[i] = now
            if began is None and all(latest):
                began, latest = now, [now] * len(asked)
    finally:
        for stream in streams:
            stream.close()
    results = tuple(stream.result for stream in streams if stream.result is not None)
    return Answers(results, now - (now if began is None else began), tokens, passes, tuple(milliseconds))


def rows(rounds: Sequence[Sequence[Pair]]) -> list[SpeculationRow]:
    """What the repetitions say of each kind, and of all together if there are several; every one has the same pairs."""
    kinds = list(dict.fromkeys(pair.kind for pair in rounds[0]))
    found = [_row(kind, [[pair for pair in pairs if pair.kind == kind] for pairs in rounds]) for kind in kinds]
    return found if len(kinds) == 1 else [*found, _row(ALL, rounds)]


def _row(kind: str, rounds: Sequence[Sequence[Pair]]) -> SpeculationRow:
    off, on = ([[getattr(pair, side) for pair in pairs] for pairs in rounds] for side in ("off", "on"))
    results = [result for answers in on[0] for result in answers.results]
    sources = Counter[str]()
    for result in (result for answers in itertools.chain(*on) for result in answers.results):
        sources.update(result.receipt.sources)
    rates = [[rate(answers) for answers in side] for side in (off, on)]
    return SpeculationRow(
        kind=kind,
        requests=len(results),
        sequences=len(rounds[0][0].on.results),
        prompt_tokens=sum(len(r.prompt_ids) for r in results) / len(results),
        output_tokens=sum(len(r.token_ids) for r in results) / len(results),
        off_tokens_per_second=Samples.of(rates[0]),
        on_tokens_per_second=Samples.of(rates[1]),
        speed_up=Samples.of(ratio(fast, slow) for slow, fast in zip(*rates, strict=True)),
        off_p50_milliseconds=_percentile(off, 50),
        on_p50_milliseconds=_percentile(on, 50),
        off_p99_milliseconds=_percentile(off, 99),
        on_p99_milliseconds=_percentile(on, 99),
        tokens_per_pass=Samples.of(ratio(sum(a.tokens for a in answers), sum(a.passes for a in answers)) for answers in on),
        sources={name: count / sources.total() for name, count in sources.most_common()},
        identical=all(pair.identical for pairs in rounds for pair in pairs),
    )


def rate(answers: Sequence[Answers]) -> float:
    """Tokens per second of several groups, one after another; NaN where no answer has more than one token."""
    return ratio(sum(a.tokens for a in answers), sum(a.seconds for a in answers))


def ratio(above: float, below: float) -> float:
    """NaN where nothing was measured."""
    return above / below if below > 0 else float("nan")


def _percentile(rounds: Sequence[Sequence[Answers]], share: float) -> Samples:
    each = [[ms for answers in groups for ms in answers.milliseconds] for groups in rounds]
    return Samples.of(float(np.percentile(ms, share)) if ms else float("nan") for ms in each)
