"""`obole bench mtp`: what a model that predicts several tokens at once gains and loses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from obole.cli.answering import open_engine, read_text
from obole.cli.bench import JsonFile, Model, Repeat, check_file, counts, document_of, show
from obole.cli.bench_tables import number, print_table, spread
from obole.cli.failures import guarded
from obole.cli.options import Revision, with_options
from obole.cli.receipts import plural
from obole.cli.terminal import progress_bar, stderr

if TYPE_CHECKING:
    from obole.bench.mtp import MtpRow


def probabilities(option: str, text: str) -> list[float]:
    """Numbers from 0 to 1 from "0.5,0.9"."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(0 <= value <= 1 for value in found):
        raise typer.BadParameter(f"{text!r} is not a list of numbers from 0 to 1, such as 0.5,0.9.", param_hint=option)
    return found


@guarded
@with_options()
def mtp(
    model: Model,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="Problems in the form of GSM8K (test.jsonl).", show_default="made up"),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Only the first N problems.")] = 200,
    output_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Most tokens of an answer.")] = 256,
    tau: Annotated[
        str, typer.Option("--tau", metavar="P,P,...", help="Confidences below which nothing is taken unverified.")
    ] = "0.5,0.7,0.8,0.9,0.95,0.99",
    static: Annotated[
        str, typer.Option("--static", metavar="N,N,...", help="Tokens to take at each pass, whatever the confidence.")
    ] = "2,3,4,6,8",
    most: Annotated[
        int, typer.Option("--mtp-tokens", min=1, metavar="N", help="Tokens of a pass at most, where confidence decides.")
    ] = 16,
    concurrency: Annotated[str, typer.Option(metavar="N,N,...", help="Problems answered at once.")] = "1,16",
    repeat: Repeat = 1,
    as_json: JsonFile = None,
    revision: Revision = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Several tokens in one pass: problems solved against tokens per pass and against time, by confidence and at a fixed
    number, beside plain answers, drafts looked up, and predictions that are verified."""
    taus, ks, several = probabilities("--tau", tau), counts("--static", static, 1), counts("--concurrency", concurrency, 1)
    check_file(as_json)
    from obole.bench import problems

    if file is None:
        asked = problems.arithmetic(limit, problems.TEST_SEED, problems.TEST)
    else:
        asked = problems.gsm8k(read_text(file, "file"))[:limit]
    with open_engine(model, revision, settings) as engine, progress_bar() as report:
        from obole.bench.mtp import as_questions, sides
        from obole.bench.mtp import mtp as measure

        compared = sides(engine, taus, ks, most)
        kept, questions = as_questions(engine, asked, output_tokens)
        rows = [row for n in several for row in measure(engine, kept, questions, compared, n, repeat, report)]
        document = document_of(engine, "mtp", repeat, rows)
        document |= {"file": None if file is None else file.name, "mtp_tokens": most, "left_out": len(asked) - len(kept)}
    show(as_json, document, lambda: mtp_table(rows))
    if len(kept) < len(asked):
        left_out = plural(len(asked) - len(kept), "problem")
        stderr().print(f"left out, since the context cannot hold them: {left_out}", soft_wrap=True)


def mtp_table(rows: Sequence[MtpRow]) -> None:
    print_table(
        (
            "at once", "answered", "solved %", "95 %", "lost %", "± ", "tokens a pass", "tokens/s", "times faster", "same %",
            "lossy",
        ),
        [
            (
                str(row.sequences),
                row.side if row.setting is None else f"{row.side} {row.setting:g}",
                f"{100 * row.accuracy:.1f}",
                f"{100 * row.accuracy_low:.1f}–{100 * row.accuracy_high:.1f}",
                f"{100 * row.lost:.1f}",
                f"{100 * row.lost_error:.1f}",
                spread(row.tokens_per_pass),
                spread(row.tokens_per_second),
                spread(row.speed_up),
                f"{100 * row.same:.1f}",
                "yes" if row.lossy else "no",
            )
            for row in rows
        ],
    )  # fmt: skip
    first = rows[0]
    print(f"\n{plural(first.problems, 'problem')}, {number(first.output_tokens)} tokens an answer")
    print("lost: against plain, ± the standard error of the difference")
