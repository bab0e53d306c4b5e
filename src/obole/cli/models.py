"""`obole models`: what can be had by name, and what of it is here already."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from obole.cli.failures import guarded
from obole.cli.options import JsonFlag
from obole.cli.receipts import size
from obole.cli.terminal import print_json


def catalogue() -> list[dict[str, Any]]:
    """One record for each model of the catalogue; `size` is bytes if known, `path` None for what is not cached."""
    from obole.weights.hub import list_models

    return [
        {
            "name": entry.name,
            "licence": entry.licence,
            "cached": path is not None,
            "size": count or None,
            "path": str(path) if path else None,
            "source": entry.source,
        }
        for entry, path, count in list_models()
    ]


def as_table(records: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "licence", "size", "cached", "source"):
        table.add_column(heading, no_wrap=True)
    for record in records:
        table.add_row(record["name"], record["licence"], shown_size(record), record["path"] or "no", record["source"])
    return table


def as_lines(records: list[dict[str, Any]]) -> list[str]:
    """For a terminal that the table does not fit on: paths have lines of their own, so that they can be copied."""
    lines = []
    for record in records:
        lines.append(f"{record['name']} · {record['licence']} · {shown_size(record)}")
        lines += [f"  {record['path'] or 'not cached'}", f"  {record['source']}"]
    return lines


def shown_size(record: dict[str, Any]) -> str:
    return "–" if record["size"] is None else size(record["size"])


@guarded
def models(as_json: JsonFlag = False) -> None:
    """The models known by name: licence, size, source, and what is cached."""
    records = catalogue()
    if as_json:
        print_json({"models": records})
        return
    table = as_table(records)
    screen = Console(highlight=False)
    if sys.stdout.isatty() and screen.measure(table, options=screen.options.update_width(10**6)).maximum > screen.width:
        print("\n".join(as_lines(records)))
        return
    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False)  # a file or pipe gets whole lines
    with console.capture() as text:
        console.print(table)
    sys.stdout.writelines(line.rstrip() + "\n" for line in text.get().splitlines())
