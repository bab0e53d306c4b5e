"""What a token of each kind costs: the time of a run, attributed by what steps cost, and four ways to make it cost less.

The cost of a step is that of its rows plus that of the context they see (`costmodel.StepCost`). Decoding without drafts pays
for the pass, shared by the sequences in it; drafts pay for the rows that they add, those in vain included; a prompt pays for
rows by the hundred; each token of context pays for being read by later passes, whether it was computed or cached; and one that
came from SSD pays for the wait, shared by the sequences that decoded meanwhile. All is then scaled so that the parts add up to
the time that was really rented: idle time falls on all kinds alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from obole.costmodel import StepCost
from obole.economics.runs import Run
from obole.prices import CACHED, COPIED, INPUT, OUTPUT
from obole.types import Tier

PRICED = (INPUT, *CACHED.values(), OUTPUT, COPIED)
ASSUMED_DRAFT = 4.0  # rows of a draft, all right, where a run had none
ASSUMED_CACHED = 0.1  # of an uncached token, where nothing says what steps cost: what is usually charged
FULL_BITS = 16.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """The numbers that a run's cost depends on. `input`, `cached`, `output`, `copied`: tokens; `in_vain`: drafted rows."""

    input: float
    cached: float
    output: float
    copied: float
    in_vain: float
    passes: float
    sequences: float
    context: float  # tokens before a decoded one, the mean
    prompt_share: float  # of these, tokens of the prompt

    @property
    def drafted(self) -> float:
        """Rows beside the first of each pass: tokens that did not need a pass, and those in vain."""
        return max(0.0, self.output + self.copied - self.passes) + self.in_vain

    @property
    def hit_ratio(self) -> float:
        return self.cached / (self.input + self.cached) if self.input + self.cached else 0.0


def traffic_of(run: Run) -> Traffic:
    cached = sum(run.tokens.get(kind, 0) for kind in CACHED.values())
    copied, output = float(run.tokens.get(COPIED, 0)), float(run.tokens.get(OUTPUT, 0))
    return Traffic(
        input=float(run.tokens.get(INPUT, 0)),
        cached=float(cached),
        output=output,
        copied=copied,
        in_vain=max(0.0, run.rejected),
        passes=min(max(run.passes, 1.0), output + copied),
        sequences=max(1.0, run.sequences),
        context=max(0.0, run.context),
        prompt_share=min(1.0, run.prompt / run.context) if run.context else 0.0,
    )


def rows_seconds(step: StepCost, rows: float) -> float:
    """Of a step of so many rows, on average a broken number, context aside."""
    last = step.rows[-1]
    if rows > last:
        return float(step.curve(last)[last]) * rows / last
    curve = step.curve(last)
    return float(np.interp(rows, np.arange(curve.size), curve))


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a run by what they went to, as the cost of steps has it. `steps`: that read all weights once."""

    prompt_rows: float
    passes: float
    draft_rows: float
    context: float
    steps: float

    @property
    def total(self) -> float:
        return self.prompt_rows + self.passes + self.draft_rows + self.context


def parts(traffic: Traffic, step: StepCost) -> Parts:
    """Decoding steps of `sequences` rows and their drafts, and prompts in steps of as many rows as were measured at most."""
    t, most = traffic, step.rows[-1]
    steps = t.passes / t.sequences
    per_pass = t.drafted / t.passes if t.passes else 0.0
    plain = rows_seconds(step, t.sequences)
    drafts = rows_seconds(step, t.sequences * (1 + per_pass)) - plain
    context = t.passes * t.context * (step.read_seconds + step.context_seconds * (1 + per_pass))
    return Parts(
        prompt_rows=t.input * rows_seconds(step, most) / most,
        passes=steps * plain,
        draft_rows=steps * drafts,
        context=context,
        steps=steps + t.input / most,
    )


def unit_seconds(run: Run) -> dict[str, float]:
    """Seconds of one token of each of `PRICED`, before scaling."""
    if run.step is None:
        return _by_latency(run)
    t, found = traffic_of(run), parts(traffic_of(run), run.step)
    prompt_tokens = t.input + t.cached
    prompt_context = found.context * t.prompt_share
    own_context = found.context - prompt_context
    outputs = t.output + t.copied
    once_read = t.passes / t.sequences * run.step.read_seconds  # a token of context, while a sequence decodes
    read = prompt_context / prompt_tokens if prompt_tokens else once_read
    if not prompt_tokens:
        own_context = found.context  # a run that only decoded pays for its context by its tokens
    written = own_context / outputs if outputs else 0.0
    most = run.step.rows[-1]
    if t.copied:
        copied = found.draft_rows / t.copied
    else:
        alone = rows_seconds(run.step, t.sequences)
        copied = (rows_seconds(run.step, t.sequences * (1 + ASSUMED_DRAFT)) - alone) / (t.sequences * ASSUMED_DRAFT)
    passes = found.passes + (0.0 if t.copied else found.draft_rows)
    plain = passes / t.output if t.output else rows_seconds(run.step, t.sequences) / t.sequences
    if t.copied and not t.output:
        copied += found.passes / t.copied
    units = {INPUT: rows_seconds(run.step, most) / most + read, OUTPUT: plain + written, COPIED: copied + written}
    loaded = run.tokens.get(CACHED[Tier.SSD], 0)  # what is in RAM is there at once
    waited = max(0.0, run.load_seconds) / t.sequences / loaded if loaded else 0.0  # others decode meanwhile
    return {**units, **dict.fromkeys(CACHED.values(), read), CACHED[Tier.SSD]: read + waited}


def _by_latency(run: Run) -> dict[str, float]:
    """For other servers: a token of the prompt by the time until the first token, one of the answer by that between two."""
    t = traffic_of(run)
    requests = max(1.0, (t.input + t.cached) / run.prompt) if run.prompt else 1.0
    between = run.milliseconds.get("itl_p50", 0.0) / 1e3
    first = run.milliseconds.get("ttft_p50", 0.0) / 1e3 * requests / max(1.0, t.input + ASSUMED_CACHED * t.cached)
    return {INPUT: first, OUTPUT: between, COPIED: between, **dict.fromkeys(CACHED.values(), ASSUMED_CACHED * first)}


@dataclass(frozen=True, slots=True)
class Costs:
    """`per_million`: what a million tokens of each kind cost, margin included. `explained`: the share of the run's time that
    the cost of steps accounts for; None without one. `assumed`: kinds that the run did not have."""

    per_million: Mapping[str, float]
    explained: float | None
    assumed: tuple[str, ...]


def costs(run: Run, rent: float, margin: float = 0.0) -> Costs:
    """`rent`: of an hour. Prices times the run's tokens are the rent of its time, plus the margin."""
    units = unit_seconds(run)
    modelled = sum(run.tokens.get(kind, 0) * unit for kind, unit in units.items())
    if not modelled:  # nothing but tokens that take no time: all cost the same
        units = dict.fromkeys(PRICED, 1.0)
        modelled = float(sum(run.tokens.get(kind, 0) for kind in PRICED))
    scale = run.seconds / modelled if modelled else 0.0
    per_million = {kind: 1e6 * unit * scale * rent / 3600 * (1 + margin) for kind, unit in units.items()}
    missing = tuple(kind for kind in PRICED if not run.tokens.get(kind))
    return Costs(per_million, modelled / run.seconds if run.step is not None else None, missing)


@dataclass(frozen=True, slots=True)
class Lever:
    """`now`: where it stands; `factor`: how many times more the same traffic would cost without it; `moved`: further on, and
    `saves`: the share of the cost that this would save."""

    name: str
    now: float
    factor: float
    moved: float
    saves: float


def levers(run: Run) -> list[Lever]:
    """The four ways, each by itself. Empty without a cost of steps; the last one needs the size of the model too."""
    step, t = run.step, traffic_of(run)
    if step is None:
        return []
    now = parts(t, step)

    def cost(**changes: float) -> float:
        return parts(dataclasses.replace(t, **changes), step).total

    found = []
    prompt, outputs = t.input + t.cached, t.output + t.copied
    if prompt:
        better = min(1.0, t.hit_ratio + 0.1)
        moved = cost(input=prompt * (1 - better), cached=prompt * better)
        found.append(_lever("prefix hits", t.hit_ratio, cost(input=prompt, cached=0.0), better, moved, now))
    if t.passes:
        doubled = cost(sequences=2 * t.sequences)
        found.append(_lever("effective batch", t.sequences, cost(sequences=1.0), 2 * t.sequences, doubled, now))
        per_pass = outputs / t.passes
        more = cost(passes=outputs / (per_pass + 1))
        found.append(_lever("tokens per pass", per_pass, cost(passes=outputs, in_vain=0.0), per_pass + 1, more, now))
    if run.weight_bytes and run.parameters:
        bits = 8 * run.weight_bytes / run.parameters
        read = now.steps * weight_seconds(step)
        full = now.total + read * (FULL_BITS / bits - 1)
        found.append(_lever("bits of a weight", bits, full, bits / 2, now.total - read / 2, now))
    return found


def weight_seconds(step: StepCost) -> float:
    """Of a step, what does not grow with its rows: reading the weights. From where the curve would begin without any row."""
    points = list(zip(step.rows, step.seconds, strict=True))
    near = points[: max(2, sum(n <= 8 for n in step.rows))]
    if len(near) < 2:
        return 0.0
    slope = (near[-1][1] - near[0][1]) / (near[-1][0] - near[0][0])
    return min(max(0.0, near[0][1] - slope * near[0][0]), near[0][1])


def _lever(name: str, now: float, without: float, moved: float, then: float, parts_now: Parts) -> Lever:
    total = parts_now.total
    return Lever(name, now, without / total if total else 1.0, moved, 1 - then / total if total else 0.0)


def meets(run: Run, objective: Mapping[str, float]) -> str:
    """Why a run does not meet an objective (milliseconds by name, such as "ttft_p99"); empty if it does."""
    for name, most in objective.items():
        measured = run.milliseconds.get(name)
        if measured is None:
            return f"{run.name}: {name} was not measured"
        if measured > most:
            return f"{run.name}: {name} is {measured:,.1f} ms, not {most:,.10g}"
    return ""


def to_json(run: Run, found: Costs, rent: float, currency: str, margin: float) -> dict[str, Any]:
    return {
        "run": run.name,
        "seconds": run.seconds,
        "rent_per_hour": rent,
        "currency": currency,
        "margin": margin,
        "tokens": dict(run.tokens),
        "per_million": dict(found.per_million),
        "assumed": list(found.assumed),
        "explained": found.explained,
        "milliseconds": dict(run.milliseconds),
        "levers": [dataclasses.asdict(one) for one in levers(run)],
        "joules": dict(run.joules),
    }
