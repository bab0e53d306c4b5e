"""The command line: `obole run`, `chat`, `score` and `models`. Nothing here or above imports torch before a model is opened."""

from __future__ import annotations

from typing import Annotated

import typer

from obole import __version__
from obole.cli.chat import chat
from obole.cli.models import models
from obole.cli.run import run
from obole.cli.score import score

app = typer.Typer(
    name="obole",
    help="Run language models on this machine, with a receipt for every answer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # every command reports its own failures (see failures.py)
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"obole {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


for command in (run, chat, score, models):
    app.command()(command)


def main() -> None:
    """The console script. Its exit statuses are listed in `failures.py`."""
    app()
