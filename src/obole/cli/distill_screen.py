"""What `obole distill` shows while it trains, and at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from obole.cli.receipts import plural
from obole.cli.terminal import note, stderr
from obole.distill.recipe import Limits

if TYPE_CHECKING:
    from obole.distill.trainer import Step

MEMORY = 0.95  # of the shown means: they look back about 20 steps
NEWS = 60.0  # seconds between lines where there is no terminal


@dataclass(slots=True)
class Means:
    """Of the last steps, the newest counting most."""

    values: dict[str, float] = field(default_factory=dict)
    steps: int = 0

    def add(self, step: Step) -> None:
        """`slots` and `seconds` are of the step, the others those of `Step`."""
        self.steps += 1
        keep = min(MEMORY, 1 - 1 / self.steps)  # the first few count alike
        for name in ("loss", "accepted", "agreed", "k", "slots", "seconds"):
            self.values[name] = keep * self.values.get(name, 0.0) + (1 - keep) * getattr(step, name)

    @property
    def line(self) -> str:
        """ "loss 0.412 · 5.3 of 9.1 tokens at confidence 0.9, 6.0 agreed · 3,410 tokens/s"."""
        v = self.values
        rate = v["slots"] / v["seconds"]
        accepted = f"{v['accepted']:.1f} of {v['k']:.1f} tokens at confidence 0.9, {v['agreed']:.1f} agreed"
        return f"loss {v['loss']:.3f} · {accepted} · {rate:,.0f} tokens/s"


def seconds_left(limits: Limits, done: int, seconds_per_step: float, elapsed: float) -> float:
    """Until the steps are done or the time is up, whichever comes first."""
    left = (limits.steps - done) * seconds_per_step
    return max(0.0, left if limits.minutes is None else min(left, 60 * limits.minutes - elapsed))


def duration(seconds: float) -> str:
    """ "1:02:33"."""
    return str(timedelta(seconds=round(seconds)))


@dataclass(slots=True)
class Screen:
    """A bar on a terminal, elsewhere a line a minute."""

    limits: Limits
    progress: Progress
    task: Any
    means: Means = field(default_factory=Means)
    started: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)

    def show(self, step: Step) -> None:
        self.means.add(step)
        now = time.monotonic()
        left = duration(seconds_left(self.limits, step.step, self.means.values["seconds"], now - self.started))
        count = f"step {step.step:,} of {self.limits.steps:,}"
        self.progress.update(self.task, completed=step.step, description=count, figures=f"{self.means.line} · {left} left")
        if self.progress.disable and now - self.told >= NEWS:
            self.told = now
            note(f"{count} · {self.means.line} · {left} left")


@contextmanager
def screen(limits: Limits, done: int, speaks: bool) -> Iterator[Screen]:
    """What a training shows after `done` steps, if this process `speaks`."""
    console = stderr()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[figures]}"))
    with Progress(*columns, console=console, transient=True, disable=not (speaks and console.is_terminal)) as progress:
        task = progress.add_task("training", total=limits.steps, completed=done, figures="")
        yield Screen(limits, progress, task)


def summary(document: dict[str, Any]) -> str:
    """Lines for a person from the object that --json prints."""
    lines = [("steps", f"{document['steps']:,} ({document['ended']})")]
    if document["last"] is not None:
        last = document["last"]
        lines += [
            ("loss", f"{last['loss']:.4f}"),
            ("accepted", f"{last['accepted']:.2f} of {last['k']:.1f} tokens at confidence 0.9"),
            ("agreed", f"{last['agreed']:.2f} of {last['k']:.1f} tokens are the teacher's"),
        ]
    spent = f"{plural(document['slots'], 'token')} in {duration(document['seconds'])}"
    lines += [("computed", spent), ("texts", f"{document['rows']:,} rows, {document['short']:,} texts too short")]
    lines += [("model", document["model"] or "not written"), ("state", document["state"])]
    return "\n".join(f"{name:<10}{value}" for name, value in lines)
