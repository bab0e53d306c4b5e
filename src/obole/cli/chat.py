"""`obole chat`: a conversation in the terminal that keeps its history, and with it its cache."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from obole.cli.answering import Screen, ask, open_engine, was_cancelled
from obole.cli.failures import FAILURE, guarded, report
from obole.cli.options import DEFAULT_MODEL, MODEL_HELP, JsonFlag, Revision, WrongUsage, with_options
from obole.cli.receipts import chat_line, engine_line, price_text
from obole.cli.run import priced_json
from obole.cli.terminal import note, print_json
from obole.cli.usage import Prices, price_file
from obole.engine.results import Result
from obole.errors import InvalidRequest, OboleError
from obole.prices import PriceList
from obole.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from obole.engine.engine import Engine

COMMANDS = {
    "/help": "list these commands",
    "/reset": "forget the conversation (the system message stays)",
    "/save FILE": "write the conversation to FILE as JSON",
    "/exit": "leave (as do Ctrl-C and Ctrl-D)",
}
HELP = "\n".join([*(f"{name:<12}{about}" for name, about in COMMANDS.items()), "//text      send /text as a message"])

FULL = " · the context is full: /reset, or start with a larger --max-context"


@dataclass(slots=True)
class Turn:
    question: str
    answer: str
    cancelled: bool


@dataclass(slots=True)
class Conversation:
    """What was said so far. A turn joins it only when there is an answer, so that a failure leaves it as it was."""

    system: str | None = None
    turns: list[Turn] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[dict[str, Any]]:
        """The messages for the chat template, `question` last."""
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        for turn in self.turns:
            messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
        return messages + ([{"role": "user", "content": question}] if question is not None else [])

    def document(self) -> dict[str, Any]:
        """The form of `/save`: the messages, answers that were cut short marked `"cancelled": true`."""
        messages = self.messages()
        answers = [m for m in messages if m["role"] == "assistant"]
        for message, turn in zip(answers, self.turns, strict=True):
            if turn.cancelled:
                message["cancelled"] = True
        return {"messages": messages}


class Chat:
    def __init__(
        self, engine: Engine, params: SamplingParams, system: str | None, prices: PriceList | None, *, as_json: bool
    ) -> None:
        self.engine = engine
        self.params = params
        self.conversation = Conversation(system)
        self.prices = prices
        self.as_json = as_json
        self.failed = False

    def loop(self) -> None:
        """Read and answer lines until /exit, Ctrl-D, or Ctrl-C at the prompt."""
        while (line := read_line()) is not None:
            try:
                if not self.take(line):
                    return
            except OboleError as error:
                self.failed = True
                report(error, as_json=self.as_json)
            except KeyboardInterrupt:  # before the answer had begun, or a second time during it
                note("Cancelled. The message is not kept, the conversation is.")

    def take(self, line: str) -> bool:
        """Carry out a command or answer a message; False to leave."""
        command, _, argument = line.strip().partition(" ")
        if not command:
            return True
        if not command.startswith("/"):
            self.answer(line)
        elif command.startswith("//"):
            self.answer(line.strip()[1:])
        elif command == "/exit":
            return False
        elif command == "/help":
            note(HELP)
        elif command == "/reset":
            self.conversation.turns.clear()
            note("The conversation starts anew.")
        elif command == "/save":
            self.save(argument.strip())
        else:
            raise InvalidRequest("command", f"There is no command {command}; /help lists them, and // sends a text with a /.")
        return True

    def save(self, name: str) -> None:
        if not name:
            raise InvalidRequest("command", "/save needs the name of a file.")
        try:
            Path(name).write_text(json.dumps(self.conversation.document(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequest("command", f"{name} cannot be written: {error.strerror}.") from None
        note(f"Saved to {name}.")

    def answer(self, question: str) -> None:
        prompt = self.conversation.messages(question)
        try:
            if self.as_json:
                result = ask(self.engine, prompt, self.params, lambda _: None)
                print_json(priced_json(result, self.prices))
            else:
                with Screen(1) as screen:
                    result = ask(self.engine, prompt, self.params, screen.show)
                charge = "" if self.prices is None else f" · {price_text(result.choices[0], self.prices)}"
                note(f"{chat_line(result.choices[0])}{charge}{why_cut(result, self.engine.max_context)}")
        except InvalidRequest as error:
            if error.field != "prompt" or not self.conversation.turns:
                raise
            raise InvalidRequest("prompt", f"{str(error).rstrip('.')}, or forget the conversation with /reset.") from None
        if result.text or not was_cancelled(result):
            self.conversation.turns.append(Turn(question, result.text, was_cancelled(result)))
        else:
            note("The message had no answer yet and is not kept.")


def why_cut(result: Result, max_context: int) -> str:
    """What is to be said of an answer that is not whole."""
    if result.finish_reason is FinishReason.CANCELLED:
        return " · cancelled"
    if result.finish_reason is not FinishReason.LENGTH:
        return ""
    full = result.receipt.prompt_tokens + result.receipt.output_tokens >= max_context
    return FULL if full else " · cut off by --max-tokens"


def read_line() -> str | None:
    """The next message; None at the end of input or on Ctrl-C. Prompts only a person at a terminal."""
    try:
        if sys.stdin.isatty():
            import readline  # noqa: F401  (gives `input` its history and editing)

            return input("› ")
        line = sys.stdin.buffer.readline()
        return line.decode("utf-8").removesuffix("\n") if line else None
    except UnicodeDecodeError as error:
        raise InvalidRequest("prompt", f"standard input is not UTF-8 text ({error.reason}); convert it first.") from None
    except (EOFError, KeyboardInterrupt):
        note("")  # leave the line of the prompt
        return None


@guarded
@with_options(sampling=True)
def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message that opens the conversation.")] = None,
    prices: Prices = None,
    as_json: JsonFlag = False,
    revision: Revision = None,
    *,
    params: SamplingParams,
    settings: dict[str, Any],
) -> None:
    """Talk with a model. The conversation is kept, and with it its cache; each answer is followed by its receipt.

    Ctrl-C ends an answer and keeps what there is of it; at the prompt it leaves. /help lists the commands. Messages come
    from standard input, a line each; with --json each answer is one JSON object on a line.
    """
    if params.n != 1:
        raise WrongUsage("n", f"A conversation goes on from one answer, so --n must be 1, not {params.n}.")
    listed = price_file(prices)
    with open_engine(model, revision, settings) as engine:
        if not engine.has_chat_template:
            raise InvalidRequest("model", f"{model} has no chat template; use `obole run --raw` to have it go on from a text.")
        conversation = Chat(engine, params, system, listed, as_json=as_json)
        if not as_json:
            note(engine_line(engine.info))
        if sys.stdin.isatty():
            note("/help lists the commands, Ctrl-C ends an answer, Ctrl-D leaves")
        conversation.loop()
    if conversation.failed and not sys.stdin.isatty():
        raise typer.Exit(FAILURE)
