"""The two streams: results on standard output; receipts, progress and errors on standard error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

Report = Callable[[str, int, int], None]

BYTE_STAGES = ("downloading", "unpacking", "verifying")
# A model's text must not drive the terminal (move its cursor, set its title): control characters but tab and newline
CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def stderr() -> Console:
    """A console on today's `sys.stderr`; Rich leaves out colours for NO_COLOR and where there is no terminal."""
    return Console(stderr=True, highlight=False)


def print_json(document: Any) -> None:
    """One line of strict JSON: numbers that JSON lacks (infinities, NaN) become null."""
    sys.stdout.write(json.dumps(_finite(document), allow_nan=False) + "\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def write_text(text: str) -> None:
    """Model text to standard output at once: as it is to a file or pipe, with control characters made visible on a terminal."""
    if sys.stdout.isatty():
        text = text.translate(CONTROLS)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def note(text: str) -> None:
    """A remark on standard error, beside the text: broken between words on a terminal, whole lines elsewhere."""
    console = stderr()
    console.print(Text(text, style="dim"), soft_wrap=not console.is_terminal)


@contextmanager
def spinner(text: str) -> Iterator[Callable[[], None]]:
    """Show on standard error that something is under way, until the function yielded is called; silent without a terminal."""
    console = stderr()
    if not console.is_terminal:
        yield lambda: None
        return
    with console.status(text) as status:
        yield status.stop


@contextmanager
def progress_bar() -> Iterator[Report]:
    """Yield `report(stage, done, total)`, which moves a bar on standard error; silent where that is no terminal."""
    console = stderr()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[amount]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=None, amount="")

        def report(stage: str, done: int, total: int) -> None:
            if stage in BYTE_STAGES:
                amount = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB" if total else f"{done / 1e6:.1f} MB"
            else:
                amount = f"{done / total:.0%}" if total else ""
            progress.update(task, description=stage, completed=done, total=total or None, amount=amount)

        yield report
