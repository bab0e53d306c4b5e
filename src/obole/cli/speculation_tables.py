"""Tables of the benchmarks of speculation: medians, with lowest and highest where a thing was measured several times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from obole.cli.bench_tables import number, print_table, spread
from obole.cli.receipts import plural

if TYPE_CHECKING:
    from obole.bench.lookup import LookupRow
    from obole.bench.speculation import SpeculationRow


def speculation_table(rows: Sequence[SpeculationRow]) -> None:
    print_table(
        (
            "", "requests", "prompt", "output", "tokens/s off", "on", "times faster", "tokens a pass", "p50 ms off", "on",
            "p99 ms off", "on", "identical",
        ),
        [
            (
                row.kind,
                f"{row.requests:,}",
                number(row.prompt_tokens),
                number(row.output_tokens),
                spread(row.off_tokens_per_second),
                spread(row.on_tokens_per_second),
                spread(row.speed_up),
                spread(row.tokens_per_pass),
                spread(row.off_p50_milliseconds),
                spread(row.on_p50_milliseconds),
                spread(row.off_p99_milliseconds),
                spread(row.on_p99_milliseconds),
                "yes" if row.identical else "NO",
            )
            for row in rows
        ],
    )  # fmt: skip
    names = list(dict.fromkeys(name for row in rows for name in row.sources))
    print()
    print_table(
        ("tokens by source, %", *names),
        [(row.kind, *(f"{100 * row.sources.get(name, 0.0):.1f}" for name in names)) for row in rows],
    )
    if rows[0].sequences > 1:
        print(f"\n{plural(rows[0].sequences, 'request')} at once; tokens/s of all together")


def lookup_table(rows: Sequence[LookupRow]) -> None:
    print_table(
        ("context", "µs a token", "µs by a scan", "seconds to build", "bytes a token"),
        [
            (
                f"{row.context:,}",
                spread(row.step_microseconds),
                spread(row.scan_microseconds),
                spread(row.build_seconds),
                number(row.bytes_per_token),
            )
            for row in rows
        ],
    )
