"""The standard streams as the commands rely on them: there, and with errors of standard output told from all others."""

from __future__ import annotations

import io
import os
import sys


class OutputLost(Exception):
    """Standard output cannot be written. No `OSError`, so that no library takes it for one of its own."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written: {error.strerror or error}.")
        self.error = error


class Output(io.TextIOWrapper):
    """Standard output that raises `OutputLost`."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise OutputLost(error) from None

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise OutputLost(error) from None


class Closed(io.TextIOBase):
    """Stands for a standard output that was closed before the process began."""

    encoding = "utf-8"

    def write(self, _text: str) -> int:
        raise OutputLost(OSError(0, "it is closed"))


def prepare_streams() -> None:
    """Wrap standard output, and put something in the place of streams that are closed.

    Python leaves None for those, and the next file that is opened would get their number.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free: that of the stream
            setattr(sys, name, Closed() if name == "stdout" else os.fdopen(number, "r" if name == "stdin" else "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        out = sys.stdout
        # "strict" would end in a traceback where the locale lacks a character
        errors = "replace" if out.errors == "strict" else out.errors
        sys.stdout = Output(out.buffer, encoding=out.encoding, errors=errors, line_buffering=out.line_buffering)


def silence_stdout() -> None:
    """Let the interpreter's last flush go nowhere: it would fail once more."""
    if not isinstance(sys.stdout, Closed):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
