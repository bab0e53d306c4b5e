"""`obole bench`: measures this machine, the kernels and whole steps."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from obole.cli import bench_tables as tables
from obole.cli.answering import open_engine
from obole.cli.failures import guarded
from obole.cli.options import DEFAULT_MODEL, MODEL_HELP, Revision, with_options
from obole.cli.terminal import finite, print_json, progress_bar
from obole.errors import InvalidRequest

if TYPE_CHECKING:
    from obole.engine.engine import Engine

COMMAND: ContextVar[tuple[str, ...]] = ContextVar("COMMAND", default=())  # the command that is run, with its options
NOT_SETTINGS = ("--json", "--html", "--baseline", "--api-key")  # what a benchmark can be repeated without


class Benchmarks(TyperGroup):
    """The group of commands; it notes which one is run, so that its document can say so."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        COMMAND.set(settings_of(args))
        return list(super().parse_args(ctx, args))


bench = typer.Typer(
    name="bench",
    cls=Benchmarks,
    help="Measure this machine, the kernels and whole steps. All tables give medians (lowest–highest).",
    no_args_is_help=True,
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write a JSON document to FILE; - is standard output, in place of the table."),
]
Repeat = Annotated[int, typer.Option("--repeat", metavar="N", min=1, help="Repetitions of each measurement.")]
PromptTokens = Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of the prompt, chosen at random.")]
OutputTokens = Annotated[int, typer.Option(min=1, metavar="N", help="Tokens decoded by each sequence.")]
Sequences = Annotated[str, typer.Option(metavar="N,N,...", help="Sequences at once.")]
Context = Annotated[int, typer.Option(min=1, metavar="N", help="Tokens before the decoded ones.")]


def counts(option: str, text: str, least: int) -> list[int]:
    """Whole numbers of at least `least` from "1,4,16"."""
    found = [int(part) if re.fullmatch(r"\d+", part) else -1 for part in text.replace(" ", "").split(",")]
    if min(found) < least:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers from {least}, such as 1,16.", param_hint=option)
    return found


def settings_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """A command line without the names of files for results, and without keys."""
    kept: list[str] = []
    left = iter(arguments)
    for one in left:
        if one in NOT_SETTINGS:
            next(left, None)
        elif one.partition("=")[0] not in NOT_SETTINGS:
            kept.append(one)
    return tuple(kept)


def check_file(as_json: str | None) -> None:
    """Refuse before anything is measured what cannot be written afterwards."""
    if as_json in (None, "-"):
        return
    path = Path(str(as_json))
    folder = path.parent
    writable = os.access(path, os.W_OK) if path.exists() else folder.is_dir() and os.access(folder, os.W_OK)
    if path.is_dir() or not writable:
        raise InvalidRequest("json", f"{path} cannot be written: name a file in a folder that is there and may be written to.")


def show(as_json: str | None, document: dict[str, Any], table: Callable[[], None]) -> None:
    """The table, unless the document takes its place on standard output; and the document, with the command that it is of,
    to its file."""
    document = {**document, "command": list(COMMAND.get())}
    if as_json == "-":
        print_json(document)
        return
    print(tables.heading(document) + "\n")
    table()
    if as_json is not None:
        try:
            Path(as_json).write_text(json.dumps(finite(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequest("json", f"{as_json} cannot be written: {error.strerror}.") from None


def facts_of(engine: Engine, benchmark: str) -> dict[str, Any]:
    """What every document about a model begins with: the machine and the model."""
    from obole.bench.machine import this_machine
    from obole.bench.report import header, model_facts

    return {**header(benchmark, this_machine(), engine.info.kernels, engine.info.threads), **model_facts(engine.info)}


def document_of(engine: Engine, benchmark: str, repeat: int, rows: Iterable[Any], **more: Any) -> dict[str, Any]:
    """What --json prints: the machine, the model, further results by name, and a row for each measurement."""
    from obole.bench.report import step_cost, to_json

    facts = {**facts_of(engine, benchmark), "step_cost": step_cost(engine.step_cost)}
    results = {name: to_json(value) for name, value in more.items()}
    return {**facts, "repeat": repeat, **results, "rows": [to_json(row) for row in rows]}


@bench.command("latency")
@guarded
@with_options()
def latency(
    model: Model = DEFAULT_MODEL,
    prompt_tokens: PromptTokens = 512,
    output_tokens: OutputTokens = 128,
    context: Annotated[
        str, typer.Option(metavar="N,N,...", help="Tokens before the decoded ones; 0: a prompt of a single token.")
    ] = "0,2048",
    repeat: Repeat = 3,
    as_json: JsonFile = None,
    revision: Revision = None,
    *,
    settings: dict[str, Any],
) -> None:
    """One sequence by itself: how fast it reads a prompt and decodes, and how near that is to the read bandwidth."""
    contexts = counts("--context", context, 0)
    check_file(as_json)
    with open_engine(model, revision, settings) as engine, progress_bar() as report:
        from obole.bench.latency import latency as measure

        rows = measure(engine, prompt_tokens, output_tokens, contexts, repeat, report)
        document = document_of(engine, "latency", repeat, rows)
    show(as_json, document, lambda: tables.latency_table(rows))


@bench.command("throughput")
@guarded
@with_options()
def throughput(
    model: Model = DEFAULT_MODEL,
    sequences: Sequences = "1,4,16,64",
    prompt_tokens: PromptTokens = 128,
    output_tokens: OutputTokens = 64,
    repeat: Repeat = 3,
    as_json: JsonFile = None,
    revision: Revision = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Many sequences at once: tokens per second, and what a step costs against that of one sequence."""
    several = counts("--sequences", sequences, 1)
    check_file(as_json)
    with open_engine(model, revision, settings) as engine, progress_bar() as report:
        from obole.bench.throughput import throughput as measure

        rows = measure(engine, several, prompt_tokens, output_tokens, repeat, report)
        document = document_of(engine, "throughput", repeat, rows)
    show(as_json, document, lambda: tables.throughput_table(rows))


@bench.command("kernels")
@guarded
def kernels(
    kinds: Annotated[
        str | None, typer.Option(metavar="KIND,...", help="Encodings of weights.", show_default="all quantised ones and BF16")
    ] = None,
    rows: Annotated[str, typer.Option(metavar="N,N,...", help="Rows of the activations.")] = "1,2,4,8,16,64,128",
    shape: Annotated[str, typer.Option(metavar="OUTxIN", help="Outputs and inputs of the products.")] = "4864x896",
    repeat: Repeat = 3,
    as_json: JsonFile = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Processor threads.", show_default="the processors at hand", envvar="OBOLE_THREADS"),
    ] = None,
    implementation: Annotated[
        str,
        typer.Option("--kernels", help="Implementation of the operations: auto, native or reference.", envvar="OBOLE_KERNELS"),
    ] = "auto",
) -> None:
    """Each operation by itself. Weights are read from memory, more of them than the caches hold; activations are cached."""
    numbers = counts("--rows", rows, 1)
    sides = re.fullmatch(r"(\d+)x(\d+)", shape)
    if not sides:
        raise typer.BadParameter(f"{shape!r} is not a shape; write it like 4864x896.", param_hint="--shape")
    check_file(as_json)
    with progress_bar() as report:
        from obole.bench.kernels import DEFAULT_KINDS, Shape
        from obole.bench.kernels import kernels as measure
        from obole.bench.machine import this_machine
        from obole.bench.report import header, to_json
        from obole.engine.machine import usable_processors
        from obole.kernels.dispatch import load_ops

        ops = load_ops(implementation, threads or usable_processors())
        names = DEFAULT_KINDS if kinds is None else tuple(kinds.upper().replace(" ", "").split(","))
        found = measure(ops, names, numbers, Shape(int(sides[1]), int(sides[2])), repeat, report=report)
        document = {
            **header("kernels", this_machine(), ops.name, ops.threads),
            "repeat": repeat,
            "rows": [to_json(row) for row in found],
        }
    show(as_json, document, lambda: tables.kernel_table(found))


@bench.command("roofline")
@guarded
@with_options()
def roofline(
    model: Model = DEFAULT_MODEL,
    sequences: Sequences = "1,16,64",
    context: Context = 64,
    output_tokens: OutputTokens = 32,
    prompt_tokens: PromptTokens = 512,
    repeat: Repeat = 3,
    as_json: JsonFile = None,
    revision: Revision = None,
    *,
    settings: dict[str, Any],
) -> None:
    """What this machine can do at most, and how far each kind of step is from it."""
    several = counts("--sequences", sequences, 1)
    check_file(as_json)
    with open_engine(model, revision, settings) as engine, progress_bar() as report:
        from obole.bench.roofline import roofline as measure

        found = measure(engine, several, context, output_tokens, prompt_tokens, repeat, report)
        roofs = {"one_thread": found.one_thread, "all_threads": found.all_threads}
        document = document_of(engine, "roofline", repeat, found.rows, **roofs)
    show(as_json, document, lambda: tables.roofline_table(found))


@bench.command("overhead")
@guarded
@with_options()
def overhead(
    model: Model = DEFAULT_MODEL,
    sequences: Sequences = "1,16",
    context: Context = 64,
    output_tokens: OutputTokens = 64,
    repeat: Repeat = 3,
    as_json: JsonFile = None,
    revision: Revision = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Where the time of a decoding step goes: which kernels, and everything around them."""
    several = counts("--sequences", sequences, 1)
    check_file(as_json)
    with open_engine(model, revision, settings) as engine, progress_bar() as report:
        from obole.bench.overhead import overhead as measure

        rows = measure(engine, several, context, output_tokens, repeat, report)
        document = document_of(engine, "overhead", repeat, rows)
    show(as_json, document, lambda: tables.overhead_table(rows))
