"""The tables of `obole bench`: medians, with lowest and highest where a thing was measured several times."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from obole.cli.receipts import plural, size

if TYPE_CHECKING:
    from obole.bench.kernels import KernelRow
    from obole.bench.latency import LatencyRow
    from obole.bench.overhead import OverheadRow
    from obole.bench.roofline import Roofline
    from obole.bench.samples import Samples
    from obole.bench.throughput import ThroughputRow

Cells = Sequence[str]


def number(value: float) -> str:
    """Three significant digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def spread(samples: Samples, scale: float = 1.0) -> str:
    """ "260 (255–271)", everything times `scale`."""
    middle = number(samples.median * scale)
    if len(samples.values) == 1:
        return middle
    return f"{middle} ({number(samples.lowest * scale)}–{number(samples.highest * scale)})"


def maybe(samples: Samples | None, scale: float) -> str:
    return "" if samples is None else spread(samples, scale)


def print_table(headings: Cells, rows: Sequence[Cells]) -> None:
    """On standard output: as wide as the terminal, or whole lines to a file or pipe."""
    table = Table(box=None, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False)
    with console.capture() as text:
        console.print(table)
    sys.stdout.writelines(line.rstrip() + "\n" for line in text.get().splitlines())


def heading(document: Mapping[str, Any]) -> str:
    """The first line of a report: what was measured, and on what."""
    machine = document["machine"]
    where = f"{machine['cpu']}, {plural(machine['cores'], 'core')}, {size(machine['memory_bytes'])}"
    model = [document["model"]] if "model" in document else []
    kernels = [f"{document['kernels']} kernels, {plural(document['threads'], 'thread')}"] if "kernels" in document else []
    return " · ".join([*model, *kernels, where, str(document["date"])])


def latency_table(rows: Sequence[LatencyRow]) -> None:
    print_table(
        ("context", "decode tokens/s", "bytes/token", "read GB/s", "share of it %", "prompt", "prefill tokens/s"),
        [
            (
                f"{r.context:,}",
                spread(r.decode_tokens_per_second),
                size(r.bytes_per_token),
                spread(r.read_bandwidth_bytes_per_second, 1e-9),
                spread(r.share_of_bandwidth, 100),
                f"{r.prompt_tokens:,}",
                spread(r.prefill_tokens_per_second),
            )
            for r in rows
        ],
    )


def throughput_table(rows: Sequence[ThroughputRow]) -> None:
    print_table(
        ("sequences", "tokens/s", "tokens/s each", "step ms", "to one sequence"),
        [
            (
                f"{r.sequences:,}",
                spread(r.decode_tokens_per_second),
                spread(r.decode_tokens_per_second_each),
                spread(r.step_milliseconds),
                spread(r.ratio_to_one),
            )
            for r in rows
        ],
    )


def kernel_table(rows: Sequence[KernelRow]) -> None:
    print_table(
        ("operation", "shape", "rows", "µs a call", "GB/s", "G products/s", "M positions/s"),
        [
            (
                r.operation,
                r.shape,
                f"{r.rows:,}",
                spread(r.microseconds),
                maybe(r.bytes_per_second, 1e-9),
                maybe(r.products_per_second, 1e-9),
                maybe(r.positions_per_second, 1e-6),
            )
            for r in rows
        ],
    )


def roofline_table(found: Roofline) -> None:
    print_table(
        ("threads", "read GB/s", "int8 G products/s", "fp32 G products/s", "bf16 G products/s"),
        [
            (
                f"{r.threads}",
                spread(r.read_bandwidth_bytes_per_second, 1e-9),
                number(r.int8_products_per_second / 1e9),
                number(r.fp32_products_per_second / 1e9),
                "none" if r.bf16_products_per_second is None else number(r.bf16_products_per_second / 1e9),
            )
            for r in (found.one_thread, found.all_threads)
        ],
    )
    print()
    print_table(
        ("step", "ms", "bytes", "at least ms: bytes", "arithmetic", "times the larger"),
        [
            (
                r.step,
                spread(r.milliseconds),
                size(r.bytes_read),
                number(r.bytes_milliseconds),
                number(r.arithmetic_milliseconds),
                spread(r.distance),
            )
            for r in found.rows
        ],
    )


def overhead_table(rows: Sequence[OverheadRow]) -> None:
    for row in rows:
        total = row.step_microseconds
        cells = [(f"kernel: {kind}", us) for kind, us in row.kernels.items()] + list(row.parts.items())
        print_table(
            (plural(row.sequences, "sequence"), "µs a step", "%"),
            [(name, f"{us:,.1f}", f"{100 * us / total:.1f}") for name, us in [*cells, ("step", total)]],
        )
        print(f"not kernel: {spread(row.not_kernel_share, 100)} %")
        print(f"step without stopwatches: {spread(row.plain_step_microseconds)} µs\n")
