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

BYTE_STAGES = ("downloading", "unpacking", "verifying", "reading the log")
TOKEN_STAGES = ("scoring", "writing texts")
# A model's text must not drive the terminal (move its cursor, set its title): control characters but tab and newline
CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def stderr() -> Console:
    """A console on today's `sys.stderr`; Rich leaves out colours for NO_COLOR and where there is no terminal."""
    return Console(stderr=True, highlight=False)


def print_json(document: Any) -> None:
    """One line of strict JSON: numbers that JSON lacks (infinities, NaN) become null."""
    sys.stdout.write(json.dumps(finite(document), allow_nan=False) + "\n")
    sys.stdout.flush()


def finite(value: Any) -> Any:
    """The same with null for numbers that JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def write_text(text: str) -> None:
    """Model text to standard output at once: as it is to a file or pipe, with control characters made visible on a terminal."""
    if sys.stdout.isatty():
        text = text.translate(CONTROLS)
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def terminal_width() -> int | None:
    """Columns of the terminal that standard error is; None where it is none."""
    console = stderr()
    return console.width if console.is_terminal else None


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
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield progress.stop


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
            elif stage in TOKEN_STAGES:
                amount = f"{done:,} of {total:,} tokens" if done else f"{total:,} tokens"
                total = total if done else 0  # nothing is known before the first step: no "0 %" that stands still
            else:
                amount = f"{done / total:.0%}" if total else ""
            progress.update(task, description=stage, completed=done, total=total or None, amount=amount)

        yield report
