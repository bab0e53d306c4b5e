"""`obole run`: one prompt, one streamed answer, and its receipt."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from obole.cli.answering import Prompt, Screen, ask, open_engine, read_text, was_cancelled
from obole.cli.failures import guarded
from obole.cli.options import DEFAULT_MODEL, MODEL_HELP, JsonFlag, PromptFile, Revision, WrongUsage, with_options
from obole.cli.receipts import RULE, engine_line, receipt_text
from obole.cli.signals import INTERRUPTED
from obole.cli.terminal import note, print_json, terminal_width
from obole.cli.usage import Prices, price_file
from obole.engine.results import EngineInfo, Result
from obole.engine.sampler import is_greedy
from obole.errors import InvalidRequest, ModelError
from obole.prices import PriceList, price
from obole.types import Grammar, SamplingParams


def names_a_model(word: str) -> bool:
    """Whether a lone argument is a model rather than a prompt. A plain word may happen to be the name of a folder."""
    from obole.weights.hub import CATALOGUE, REPOSITORY, holds_model

    if word in CATALOGUE or word.endswith(".gguf") or REPOSITORY.fullmatch(word):
        return True
    if os.path.isdir(word) and os.path.basename(word) == word:
        return holds_model(Path(word))
    return os.path.exists(word)


def sort_arguments(first: str | None, second: str | None, prompt_file: Path | None) -> tuple[str, str | None]:
    """(model, prompt) from the positional arguments; no prompt: it comes from a file or standard input."""
    if first is None:
        return DEFAULT_MODEL, None
    if prompt_file is not None and (second is not None or first == "-"):
        raise WrongUsage("prompt", "There are two prompts: give one as an argument or with --prompt-file, not both.")
    if second is not None:
        return first, second
    if first == "-" or (prompt_file is None and not names_a_model(first)):
        return DEFAULT_MODEL, first
    return first, None


def taken_as_model(word: str | None, model: str) -> str:
    """What to add to an error, if its cause may be that the argument `word` was taken as the model."""
    from obole.weights.hub import CATALOGUE, holds_model

    if word is None or word != model or word in CATALOGUE or word.endswith(".gguf"):
        return ""
    return "" if os.path.isdir(word) and holds_model(Path(word)) else f" ({word!r} was taken as the model.)"


def read_prompt(prompt: str | None, prompt_file: Path | None, remark: str = "") -> tuple[str, bool]:
    """The prompt, and whether it is from a file or standard input. Raises `WrongUsage`, ending in `remark`, if it is empty."""
    text, from_file = prompt or "", False
    if prompt == "-" or (prompt is None and (prompt_file is not None or not sys.stdin.isatty())):
        text, from_file = read_text(prompt_file or Path("-"), "prompt"), True
    if not text:
        what = "The prompt is empty" if from_file or prompt is not None else "There is no prompt"
        raise WrongUsage("prompt", f"{what}: give one as an argument, with --prompt-file, or on standard input.{remark}")
    return text, from_file


def make_prompt(text: str, *, raw: bool, from_file: bool, model: str, has_template: bool) -> Prompt:
    """What the engine is asked: the text itself, or a conversation of one message."""
    if raw:
        return text
    if not has_template:
        raise InvalidRequest("prompt", f"{model} has no chat template; use --raw to have it go on from the prompt as it is.")
    # editors and `echo` end a text with a newline that is not part of the question
    return [{"role": "user", "content": text.removesuffix("\n") if from_file else text}]


def with_files(params: SamplingParams, prediction: Path | None, schema: Path | None, regex: str | None) -> SamplingParams:
    """The parameters with the text that is expected back and the form that the answer must have."""
    if schema is not None and regex is not None:
        raise WrongUsage("regex", "--json-schema and --regex both say what the answer looks like: give one of them.")
    if prediction is not None:
        params = dataclasses.replace(params, prediction=read_text(prediction, "prediction"))
    if schema is not None:
        params = dataclasses.replace(params, grammar=Grammar("json_schema", read_text(schema, "schema")))
    if regex is not None:
        params = dataclasses.replace(params, grammar=Grammar("regex", regex))
    return params


def print_receipts(result: Result, params: SamplingParams, info: EngineInfo, prices: PriceList | None) -> None:
    several = len(result.choices) > 1
    width = terminal_width() or RULE
    for choice in result.choices:
        heading = f"receipt of answer {choice.index + 1}" if several else "receipt"
        note(receipt_text(choice, params, heading, width, prices))
    note(f"engine  {engine_line(info)}")
    if several and is_greedy(params):
        note("All answers are equal, since each takes the likeliest token every time; --temperature 0.8 makes them differ.")


def priced_json(result: Result, prices: PriceList | None) -> dict[str, Any]:
    """The result for --json; with a price list every receipt has its `price`."""
    document = result.to_json()
    if prices is not None:
        documents = document.get("choices", [document])
        for choice, made in zip(result.choices, documents, strict=True):
            made["receipt"]["price"] = price(choice.receipt, prices, prompt=choice.index == 0).to_json()
        document["receipt"] = documents[0]["receipt"]
    return document


@contextmanager
def explained(remark: str) -> Iterator[None]:
    """Add `remark` to errors of the model."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{error}{remark}") from error


@guarded
@with_options(sampling=True)
def run(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=DEFAULT_MODEL)] = None,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="What to ask; - or none: read from standard input.")
    ] = None,
    prompt_file: PromptFile = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, instead of sending it as a chat message.")
    ] = False,
    prediction_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text expected back, mostly unchanged: the answer is drafted from it."),
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The answer is JSON that fits the schema in FILE.")
    ] = None,
    regex: Annotated[str | None, typer.Option(metavar="PATTERN", help="The answer matches PATTERN.")] = None,
    prices: Prices = None,
    as_json: JsonFlag = False,
    revision: Revision = None,
    *,
    params: SamplingParams,
    settings: dict[str, Any],
) -> None:
    """Answer one prompt: text on standard output as it comes, the receipt on standard error below it.

    A single argument is the prompt, unless it names a model. Ctrl-C ends the answer.
    """
    listed = price_file(prices)
    name, prompt = sort_arguments(model, prompt, prompt_file)
    remark = taken_as_model(model, name)
    text, from_file = read_prompt(prompt, prompt_file, remark)
    params = with_files(params, prediction_file, json_schema, regex)
    with explained(remark), open_engine(name, revision, settings) as engine:
        question = make_prompt(text, raw=raw, from_file=from_file, model=name, has_template=engine.has_chat_template)
        if as_json:
            result = ask(engine, question, params, lambda _: None)
            print_json(priced_json(result, listed))
        else:
            with Screen(params.n) as screen:
                result = ask(engine, question, params, screen.show)
            print_receipts(result, params, engine.info, listed)
    if was_cancelled(result):
        raise typer.Exit(INTERRUPTED)
