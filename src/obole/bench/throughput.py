"""Many sequences at once: what a step costs, and how many tokens it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from obole.bench.drive import check_repeat, check_sequences, decode
from obole.bench.samples import Report, Samples, silent
from obole.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class ThroughputRow:
    """`step_milliseconds`: mean over the steps of a repetition; `ratio_to_one`: of it to that of one sequence."""

    sequences: int
    prompt_tokens: int
    output_tokens: int
    step_milliseconds: Samples
    decode_tokens_per_second: Samples
    decode_tokens_per_second_each: Samples
    ratio_to_one: Samples


def throughput(
    engine: Engine,
    sequences: Sequence[int] = (1, 4, 16, 64),
    prompt_tokens: int = 128,
    output_tokens: int = 64,
    repeat: int = 3,
    report: Report = silent,
) -> list[ThroughputRow]:
    """A row for each number of sequences, and for one sequence, which the others are compared with.

    Only decoding is timed, once all prompts are read. One round more than `repeat` is run and the first not counted.
    Raises `InvalidRequest` for what does not fit into the engine.
    """
    check_repeat(repeat)
    counts = sorted({1, *sequences})
    for count in counts:
        check_sequences(engine, count, prompt_tokens, output_tokens)
    milliseconds: dict[int, list[float]] = {count: [] for count in counts}
    for round_ in range(repeat + 1):
        for i, count in enumerate(counts):
            report(f"{count} at once", round_ * len(counts) + i, (repeat + 1) * len(counts))
            decoded = decode(engine, count, prompt_tokens, output_tokens, seed=round_)
            milliseconds[count].append(decoded.seconds / output_tokens * 1e3)
    one = milliseconds[1][1:]
    return [_row(count, prompt_tokens, output_tokens, milliseconds[count][1:], one) for count in counts]


def _row(count: int, prompt_tokens: int, output_tokens: int, milliseconds: list[float], one: list[float]) -> ThroughputRow:
    return ThroughputRow(
        sequences=count,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        step_milliseconds=Samples.of(milliseconds),
        decode_tokens_per_second=Samples.of(count * 1e3 / ms for ms in milliseconds),
        decode_tokens_per_second_each=Samples.of(1e3 / ms for ms in milliseconds),
        ratio_to_one=Samples.of(ms / alone for ms, alone in zip(milliseconds, one, strict=True)),
    )
