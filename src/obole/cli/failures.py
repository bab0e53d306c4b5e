"""What the person at the terminal sees when something goes wrong, and the exit statuses."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import typer
from rich.text import Text

from obole.cli.options import WrongUsage, at_fault, in_option_names
from obole.cli.signals import INTERRUPTED
from obole.cli.streams import OutputLost, silence_stdout
from obole.cli.terminal import print_json, stderr
from obole.errors import OboleError

FAILURE = 1
USAGE = 2
BROKEN_PIPE = 141  # 128 + SIGPIPE

UsageError: type = typer.BadParameter.__base__  # type: ignore[assignment]  # what the parser raises


def error_json(message: str, field: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "field": field}}


def show_error(message: str, field: str | None, hint: str, *, as_json: bool) -> None:
    """One sentence on standard error (a hint goes on a line of its own) or, with `as_json`, one object on standard output."""
    if as_json:
        print_json(error_json(message, field))
        return
    stderr().print(Text.assemble(("error:", "bold red"), " ", message), soft_wrap=True)
    if hint:
        stderr().print(Text(hint, style="dim"), soft_wrap=True)


def report(error: Exception, *, as_json: bool) -> None:
    """Show an error that a command raised, in the names of the options."""
    if isinstance(error, OboleError):
        show_error(in_option_names(error), at_fault(error), "", as_json=as_json)
    else:
        known = f"Unexpected {type(error).__name__}: {error} (set OBOLE_DEBUG=1 to see where it came from)."
        show_error(known, None, "", as_json=as_json)


def report_usage(error: Any, *, as_json: bool) -> None:
    """Show an error of the parser, which speaks of the command line already."""
    message = error.format_message().strip()
    hint = f"{error.ctx.command_path} --help lists the options." if error.ctx is not None else ""
    parameter = getattr(error, "param", None)
    option = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    field = parameter.name if parameter is not None else option or None
    show_error(message if message[-1] in ".?!" else message + ".", field, hint, as_json=as_json)


def settle(error: BaseException, *, as_json: bool) -> int:
    """Report what ended a command; the exit status. OBOLE_DEBUG=1 lets unexpected errors through."""
    if isinstance(error, typer.Exit):
        return int(error.exit_code)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        if as_json:
            print_json(error_json("Cancelled."))
        return INTERRUPTED
    if isinstance(error, OutputLost | BrokenPipeError):
        return output_lost(error.error if isinstance(error, OutputLost) else error)
    if isinstance(error, UsageError):
        if error.format_message().strip():  # type: ignore[attr-defined]
            report_usage(error, as_json=as_json)
            return USAGE
        return 0  # a command that needs others was given none: the parser has shown its help
    if not isinstance(error, Exception) or (os.environ.get("OBOLE_DEBUG") == "1" and not isinstance(error, OboleError)):
        raise error
    report(error, as_json=as_json)
    return USAGE if isinstance(error, WrongUsage) else FAILURE


def output_lost(error: OSError) -> int:
    """A reader that has left is no news; anything else is."""
    silence_stdout()
    if error.errno == errno.EPIPE:
        return BROKEN_PIPE
    show_error(str(OutputLost(error)), None, "", as_json=False)
    return FAILURE


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether a command line that could not be parsed asks for JSON on standard output."""
    options = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    if options[:1] in (["bench"], ["audit"], ["price"], ["leak"]):  # there it names a file, and - is standard output
        return "--json=-" in options or any(pair == ("--json", "-") for pair in pairwise(options))
    return "--json" in options


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn what a Typer command raises into a sentence and an exit status."""

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        as_json = values.get("as_json") in (True, "-")  # a flag or, where JSON can go to a file, its name
        try:
            command(**values)
            sys.stdout.flush()  # here, where a reader that has left is known for what it is
        except BaseException as error:
            raise typer.Exit(settled(error, as_json=as_json)) from None

    return wrapper


def settled(error: BaseException, *, as_json: bool) -> int:
    """`settle`, also where the report itself cannot be written."""
    try:
        return settle(error, as_json=as_json)
    except OutputLost as lost:
        return output_lost(lost.error)
