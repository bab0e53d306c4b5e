"""The tables of `obole bench serve`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from obole.cli.bench_tables import number, print_table, spread
from obole.cli.receipts import plural
from obole.cli.terminal import stderr

if TYPE_CHECKING:
    from obole.bench.compare import Change
    from obole.bench.samples import Samples
    from obole.bench.serve import LongRow, Served, ServeRow


def known(samples: Samples) -> str:
    """ "12.3 (12–12.9)"; "–" where nothing was measured."""
    return "–" if any(math.isnan(value) for value in samples.values) else spread(samples)


def serve_tables(found: Served, changes: Sequence[Change] = ()) -> None:
    """On standard output; requests that failed on standard error."""
    row = found.row
    rate = [("requests/s", known(row.requests_per_second)), ("output tokens/s", known(row.output_tokens_per_second))]
    if found.offline is not None:
        rate.append(("read at their ends", known(found.offline.served_tokens_per_second)))
        rate.append(("without a server", known(found.offline.output_tokens_per_second)))
        rate.append(("the server costs %", known(found.offline.cost_percent)))
    print_table((f"{plural(row.requests, 'request')}, {row.concurrency} at a time", ""), rate)
    print()
    latency_table(row, found.long)
    print(
        f"\n{number(row.prompt_tokens)} tokens a prompt ({number(row.cached_tokens)} cached), {number(row.output_tokens)} an "
        f"answer, {known(row.tokens_per_event)} an event; this client took {known(row.client_cores)} processors"
    )
    if found.long is not None:
        long = found.long
        asked = f"{plural(long.requests, 'long prompt')} of {number(long.prompt_tokens)} tokens"
        ratio = f"others between tokens, p99 over p50: {known(long.between_tokens_p99_to_p50)}"
        print(f"{asked}, first token after {known(long.first_token_milliseconds)} ms; {ratio}")
    print_errors(row.errors)
    for other in (found.long, found.offline):
        print_errors(other.errors if other is not None else {})
    change_table(changes)


def latency_table(row: ServeRow, long: LongRow | None) -> None:
    rows = [
        (
            "first token",
            known(row.first_token_p50_milliseconds),
            known(row.first_token_p90_milliseconds),
            known(row.first_token_p99_milliseconds),
        ),
        (
            "between tokens",
            known(row.between_tokens_p50_milliseconds),
            known(row.between_tokens_p90_milliseconds),
            known(row.between_tokens_p99_milliseconds),
        ),
        (
            "whole answer",
            known(row.whole_answer_p50_milliseconds),
            known(row.whole_answer_p90_milliseconds),
            known(row.whole_answer_p99_milliseconds),
        ),
    ]
    if long is not None:
        rows.append(
            ("beside a long prompt", known(long.meanwhile_p50_milliseconds), "", known(long.meanwhile_p99_milliseconds))
        )
    print_table(("ms", "p50", "p90", "p99"), rows)


def print_errors(errors: Mapping[str, int]) -> None:
    for reason, count in errors.items():
        failed = f" {plural(count, 'request')} failed: {reason}"
        stderr().print(Text.assemble(("error:", "bold red"), failed), soft_wrap=True)


def change_table(changes: Sequence[Change]) -> None:
    """What changed beyond noise, and how much was compared; nothing where nothing was."""
    if not changes:
        return
    told = [change for change in changes if change.verdict in ("better", "worse")]
    unsure = sum(change.verdict == "unsure" for change in changes)
    print(f"\nagainst the baseline: {len(told)} of {plural(len(changes), 'figure')} changed beyond noise")
    if unsure:
        print(f"{plural(unsure, 'figure')} cannot be told from noise: repeat both runs 3 times or more (--repeat)")
    if told:
        verdict_table(told)


def verdict_table(changes: Sequence[Change]) -> None:
    print_table(
        ("figure", "before", "now", "ratio", "between", ""),
        [
            (
                f"{change.row}: {change.figure}",
                number(change.before),
                number(change.now),
                f"{change.ratio:.3f}",
                "–" if math.isnan(change.low) else f"{change.low:.3f}–{change.high:.3f}",
                change.verdict,
            )
            for change in changes
        ],
    )
