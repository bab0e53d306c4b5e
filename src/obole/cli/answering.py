"""Open an engine, ask it something, and follow the answer: what `run` and `chat` have in common."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from obole.cli.terminal import progress_bar, spinner, write_text
from obole.engine.results import Delta, Result
from obole.errors import InvalidRequest
from obole.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from obole.engine.engine import Engine

Prompt = str | list[int] | list[dict[str, Any]]


@contextmanager
def open_engine(model: str, revision: str | None, settings: dict[str, Any]) -> Iterator[Engine]:
    """The engine, loaded under a progress bar, and closed at the end."""
    with progress_bar() as report:
        import obole  # here, so that the bar is up while torch is imported

        engine = obole.Engine(model, revision=revision, progress=report, **settings)
    with engine:
        yield engine


def read_text(path: Path, field_name: str) -> str:
    """The text of a file ("-": standard input), exactly as it is. Raises `InvalidRequest` if it is not UTF-8 or not there."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(field_name, f"{name} is not UTF-8 text (byte {error.start}); convert it first.") from None
    except OSError as error:
        raise InvalidRequest(field_name, f"{name} cannot be read: {error.strerror}.") from None


@contextmanager
def interrupts(cancel: Callable[[], None]) -> Iterator[None]:
    """Within, the first Ctrl-C calls `cancel`, so that the engine can finish its step; the second raises at once."""
    pressed = False

    def on_signal(_signal: int, _frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        cancel()

    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.SIG_IGN:  # started in the background: Ctrl-C is for somebody else
        yield
        return
    signal.signal(signal.SIGINT, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def ask(engine: Engine, prompt: Prompt, params: SamplingParams, show: Callable[[Delta], None]) -> Result:
    """Stream an answer, calling `show` for every delta, to its end or until Ctrl-C; the result then says "cancelled"."""
    with engine.stream(prompt, params) as stream:
        try:
            with spinner("reading the prompt") as arrived, interrupts(stream.cancel):
                for delta in stream:
                    arrived()
                    show(delta)
        except KeyboardInterrupt:
            stream.close()
            for delta in stream:  # those that say so
                show(delta)
    assert stream.result is not None  # a stream that has ended or been closed has one
    return stream.result


def was_cancelled(result: Result) -> bool:
    return any(choice.finish_reason is FinishReason.CANCELLED for choice in result.choices)


class Screen:
    """Writes the answers to standard output one after another: the first as it comes, the others when their turn has come."""

    def __init__(self, count: int) -> None:
        self.waiting = [""] * count
        self.done = [False] * count
        self.current = 0
        self.at_line_start = True
        self._heading()

    def show(self, delta: Delta) -> None:
        self.waiting[delta.index] += delta.text
        self.done[delta.index] |= delta.finish_reason is not None
        while self.current < len(self.waiting):
            self._write(self.waiting[self.current])
            self.waiting[self.current] = ""
            if not self.done[self.current]:
                return
            self._next()

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        """End the line, if an error left it open."""
        if not self.at_line_start:
            self._write("\n")

    def _next(self) -> None:
        if not self.at_line_start:
            self._write("\n")
        self.current += 1
        self._heading()

    def _heading(self) -> None:
        if len(self.waiting) > 1 and self.current < len(self.waiting):
            self._write(f"── answer {self.current + 1} of {len(self.waiting)} ──\n")

    def _write(self, text: str) -> None:
        if text:
            write_text(text)
            self.at_line_start = text.endswith("\n")
