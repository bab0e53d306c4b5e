"""The commands of `obole bench` that compare answers with drafts and without, and `obole bench lookup`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from obole.cli import speculation_tables as tables
from obole.cli.answering import open_engine, read_text
from obole.cli.bench import JsonFile, Model, Repeat, check_file, counts, document_of, show
from obole.cli.failures import FAILURE, guarded
from obole.cli.options import DEFAULT_MODEL, Revision, with_options
from obole.cli.receipts import plural
from obole.cli.terminal import progress_bar, stderr

if TYPE_CHECKING:
    from obole.bench.samples import Report
    from obole.bench.speculation import Question, SpeculationRow
    from obole.bench.workloads import Task
    from obole.engine.engine import Engine

    Tasks = Callable[[Engine], list[Task]]
    Measure = Callable[[Engine, Sequence[Question], int, Report], list[SpeculationRow]]  # questions, repetitions

Sequences = Annotated[int, typer.Option(min=1, metavar="N", help="Requests answered at once.")]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, metavar="N", help="Only the first N requests.", show_default="all")
]
OutputTokens = Annotated[
    int | None,
    typer.Option(min=2, metavar="N", help="Most tokens of an answer.", show_default="what the requests need"),
]


def compare(
    benchmark: str,
    source: tuple[str, str | None, dict[str, Any]],
    tasks_for: Tasks,
    measure: Measure,
    output_tokens: int | None,
    repeat: int,
    as_json: str | None,
) -> None:
    """Open the model (`source`: its name, revision and settings), measure, and show; exit status 1 if any answer differs."""
    check_file(as_json)
    with open_engine(*source) as engine, progress_bar() as report:
        from obole.bench import inside
        from obole.bench.speculation import questions

        asked, left_out = questions(engine, tasks_for(engine), output_tokens)
        rows = measure(engine, asked, repeat, report)
        document = document_of(engine, benchmark, repeat, rows)
        document |= {"speculate": inside.speculation(engine), "draft": source[2].get("draft"), "left_out": left_out}
    show(as_json, document, lambda: tables.speculation_table(rows))
    if left_out:
        stderr().print(f"left out, since the context cannot hold them: {plural(left_out, 'request')}", soft_wrap=True)
    if not all(row.identical for row in rows):
        different = ", ".join(row.kind for row in rows if not row.identical)
        message = f" answers with drafts are not those without ({different}); see obole verify."
        stderr().print(Text.assemble(("error:", "bold red"), message), soft_wrap=True)
        raise typer.Exit(FAILURE)


def in_groups(sequences: int) -> Measure:
    """The plain comparison, of so many requests at once."""

    def measure(engine: Engine, asked: Sequence[Question], repeat: int, report: Report) -> list[SpeculationRow]:
        from obole.bench.speculation import speculation

        return speculation(engine, asked, sequences, repeat, report)

    return measure


def edits(engine: Engine) -> list[Task]:
    from obole.bench import speculation, workloads

    return workloads.edits(speculation.counter(engine), engine.max_context)


def documents(_engine: Engine) -> list[Task]:
    from obole.bench import workloads

    return workloads.documents()


def extractions(_engine: Engine) -> list[Task]:
    from obole.bench import workloads

    return workloads.extractions()


def stories(_engine: Engine) -> list[Task]:
    from obole.bench import workloads

    return workloads.stories()


WORKLOADS: Mapping[str, tuple[Tasks, str]] = {
    "edit": (edits, "Drafts for edits: files of Python's library with a name, a line, type hints or the form changed."),
    "rag": (documents, "Drafts for questions about documents in the prompt, which are topics of Python's help."),
    "extract": (extractions, "Drafts for fields taken from a text and written as JSON."),
    "prose": (stories, "Drafts for stories, which have nothing to copy: what they cost where they cannot gain."),
}


def comparison(benchmark: str, tasks_for: Tasks) -> Callable[..., None]:
    """The command that compares one workload."""

    @guarded
    @with_options()
    def command(
        model: Model = DEFAULT_MODEL,
        limit: Limit = None,
        sequences: Sequences = 1,
        output_tokens: OutputTokens = None,
        repeat: Repeat = 3,
        as_json: JsonFile = None,
        revision: Revision = None,
        *,
        settings: dict[str, Any],
    ) -> None:
        def tasks(engine: Engine) -> list[Task]:
            return tasks_for(engine)[:limit]

        compare(benchmark, (model, revision, settings), tasks, in_groups(sequences), output_tokens, repeat, as_json)

    return command


@guarded
@with_options()
def specbench(
    model: Model = DEFAULT_MODEL,
    category: Annotated[
        str | None, typer.Option("--category", metavar="NAME", help="Only questions of this category.", show_default="all")
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="Only the first N of each category.", show_default="all")
    ] = None,
    sequences: Sequences = 1,
    output_tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Most tokens of an answer.")] = 128,
    repeat: Repeat = 3,
    as_json: JsonFile = None,
    revision: Revision = None,
    *,
    file: Annotated[Path, typer.Option("--file", metavar="FILE", help="question.jsonl of Spec-Bench.")],
    settings: dict[str, Any],
) -> None:
    """Drafts for the questions of Spec-Bench, their first turns, by category."""

    def tasks(_engine: Engine) -> list[Task]:
        from obole.bench.workloads import spec_bench

        return spec_bench(text, category, limit)

    text = read_text(file, "file")
    compare("specbench", (model, revision, settings), tasks, in_groups(sequences), output_tokens, repeat, as_json)


@guarded
@with_options()
def repeat(
    model: Model = DEFAULT_MODEL,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="Different requests.")] = 20,
    output_tokens: OutputTokens = None,
    repeat: Repeat = 3,
    as_json: JsonFile = None,
    revision: Revision = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Drafts for requests that were asked before, with others in between: what the memory of a tenant is worth."""

    def tasks(_engine: Engine) -> list[Task]:
        from obole.bench.workloads import mixture

        return mixture(requests)

    def measure(engine: Engine, asked: Sequence[Question], repeat: int, report: Report) -> list[SpeculationRow]:
        from obole.bench.speculation import asked_again

        return asked_again(engine, asked, repeat, report)

    compare("repeat", (model, revision, settings), tasks, measure, output_tokens, repeat, as_json)


@guarded
def lookup(
    contexts: Annotated[
        str, typer.Option(metavar="N,N,...", help="Tokens that the index has read before.")
    ] = "4096,16384,65536,262144,1048576",
    repeat: Repeat = 3,
    as_json: JsonFile = None,
) -> None:
    """What finding a draft costs: one token more in the index of a long text, against a scan over the text. Needs no model."""
    lengths = counts("--contexts", contexts, 1)
    check_file(as_json)
    with progress_bar() as report:
        from obole.bench.lookup import lookup as measure
        from obole.bench.machine import this_machine
        from obole.bench.report import header, to_json

        rows = measure(lengths, repeat, report)
        document = {
            **header("lookup", this_machine(), "native", 1),
            "repeat": repeat,
            "rows": [to_json(row) for row in rows],
        }
    show(as_json, document, lambda: tables.lookup_table(rows))


def add_to(bench: typer.Typer) -> None:
    """Make all of them commands of `obole bench`."""
    for name, (tasks_for, about) in WORKLOADS.items():
        bench.command(name, help=about)(comparison(name, tasks_for))
    for command in (specbench, repeat, lookup):
        bench.command()(command)
