"""Open an engine, ask it something, and follow the answer: what `run` and `chat` have in common."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from obole.cli import signals
from obole.cli.receipts import plural, size
from obole.cli.terminal import progress_bar, spinner, write_text
from obole.engine.results import Delta, Result
from obole.errors import InvalidRequest
from obole.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from obole.engine.engine import Engine

Prompt = str | list[int] | list[dict[str, Any]]

MOST_READ = 1 << 30  # bytes of a text: beyond, it is a device, or the wrong file


@contextmanager
def open_engine(model: str, revision: str | None, settings: dict[str, Any]) -> Iterator[Engine]:
    """The engine, loaded under a progress bar, and closed at the end."""
    with progress_bar() as report:
        with signals.later():
            import obole

            kind = obole.Engine  # here, so that the bar is up while torch is imported
        engine = kind(model, revision=revision, progress=report, **settings)
    with engine:
        yield engine


def read_text(path: Path, field_name: str) -> str:
    """The text of a file ("-": standard input), exactly as it is.

    Raises `InvalidRequest` if it is not there, not UTF-8, or larger than a text can be.
    """
    name = "standard input" if str(path) == "-" else str(path)
    try:
        with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
            data = file.read(MOST_READ + 1)
        if len(data) > MOST_READ:
            raise InvalidRequest(field_name, f"{name} has more than {size(MOST_READ)}: no text for a model is so long.")
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


def check_length(prompt: Prompt, max_context: int) -> None:
    """Refuse what cannot fit into the context, however its text becomes tokens. Raises `InvalidRequest`."""
    from obole.engine.prompts import oversize

    texts = [prompt] if isinstance(prompt, str) else [m["content"] for m in prompt if isinstance(m, dict)]
    count = oversize(texts, max_context)
    if count is not None:
        holds = plural(max_context, "token")
        raise InvalidRequest(
            "prompt", f"The prompt has {size(count)}, far more than the context of {holds} can hold; shorten it."
        )


def ask(engine: Engine, prompt: Prompt, params: SamplingParams, show: Callable[[Delta], None]) -> Result:
    """Stream an answer, calling `show` for every delta, to its end or until Ctrl-C; the result then says "cancelled"."""
    check_length(prompt, engine.max_context)
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
