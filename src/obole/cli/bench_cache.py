"""`obole bench cache`: what a cached prompt costs from each tier."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from obole.cli.answering import open_engine
from obole.cli.bench import JsonFile, Model, Repeat, check_file, document_of, show
from obole.cli.bench_tables import number, print_table, spread
from obole.cli.failures import FAILURE, guarded
from obole.cli.options import DEFAULT_MODEL, Revision, with_options
from obole.cli.receipts import size
from obole.cli.terminal import progress_bar, stderr
from obole.config import parse_ssd

if TYPE_CHECKING:
    from obole.bench.cache import CacheFigures
    from obole.engine.engine import Engine

SSD_BYTES = 8 << 30  # in a temporary folder, where none is given


@contextmanager
def ssd_folder(given: str | None) -> Iterator[tuple[Path, int]]:
    """The folder and its size; a temporary one on the disk of the current directory if none is given."""
    if given is not None:
        folder, count = parse_ssd(given)
        yield Path(folder).expanduser(), count
        return
    with tempfile.TemporaryDirectory(prefix="obole-bench-", dir=".") as made:
        yield Path(made).resolve(), SSD_BYTES


@guarded
@with_options()
def cache(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=17, metavar="N", help="Tokens of the prompt, chosen at random.")] = 16384,
    repeat: Repeat = 3,
    as_json: JsonFile = None,
    revision: Revision = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Time to the first token of a prompt from nowhere, the KV pool, RAM and SSD; and what writing behind costs.

    The folder of --kv-ssd is used, which should be empty and on the disk in question, else one in the current directory; as
    much memory is taken for RAM.
    """
    check_file(as_json)
    given = settings.pop("kv_ssd", None)
    settings.pop("kv_ram", None)
    with ssd_folder(given) as (folder, room), progress_bar() as report:
        from obole.bench.cache import cache as measure
        from obole.engine.machine import available_memory

        room = min(room, available_memory() // 4)
        facts: dict[str, Any] = {}

        @contextmanager
        def opened(more: dict[str, object]) -> Iterator[Engine]:
            with open_engine(model, revision, {**settings, **more}) as engine:
                yield engine
                facts.update(document_of(engine, "cache", repeat, []))

        figures = measure(opened, folder, room, tokens, repeat, report)
        from obole.bench.report import to_json

        document = {**facts, "tokens": tokens, "plain": to_json(figures.plain)}
        document |= {"write_behind": {**to_json(figures.write_behind), "cost": figures.write_behind.cost}}
        document["rows"] = [to_json(row) for row in figures.rows]
    show(as_json, document, lambda: cache_table(figures))
    if not all(row.identical for row in figures.rows):
        stderr().print("error: a cached prompt was continued differently from a computed one.", soft_wrap=True)
        raise typer.Exit(FAILURE)


def cache_table(figures: CacheFigures) -> None:
    rows = [
        (row.tier, f"{row.cached_tokens:,}", spread(row.seconds, 1000), f"{row.share:.2%}", "yes" if row.identical else "NO")
        for row in figures.rows
    ]
    print_table(("prompt from", "cached tokens", "first token ms", "of cold", "same answer"), rows)
    plain, behind = figures.plain, figures.write_behind
    ssd = next(row for row in figures.rows if row.tier == "ssd")
    print(f"\nplain reading of {size(plain.bytes)}: {spread(plain.seconds, 1000)} ms; ", end="")
    print(f"from SSD it took {number(ssd.seconds.median / plain.seconds.median)} times as long")
    print(f"tokens/s without tiers {spread(behind.without)}, with them {spread(behind.with_tiers)}: {behind.cost:+.1%} cost")


def add_to(bench: typer.Typer) -> None:
    """Make it a command of `obole bench`."""
    bench.command()(cache)
