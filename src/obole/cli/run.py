"""`obole run`: one prompt, one streamed answer, and its receipt."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from obole.cli.answering import Prompt, Screen, ask, open_engine, read_text, was_cancelled
from obole.cli.failures import INTERRUPTED, guarded
from obole.cli.options import DEFAULT_MODEL, MODEL_HELP, JsonFlag, PromptFile, Revision, with_options
from obole.cli.receipts import engine_line, receipt_text
from obole.cli.terminal import note, print_json
from obole.engine.results import EngineInfo, Result
from obole.errors import InvalidRequest
from obole.types import SamplingParams


def names_a_model(word: str) -> bool:
    """Whether a lone argument is a model rather than a prompt."""
    from obole.weights.hub import CATALOGUE, REPOSITORY

    return word in CATALOGUE or word.endswith(".gguf") or bool(REPOSITORY.fullmatch(word)) or os.path.exists(word)


def sort_arguments(first: str | None, second: str | None, prompt_file: Path | None) -> tuple[str, str | None]:
    """(model, prompt) from the positional arguments; no prompt: it comes from a file or standard input."""
    if first is None:
        return DEFAULT_MODEL, None
    if prompt_file is not None and (second is not None or first == "-"):
        raise typer.BadParameter("give the prompt as an argument or with --prompt-file, not both.")
    if second is not None:
        return first, second
    if first == "-" or (prompt_file is None and not names_a_model(first)):
        return DEFAULT_MODEL, first
    return first, None


def read_prompt(prompt: str | None, prompt_file: Path | None) -> tuple[str, bool]:
    """The prompt, and whether it is from a file or standard input."""
    if prompt is not None and prompt != "-":
        return prompt, False
    if prompt is None and prompt_file is None and sys.stdin.isatty():
        raise typer.BadParameter("there is no prompt: give one as an argument, with --prompt-file, or on standard input.")
    return read_text(prompt_file or Path("-"), "prompt"), True


def make_prompt(text: str, *, raw: bool, from_file: bool, model: str, has_template: bool) -> Prompt:
    """What the engine is asked: the text itself, or a conversation of one message."""
    if raw:
        return text
    if not has_template:
        raise InvalidRequest("prompt", f"{model} has no chat template; use --raw to have it go on from the prompt as it is.")
    # editors and `echo` end a text with a newline that is not part of the question
    return [{"role": "user", "content": text.removesuffix("\n") if from_file else text}]


def print_receipts(result: Result, info: EngineInfo) -> None:
    for choice in result.choices:
        note(receipt_text(choice, "receipt" if len(result.choices) == 1 else f"receipt of answer {choice.index + 1}"))
    note(f"engine  {engine_line(info)}")


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
    as_json: JsonFlag = False,
    revision: Revision = None,
    *,
    params: SamplingParams,
    settings: dict[str, Any],
) -> None:
    """Answer one prompt: text on standard output as it comes, the receipt on standard error below it.

    A single argument is the prompt, unless it names a model. Ctrl-C ends the answer.
    """
    name, prompt = sort_arguments(model, prompt, prompt_file)
    text, from_file = read_prompt(prompt, prompt_file)
    if not text:
        raise InvalidRequest("prompt", "The prompt is empty; write something for the model to answer or go on from.")
    with open_engine(name, revision, settings) as engine:
        question = make_prompt(text, raw=raw, from_file=from_file, model=name, has_template=engine.has_chat_template)
        if as_json:
            result = ask(engine, question, params, lambda _: None)
            print_json(result.to_json())
        else:
            with Screen(params.n) as screen:
                result = ask(engine, question, params, screen.show)
            print_receipts(result, engine.info)
    if was_cancelled(result):
        raise typer.Exit(INTERRUPTED)
