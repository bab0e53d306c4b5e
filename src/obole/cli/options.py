"""Options that several commands share, generated from the dataclasses that hold their types and defaults.

A field added to `SamplingParams`, `EngineConfig` or `SchedulerConfig` becomes an option as soon as its help is written here;
`tests/cli/test_options.py` fails while it is missing.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from obole.config import EngineConfig, SchedulerConfig, engine_config
from obole.config import parse_size as size_in_bytes
from obole.errors import ConfigError, InvalidRequest, OboleError
from obole.types import SamplingParams

DEFAULT_MODEL = "smollm2-135m"

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output, and nothing else.")]
Revision = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Branch, tag or commit of a repository.", show_default="the main branch"),
]
PromptFile = Annotated[
    Path | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from FILE; - is standard input.")
]
MODEL_HELP = "A name from `obole models`, a Hugging Face repository, a folder with safetensors, or a .gguf file."

METAVARS = {int: "N", int | None: "N", float: "X", float | None: "X", list[int]: "N"}


def parse_size(text: str) -> int:
    """Bytes from "2GiB", "500MB" or "1073741824"."""
    try:
        return size_in_bytes(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


def parse_bias(text: str) -> tuple[int, float]:
    """(token id, bias) from "1234=-5.0"."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a bias; write it as TOKEN=BIAS, such as 1234=-5.") from None


@dataclasses.dataclass(frozen=True, slots=True)
class Help:
    """What the help says of a field; `unset` describes a default of None."""

    text: str
    unset: str = ""
    name: str = ""  # the option, if not the field's name
    metavar: str | None = None
    parser: Callable[[str], Any] | None = None


SAMPLING: Mapping[str, Help] = {
    "max_tokens": Help("End after this many tokens.", unset="as many as the context allows"),
    "min_tokens": Help("Do not end before this many tokens."),
    "temperature": Help("Spread of the random choice; 0 takes the likeliest token."),
    "top_k": Help("Choose among the K likeliest tokens; 0: all."),
    "top_p": Help("Choose among the likeliest tokens that together have this probability."),
    "min_p": Help("Drop tokens less likely than this fraction of the likeliest."),
    "repetition_penalty": Help("Divide the score of tokens in prompt or answer; above 1 discourages them."),
    "presence_penalty": Help("Subtract from the score of tokens already in the answer."),
    "frequency_penalty": Help("Subtract from the score of a token for each time it is in the answer."),
    "logit_bias": Help("Add BIAS to the score of a token id; repeatable.", metavar="TOKEN=BIAS", parser=parse_bias),
    "seed": Help("The same seed gives the same answer.", unset="drawn, and shown in the receipt"),
    "stop": Help("End the answer before this text; repeatable.", metavar="TEXT"),
    "stop_token_ids": Help("End the answer at this token id; repeatable.", name="stop-token-id"),
    "ignore_eos": Help("Go on past the end-of-sequence token."),
    "n": Help("Number of answers."),
    "logprobs": Help("Report log-probabilities, with this many alternatives (with --json).", unset="none"),
    "prompt_logprobs": Help("The same for the prompt (with --json).", unset="none"),
    "mtp": Help(
        "With a model that predicts several tokens in one pass: off, verify (drafts that are confirmed: no answer changes), "
        "confadapt or static (taken unverified: lossy).",
        unset="verify, where it pays",
        metavar="MODE",
    ),
    "tau": Help("confadapt: take predicted tokens while the model gives each at least this probability.", unset="0.9"),
    "mtp_tokens": Help("With --mtp: tokens of a pass at most.", unset="16, or what the model was taught"),
}

# Fields of `SamplingParams` that are no options of this kind: the engine's own option does it, or a command has one for a file.
NO_OPTIONS = frozenset({"speculate", "prediction", "grammar", "shown_token_ids", "hold_seconds", "hold_messages"})

ENGINE: Mapping[str, Help] = {
    "kv_device": Help("Memory for the KV pool.", unset="from free memory", metavar="SIZE", parser=parse_size),
    "kv_ram": Help("Memory for cached blocks that the KV pool gives up.", unset="none", metavar="SIZE", parser=parse_size),
    "kv_ssd": Help("Folder for cached blocks, and how large it may become.", unset="none", metavar="DIR:SIZE"),
    "kv_dtype": Help("Format of cached keys and values: auto, float32, bfloat16, int8 or fp8.", metavar="FORMAT"),
    "max_context": Help("Longest prompt and answer together, in tokens.", unset="what the model was made for"),
    "threads": Help("Processor threads.", unset="the processors at hand"),
    "quantize": Help(
        "Matrices of an unquantised model: none: as they are, q8_0: 8 bits. Fewer reads, other answers.",
        metavar="KIND",
    ),
    "kernels": Help("Implementation of the operations: auto, native or reference.", metavar="KIND"),
    "speculate": Help(
        "Drafts to try: auto, off, lookup, memory, prediction, forced, draft, mtp. No answer changes.", metavar="WHICH"
    ),
    "draft": Help("A smaller model of the same vocabulary that drafts.", unset="none", metavar="MODEL"),
    "draft_acceptance": Help(
        "coupled: no answer changes. resample: more of its tokens are right, where answers are sampled, but these are the "
        "same in distribution only, and a seed repeats an answer only with the same drafts.",
        metavar="RULE",
    ),
    "draft_memory": Help("Earlier prompts and answers kept to draft from.", unset="64MiB", metavar="SIZE", parser=parse_size),
    "draft_memory_seconds": Help("How long they are kept."),
    "max_batch_tokens": Help("Tokens computed in one step."),
    "step_stretch": Help("How many times longer prompts and drafts may make a step for which others wait."),
    "max_sequences": Help("Answers computed at once."),
    "prefix_cache": Help("Reuse the computed beginnings of earlier prompts."),
}


class WrongUsage(InvalidRequest):
    """The command line itself is wrong, whatever the model and the files: exit status 2."""


@contextmanager
def usage() -> Iterator[None]:
    """Errors of values that come from the command line, and need nothing else to be found wrong, are wrong usage."""
    try:
        yield
    except OboleError as error:
        raise WrongUsage(at_fault(error) or "", str(error)) from None


def option_of(name: str) -> str:
    """The option that sets a field: "--stop-token-id" for "stop_token_ids"."""
    about = SAMPLING.get(name) or ENGINE.get(name)
    return f"--{about.name}" if about and about.name else f"--{name.replace('_', '-')}"


# In a message a name with an underscore can only be the field. The others are words too, but not where they are followed
# by a demand, or follow one. A name in a path is none.
_FIELDS = [*SAMPLING, *ENGINE]
_LONG = "|".join(name for name in _FIELDS if "_" in name)
_SHORT = "|".join(name for name in _FIELDS if "_" not in name)
_MENTION = re.compile(
    rf"(?<![\w/.'\"-])(?:{_LONG})(?![\w/'\"=-]|\.\w)|^(?:{_SHORT})(?= must\b| are\b| has\b)|(?<=\bset )(?:{_SHORT})(?= to\b)"
)
_SIGNS = {"KV pool": "kv_device", "threads cannot be started": "threads"}  # of settings that messages do not name


def at_fault(error: OboleError) -> str | None:
    """The name of the field, setting or parameter that an error is about, if it is about one."""
    field: str | None = getattr(error, "field", None)
    if field or not isinstance(error, ConfigError):
        return field or None
    mention = _MENTION.search(str(error))
    return mention[0] if mention else next((name for sign, name in _SIGNS.items() if sign in str(error)), None)


def in_option_names(error: OboleError) -> str:
    """The message of an error with fields named as options, and the option at fault before it if it names none."""
    message = _MENTION.sub(lambda mention: option_of(mention[0]), str(error))
    name = at_fault(error)
    if name not in _FIELDS or option_of(name) in message:
        return message
    return f"{option_of(name)}: {message}"


def _option(annotation: Any, default: Any, name: str, about: Help, panel: str, environment: str | None) -> inspect.Parameter:
    """A keyword parameter that Typer turns into an option with the type and default of the field."""
    origin = typing.get_origin(annotation)
    if origin is tuple:
        annotation, default = list[typing.get_args(annotation)[0]], []  # type: ignore[misc]
    elif origin is Mapping:
        annotation, default = list[str], []
    spelling = option_of(name)
    info = typer.Option(
        f"{spelling}/--no-{spelling[2:]}" if default is True else spelling,
        help=about.text,
        metavar=about.metavar or METAVARS.get(annotation),
        parser=about.parser,
        show_default=about.unset or not (default is False or default == []),
        rich_help_panel=panel,
        envvar=environment,
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, info])


def sampling_options() -> list[inspect.Parameter]:
    hints = typing.get_type_hints(SamplingParams)
    defaults = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
    return [_option(hints[name], defaults[name], name, about, "Sampling", None) for name, about in SAMPLING.items()]


def engine_options() -> list[inspect.Parameter]:
    hints = {**typing.get_type_hints(SchedulerConfig), **typing.get_type_hints(EngineConfig)}
    defaults = {f.name: f.default for kind in (SchedulerConfig, EngineConfig) for f in dataclasses.fields(kind)}
    return [
        _option(hints[name], defaults[name], name, about, "Engine", f"OBOLE_{name.upper()}") for name, about in ENGINE.items()
    ]


def with_options(*, sampling: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a Typer command the engine's options, and those for sampling.

    The command receives them as `settings: dict[str, Any]` (only what differs from the defaults) and, if it asked for
    them, `params: SamplingParams`. Raises `WrongUsage` for values out of range.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        kept = [p for p in own.parameters.values() if p.name not in ("params", "settings")]
        sampled, set_up = sampling_options() if sampling else [], engine_options()

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            settings = {p.name: value for p in set_up if (value := values.pop(p.name)) != p.default}
            with usage():
                engine_config(settings)
            if sampling:
                chosen = {p.name: values.pop(p.name) for p in sampled}
                for name in ("logprobs", "prompt_logprobs"):
                    if chosen[name] is not None and not values["as_json"]:
                        raise WrongUsage(name, f"{option_of(name)} is shown with --json only; add that, or leave it out.")
                with usage():
                    values["params"] = SamplingParams(**{**chosen, "logit_bias": dict(chosen["logit_bias"])})
            command(**values, settings=settings)

        wrapper.__signature__ = own.replace(parameters=[*kept, *sampled, *set_up])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in [*kept, *sampled, *set_up]}
        return wrapper

    return decorate
