"""The commands of `obole` as one command line. Torch is imported when a model is opened."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from obole import __version__
from obole.cli import bench_cache, bench_gate, bench_mtp, bench_serve, bench_speculation
from obole.cli.audit import audit
from obole.cli.bench import bench
from obole.cli.chat import chat
from obole.cli.distill import distill
from obole.cli.failures import settled, wants_json
from obole.cli.leak import leak
from obole.cli.models import models
from obole.cli.price import price
from obole.cli.run import run
from obole.cli.score import score
from obole.cli.serve import serve
from obole.cli.top import top
from obole.cli.usage import usage
from obole.cli.verify import verify


def polish(command: Any, ctx: Any) -> None:
    """Help as one expects it: paragraphs that are filled, flags without a type, arguments without a second one."""
    if command.help:
        command.help = "\n\n".join(" ".join(part.split()) for part in command.help.split("\n\n"))
    for parameter in command.get_params(ctx):
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda **_: None  # the name says it
        elif parameter.is_flag:
            parameter.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        polish(inner, ctx)


class CommandLine(TyperGroup):
    """The commands, with errors of any kind reported in one way (see `failures.py`)."""

    def main(self, args: Any = None, prog_name: str | None = None, *rest: Any, **options: Any) -> Any:
        arguments = sys.argv[1:] if args is None else list(args)
        try:
            status = super().main(arguments, prog_name or "obole", *rest, **{**options, "standalone_mode": False})
            sys.stdout.flush()
        except BaseException as error:
            status = settled(error, as_json=wants_json(arguments))
        sys.exit(status if isinstance(status, int) else 0)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        polish(self, ctx)
        super().format_help(ctx, formatter)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            polish(command, ctx)
        return command


app = typer.Typer(
    name="obole",
    cls=CommandLine,
    help="Run language models on this machine, with a receipt for every answer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
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


for command in (run, chat, serve, top, score, models, verify, usage, price, audit, leak, distill):
    app.command()(command)
bench_cache.add_to(bench)
bench_speculation.add_to(bench)
bench.command()(bench_mtp.mtp)
bench.command()(bench_serve.serve)
bench.command()(bench_gate.gate)
app.add_typer(bench)


def command_line() -> Any:
    """The parser of the whole command line, ready for `main()`."""
    return typer.main.get_command(app)
