"""What the person at the terminal sees when something goes wrong, and the exit statuses."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import typer
from rich.text import Text

from obole.cli.terminal import print_json, stderr
from obole.errors import OboleError

FAILURE = 1
USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE = 141  # 128 + SIGPIPE


def error_json(message: str, field: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "field": field}}


def report(error: Exception, *, as_json: bool) -> None:
    """One sentence on standard error or, with `as_json`, one object on standard output."""
    if isinstance(error, OboleError):
        message = str(error)
    else:
        message = f"Unexpected {type(error).__name__}: {error} (set OBOLE_DEBUG=1 to see where it came from)."
    if as_json:
        print_json(error_json(message, getattr(error, "field", None)))
    else:
        stderr().print(Text.assemble(("error:", "bold red"), " ", message), soft_wrap=True)


def silence_stdout() -> None:
    """Let the interpreter's last flush go nowhere: whoever read standard output has left."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn what a Typer command raises into a sentence and an exit status; OBOLE_DEBUG=1 lets it through."""

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        as_json = bool(values.get("as_json"))
        try:
            command(**values)
            sys.stdout.flush()  # here, where a reader that has left is known for what it is
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            if as_json:
                print_json(error_json("Cancelled."))
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            silence_stdout()
            raise typer.Exit(BROKEN_PIPE) from None
        except Exception as error:
            if os.environ.get("OBOLE_DEBUG") == "1":
                raise
            report(error, as_json=as_json)
            raise typer.Exit(FAILURE) from None

    return wrapper
