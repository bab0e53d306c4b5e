"""What a model that predicts several tokens at once gains, and what it loses: problems solved against tokens per pass and time.

Every problem is answered by all sides in turn, those that leave the answers as they are and those that do not, greedily, each
time by a tenant of its own. Only decoding is timed, as in `speculation.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from obole.bench import inside, problems
from obole.bench.drive import check_repeat
from obole.bench.problems import Problem
from obole.bench.samples import Report, Samples, silent
from obole.bench.speculation import OFF, Answers, Question, answer, check_together, group, rate, ratio, shortened
from obole.engine.engine import Engine
from obole.engine.results import Result
from obole.errors import InvalidRequest
from obole.types import SamplingParams

PLAIN = "plain"
NEXT_PROBLEM = "\nQuestion:"  # what a model that is no assistant may go on with
SEED = 0
TWO_SIDED = 1.96  # standard deviations on either side of the middle that hold 95 %


@dataclass(frozen=True, slots=True)
class Side:
    """One way of answering. `setting`: its τ or k; None: it has none."""

    name: str
    setting: float | None
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class MtpRow:
    """One side, at so many sequences at once. Shares of problems are of all repetitions together.

    `accuracy_low`, `accuracy_high`: 95 % interval of Wilson. `lost`: accuracy of the plain side less this one's; `lost_error`:
    its standard error, both having had the same problems. `same`: share of the answers that are the plain side's to the last
    token. `tokens_per_pass`: that a pass yielded for a sequence. `speed_up`: of tokens per second, against the plain side.
    `lossy`: by the receipts. `output_tokens`: mean of an answer.
    """

    side: str
    setting: float | None
    sequences: int
    problems: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    lost: float
    lost_error: float
    same: float
    lossy: bool
    output_tokens: float
    tokens_per_pass: Samples
    tokens_per_second: Samples
    speed_up: Samples


def sides(engine: Engine, taus: Sequence[float], static: Sequence[int], most: int) -> list[Side]:
    """Plain, lookup and verified predictions, and the lossy ones: by confidence, of at most `most` tokens, and static.

    Raises `InvalidRequest` for a model that predicts one token at a time, or fewer than are asked for.
    """
    model = inside.model(engine).config.multi_token
    if model is None:
        raise InvalidRequest("model", "This model predicts one token at a time: give one that was made by `obole distill`.")
    if max([most, *static]) > model.most:
        name = "mtp_tokens" if most > model.most else "static"
        raise InvalidRequest(name, f"This model predicts at most {model.most} tokens in a pass: ask for no more.")
    stop = () if engine.has_chat_template else (NEXT_PROBLEM,)

    def side(name: str, setting: float | None, mtp: str, **more: object) -> Side:
        return Side(name, setting, SamplingParams(mtp=mtp, stop=stop, **more))  # type: ignore[arg-type]

    return [
        side(PLAIN, None, "off", speculate=OFF),
        side("lookup", None, "off", speculate="lookup"),
        side("verify", None, "verify", mtp_tokens=most),
        *(side("confadapt", tau, "confadapt", tau=tau, mtp_tokens=most) for tau in taus),
        *(side("static", k, "static", mtp_tokens=k) for k in static),
    ]


def as_questions(engine: Engine, asked: Sequence[Problem], max_tokens: int) -> tuple[list[Problem], list[Question]]:
    """The problems that the context can hold with their answers, and how this model is asked them.

    Raises `InvalidRequest` if there is none, and for a model without a tokenizer.
    """
    if engine.tokenizer is None:
        raise InvalidRequest("model", "This model has no tokenizer, and this benchmark asks in words: choose another model.")
    prompt = problems.chat_prompt if engine.has_chat_template else problems.plain_prompt
    read = [(problem, inside.token_ids(engine, prompt(problem))) for problem in asked]
    fitting = [(problem, ids) for problem, ids in read if len(ids) + max_tokens <= engine.max_context]
    if not fitting:
        raise InvalidRequest(
            "max_context", f"None of {len(asked)} problems fits into a context of {engine.max_context}: make it longer."
        )
    return [problem for problem, _ in fitting], [Question("problem", ids, max_tokens) for _, ids in fitting]


def mtp(
    engine: Engine,
    asked: Sequence[Problem],
    questions: Sequence[Question],
    compared: Sequence[Side],
    sequences: int = 1,
    repeat: int = 1,
    report: Report = silent,
) -> list[MtpRow]:
    """A row for each side. Groups of `sequences` questions are answered by all sides, another one being the first each time.

    Raises `InvalidRequest` for more sequences than run at once.
    """
    check_repeat(repeat)
    groups = list(group(questions, sequences))
    check_together(engine, groups)
    for side in compared:  # steps of every form, which are recorded the first time
        answer(engine, shortened(groups[0]), [inside.new_tenant() for _ in groups[0]], side.params)
    found: list[list[list[Answers]]] = [[] for _ in compared]  # of each side, by repetition
    for round_ in range(repeat):
        for rounds in found:
            rounds.append([])
        for i, members in enumerate(groups):
            report(f"answering, {sequences} at once", round_ * len(groups) + i, repeat * len(groups))
            for turn in range(len(compared)):
                at = (turn + round_ + i) % len(compared)
                tenants = [inside.new_tenant() for _ in members]
                found[at][-1].append(answer(engine, members, tenants, compared[at].params))
    return [_row(side, sequences, asked, rounds, found[0]) for side, rounds in zip(compared, found, strict=True)]


def _row(
    side: Side,
    sequences: int,
    asked: Sequence[Problem],
    rounds: Sequence[Sequence[Answers]],
    plain: Sequence[Sequence[Answers]],
) -> MtpRow:
    """`plain`: the answers of the side that this one is compared with."""
    found, others = (_by_problem(one, len(asked)) for one in (rounds, plain))
    shares, before = ([_solved(*pair) for pair in zip(asked, one, strict=True)] for one in (found, others))
    accuracy, _ = mean(shares)
    low, high = wilson(accuracy, len(asked))
    lost, error = mean([a - b for a, b in zip(before, shares, strict=True)])
    results = [result for one in found for result in one]
    same = [a.token_ids == b.token_ids for a, b in zip(results, (r for one in others for r in one), strict=True)]
    rates = [rate(groups) for groups in rounds]
    return MtpRow(
        side=side.name,
        setting=side.setting,
        sequences=sequences,
        problems=len(asked),
        accuracy=accuracy,
        accuracy_low=low,
        accuracy_high=high,
        lost=lost,
        lost_error=error,
        same=sum(same) / len(same),
        lossy=any(result.receipt.acceptance == "lossy" for result in results),
        output_tokens=sum(len(result.token_ids) for result in results) / len(results),
        tokens_per_pass=Samples.of(ratio(sum(a.tokens for a in groups), sum(a.passes for a in groups)) for groups in rounds),
        tokens_per_second=Samples.of(rates),
        speed_up=Samples.of(ratio(fast, rate(groups)) for fast, groups in zip(rates, plain, strict=True)),
    )


def _by_problem(rounds: Sequence[Sequence[Answers]], count: int) -> list[list[Result]]:
    """Of each of `count` problems, the answers of all repetitions, without those that filled up the last group."""
    flat = [[result for answers in groups for result in answers.results][:count] for groups in rounds]
    return [list(one) for one in zip(*flat, strict=True)]


def _solved(problem: Problem, results: Sequence[Result]) -> float:
    """The share of answers that solve it."""
    return sum(problems.solved(problem, result.text) for result in results) / len(results)


def mean(values: Sequence[float]) -> tuple[float, float]:
    """With its standard error; NaN for that of a single value."""
    count = len(values)
    middle = sum(values) / count
    if count == 1:
        return middle, math.nan
    return middle, math.sqrt(sum((value - middle) ** 2 for value in values) / (count - 1) / count)


def wilson(share: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a probability, from the share of `count` trials (E. B. Wilson 1927)."""
    spread = TWO_SIDED**2 / count
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))  # rounding must not pass either end
