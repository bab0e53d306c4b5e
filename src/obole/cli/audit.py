"""`obole audit`: what a log of requests says about its traffic. Nothing of it leaves this machine."""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from obole.cli.answering import open_engine
from obole.cli.audit_tables import audit_tables
from obole.cli.bench import check_file
from obole.cli.failures import guarded
from obole.cli.options import DEFAULT_MODEL, Revision, WrongUsage, parse_size, with_options
from obole.cli.terminal import finite, note, print_json, progress_bar
from obole.economics import formats
from obole.economics.reading import Line, lines
from obole.economics.records import Blocks, Reply, Text
from obole.errors import InvalidRequest
from obole.types import Tier

if TYPE_CHECKING:
    from obole.economics.audit import Audit
    from obole.engine.engine import Engine

Entry = tuple[str, Text | Blocks]


class Answers:
    """The answers of a batch by custom_id, in a file that is gone afterwards: there may be more than memory holds."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self.count = self.used = 0
        database.execute("CREATE TABLE answers (key TEXT PRIMARY KEY, answer TEXT)")

    def add(self, reply: Reply) -> None:
        self._database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (reply.key, reply.answer))
        self.count += 1

    def of(self, key: str) -> str | None:
        found = self._database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        self.used += found is not None
        return None if found is None else str(found[0])


@contextmanager
def answer_store() -> Iterator[Answers]:
    with (
        tempfile.TemporaryDirectory(prefix="obole-audit-") as folder,
        closing(sqlite3.connect(f"{folder}/answers")) as database,
    ):
        yield Answers(database)


def parse_tiers(text: str) -> dict[str, int]:
    """Bytes by tier, fastest first, from "device=2GiB,ram=16GiB"."""
    found: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in set(Tier) or name in found:
            raise typer.BadParameter(
                f"{part!r} is not a tier and its size; write device=2GiB,ram=16GiB,ssd=200GiB.", param_hint="--tiers"
            )
        found[name] = parse_size(size)
    return {tier: found[tier] for tier in Tier if tier in found}


def read(files: Sequence[Path], answers: Answers, skipped: list[str] | None, report: Any) -> Iterator[Entry]:
    """Requests with their answers, of all files in turn; files with the answers of a batch are read before all others."""
    total = sum(path.stat().st_size for path in files if path.is_file())
    kinds = {path: "" if str(path) == "-" else _kind(path) for path in files}
    done = 0
    for path in sorted(files, key=lambda path: kinds[path] != formats.ANSWERS):
        start = done

        def moved(count: int, start: int = start) -> None:
            report("reading the log", start + count, total)

        for kind, record in formats.records(lines(path, moved), skipped):
            if isinstance(record, Reply):
                answers.add(record)
                continue
            if isinstance(record, Text) and record.answer is None and record.key is not None:
                record = _with_answer(record, answers.of(record.key))
            yield kind, record
        done += path.stat().st_size if path.is_file() else 0


def _kind(path: Path) -> str:
    """What a file is, by its first line; "" for one that has none."""
    first: Line | None = next(lines(path), None)
    if first is None:
        return ""
    try:
        return formats.kind_of(first.text)
    except formats.Foreign:
        return ""  # told when it is read


def _with_answer(record: Text, answer: str | None) -> Text:
    import dataclasses

    return dataclasses.replace(record, answer=answer)


class Texts:
    """From words to tokens with the engine's tokenizer. `foreign`: conversations that its template does not take."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.foreign = 0

    def prompt(self, prompt: Any, tools: Any) -> Sequence[int]:
        from obole.economics.audit import plain_text
        from obole.engine.prompts import prompt_ids

        engine = self._engine
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            try:
                return prompt_ids(prompt, engine.tokenizer, engine._template, engine.vocab_size, tools=tools)
            except InvalidRequest:  # its roles, or their order, are not what this model was made for
                self.foreign += 1
                prompt = plain_text(prompt)
        if isinstance(prompt, str):
            return self.plain(prompt)
        return tuple(prompt)

    def plain(self, text: str) -> Sequence[int]:
        assert self._engine.tokenizer is not None
        return self._engine.tokenizer.encode(text.encode("utf-8", "replace").decode("utf-8"), special=False)

    def shown(self, tokens: Sequence[int]) -> str:
        assert self._engine.tokenizer is not None
        return self._engine.tokenizer.decode(tokens)


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest("html", f"{path} cannot be written: {error.strerror}.") from None


@guarded
@with_options()
def audit(
    trace: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOG...", help="JSON lines, a batch and its answers, or a trace; .gz and .tar too; -: standard input."
        ),
    ],
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Whose tokens and step costs count. Traces without words need none.")
    ] = DEFAULT_MODEL,
    sample: Annotated[
        float, typer.Option(min=0.0, max=1.0, metavar="X", help="Share of answers followed token by token.")
    ] = 1.0,
    tiers: Annotated[
        str, typer.Option(metavar="SIZES", help="Caches to tell the hits of, such as device=2GiB,ram=16GiB,ssd=200GiB.")
    ] = "",
    kv_bytes: Annotated[
        int | None,
        typer.Option("--kv-bytes", min=1, metavar="N", help="Bytes of a token's keys and values.", show_default="the model's"),
    ] = None,
    most_blocks: Annotated[
        int, typer.Option(min=1000, metavar="N", help="Blocks whose last use is remembered; of more, a sample is.")
    ] = 1 << 20,
    replay: Annotated[
        int, typer.Option(min=0, max=64, metavar="N", help="Answer N prompts of the log really, with each kind of draft.")
    ] = 0,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Pass over lines that are damaged, and count them.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report as one page to FILE.")] = None,
    as_json: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the findings to FILE; - is standard output, in place of the tables."
        ),
    ] = None,
    revision: Revision = None,
    *,
    settings: dict[str, Any],
) -> None:
    """What a log says about its traffic: what drafts could copy and what that brings here, what prefix caches would find, which
    text should stand in front, and what to promise the rest. Prompts stay on this machine; the report quotes a few of them.
    """
    sizes = parse_tiers(tiers)
    check_file(as_json)
    check_file(None if html is None else str(html))
    if settings.get("draft") and not replay:
        raise WrongUsage("draft", "--draft is for prompts that are really run: add --replay N.")
    for path in trace:
        if str(path) != "-" and not path.is_file():
            raise InvalidRequest("trace", f"{path} is no file: name a log.")
    document = findings_of(trace, model, revision, settings, sample, sizes, kv_bytes, most_blocks, replay, skip_bad)
    if html is not None:
        from obole.economics.page import page

        write(html, page(document))
    if as_json == "-":
        print_json(document)
        return
    audit_tables(document)
    if as_json is not None:
        write(Path(as_json), json.dumps(finite(document), indent=1, allow_nan=False) + "\n")


def findings_of(
    trace: Sequence[Path], model: str, revision: str | None, settings: dict[str, Any], sample: float, tiers: dict[str, int],
    kv_bytes: int | None, most_blocks: int, replay: int, skip_bad: bool,
) -> dict[str, Any]:  # fmt: skip
    """Read everything, and say what was found. The model is opened when there are words, and not before."""
    from obole.economics.findings import findings, rerun_json

    skipped: list[str] = []
    with ExitStack() as stack:
        answers = stack.enter_context(answer_store())
        engine: Engine | None = None
        texts: Texts | None = None
        made: Audit | None = None
        report = stack.enter_context(progress_bar())
        for kind, record in read(trace, answers, skipped if skip_bad else None, report):
            if made is None or (isinstance(record, Text) and engine is None):
                if made is not None:
                    raise InvalidRequest(
                        "trace", "There are traces without words and logs with words: audit one kind at a time."
                    )
                if isinstance(record, Text):
                    engine = stack.enter_context(open_engine(model, revision, settings))
                    texts = Texts(engine)
                made = new_audit(engine, texts, most_blocks, sample)
            made.add(kind, record)
        if made is None or not made.requests:
            raise InvalidRequest("trace", empty(answers, skipped))
        if engine is not None:
            kv_bytes = kv_bytes or engine.info.kv_bytes_per_token
            tiers = tiers or default_tiers(engine)
        decode = None if texts is None else texts.shown
        document = {"files": [os.path.basename(path) for path in trace], **findings(made, kv_bytes, tiers, decode, skipped)}
        document["foreign_conversations"] = 0 if texts is None else texts.foreign
        document["answers_without_request"] = answers.count - answers.used
        if replay and engine is not None and made.rerun:
            from obole.economics.rerun import rerun

            modes = ["off", "lookup", *(["draft"] if settings.get("draft") else []), "auto"]
            fitting = [one for one in made.rerun if len(one[0]) + 2 < engine.max_context and one[1] > 1][:replay]
            document["replay"] = rerun_json(rerun(engine, fitting, modes, report)) if fitting else []
    if skipped:
        note(f"skipped: {len(skipped):,} lines; the first: {skipped[0]}")
    return document


def new_audit(engine: Engine | None, texts: Texts | None, most_blocks: int, sample: float) -> Audit:
    from obole.economics.audit import Audit
    from obole.economics.machine import measure

    if engine is None or texts is None:
        return Audit(None, None, None, most_blocks)
    if engine.tokenizer is None:
        raise InvalidRequest("model", "This model has no tokenizer, and the log has words: choose another model.")
    return Audit(measure(engine), texts.prompt, texts.plain, most_blocks, sample)


def default_tiers(engine: Engine) -> dict[str, int]:
    """The engine's own pool, and beside it half of the machine's memory."""
    from obole.engine.machine import total_memory

    return {"device": engine.info.kv_bytes, "ram": total_memory() // 2}


def empty(answers: Answers, skipped: Sequence[str]) -> str:
    if answers.count:
        return "There are answers of a batch without their requests: name the file with the requests too."
    if skipped:
        return f"There is no request in it, only damaged lines; the first: {skipped[0]}"
    return f"The log is empty: name one with {formats.KNOWN}."
