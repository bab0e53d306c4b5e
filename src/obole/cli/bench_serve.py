"""`obole bench serve`: a server under load, one that is there or one that is started for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from obole.cli.answering import open_engine, read_text
from obole.cli.bench import JsonFile, Repeat, check_file, show
from obole.cli.bench_open import (
    OpenLoop,
    Outputs,
    changes_json,
    check_open,
    compared,
    is_loopback,
    measure_open,
    model_costs,
    read_document,
)
from obole.cli.bench_serve_tables import serve_tables
from obole.cli.failures import FAILURE, guarded
from obole.cli.options import DEFAULT_MODEL, MODEL_HELP, Revision, WrongUsage, option_of, with_options
from obole.cli.terminal import progress_bar
from obole.cli.top import KEY
from obole.config import engine_config
from obole.economics.energy import meter
from obole.errors import InvalidRequest

if TYPE_CHECKING:
    from obole.bench.client import Address
    from obole.bench.load import Load

CONCURRENCY, REQUESTS = 8, 64
PROMPT_TOKENS = 300
LONG_TOKENS = 4096


IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos/--no-ignore-eos", help="Ask for answers of full length by the field ignore_eos.")
]
ModelName = Annotated[str | None, typer.Option(metavar="NAME", help="What requests call the model.", show_default="not at all")]
Extra = Annotated[str, typer.Option(metavar="JSON", help="Further fields of every request, a JSON object.")]
ApiKey = Annotated[str | None, typer.Option(metavar="KEY", help=f"Of the server. Or set {KEY}.", show_default="none")]


def is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def server_options(revision: str | None, settings: Mapping[str, Any]) -> list[str]:
    """The same settings of the engine as options of `obole serve`."""
    options = [] if revision is None else ["--revision", revision]
    for name, value in settings.items():
        if isinstance(value, bool):
            options.append(option_of(name) if value else f"--no-{option_of(name)[2:]}")
        else:
            options += [option_of(name), str(value)]
    return options


def read_prompts(path: Path) -> tuple[list[dict[str, Any]], ...]:
    """Conversations from a file with one JSON object a line: {"prompt": text} or {"messages": [...]}."""
    found = []
    for number, line in enumerate(read_text(path, "prompts").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            messages = entry["messages"] if "messages" in entry else [{"role": "user", "content": entry["prompt"]}]
        except (ValueError, KeyError, TypeError):
            problem = (
                f'Line {number} of {path} is not {{"prompt": text}} or {{"messages": [...]}}: write one such object a line.'
            )
            raise InvalidRequest("prompts", problem) from None
        found.append(messages)
    return tuple(found)


def extra_fields(text: str) -> dict[str, Any]:
    """Fields of requests, from JSON."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter(
            f'{text!r} is not a JSON object; write it like \'{{"speculate": "off"}}\'.', param_hint="--extra"
        )
    return found


@contextmanager
def at_address(target: str, revision: str | None, settings: Mapping[str, Any]) -> Iterator[Address]:
    """Where the server is that is to be measured; a model is served until the end of the block."""
    from obole.bench.client import address_of
    from obole.bench.processes import free_address, obole_command, serving

    if is_url(target):
        yield address_of(target)
        return
    address = free_address()
    with serving(obole_command(target, address, server_options(revision, settings)), address):
        yield address


def check_target(target: str, load: Load, offline: bool, revision: str | None, settings: Mapping[str, Any]) -> None:
    """Refuse what cannot be honoured for this target, or not be compared."""
    if is_url(target) and (settings or revision):
        name = next(iter(settings), "revision")
        raise WrongUsage(name, f"{option_of(name)} is for a server that is started here: name a model in place of the URL.")
    if offline and is_url(target):
        raise WrongUsage("offline", "--offline compares with the model in this process: name a model in place of the URL.")
    if offline and load.extra:
        raise WrongUsage("extra", "--extra cannot be compared with --offline: leave out one of them.")
    if offline and load.long_prompt_every:
        raise WrongUsage("long_prompt_every", "--long-prompt-every cannot be compared with --offline: leave out one of them.")


@guarded
@with_options()
def serve(
    target: Annotated[
        str, typer.Argument(metavar="URL|MODEL", help=f"A server that is there, or a model to be served. {MODEL_HELP}")
    ] = DEFAULT_MODEL,
    concurrency: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Requests at a time.", show_default=str(CONCURRENCY))
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Requests of a repetition.", show_default=str(REQUESTS))
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens of a prompt of random words, about.", show_default=str(PROMPT_TOKENS)),
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of an answer.")] = 128,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='Prompts in place of random words: {"prompt": ...} or {"messages": ...} a line.'),
    ] = None,
    ignore_eos: IgnoreEos = True,
    model_name: ModelName = None,
    extra: Extra = "{}",
    long_prompt_every: Annotated[
        float, typer.Option(min=0.0, metavar="X", help="Send a long prompt every X seconds meanwhile; 0: none.")
    ] = 0.0,
    long_prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Its tokens, about.")] = LONG_TOKENS,
    offline: Annotated[bool, typer.Option("--offline", help="Compare with the same requests without a server.")] = False,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the random words.")] = 0,
    api_key: ApiKey = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="R", help="Requests a second that come by themselves (Poisson), in place of N at a time."),
    ] = None,
    arrivals: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="Requests come at the times of a trace of Mooncake, Azure or agents.")
    ] = None,
    time_scale: Annotated[
        float, typer.Option(metavar="X", help="Multiply these times; 0.1: ten times as many a second.")
    ] = 1.0,
    seconds: Annotated[
        float, typer.Option(metavar="X", help="How long requests come, with --rate, --arrivals and --find-rate.")
    ] = 30.0,
    workload: Annotated[
        str, typer.Option(metavar="KIND,...", help="What they ask: chat, edit, rag, extract, prose, agent, shared.")
    ] = "",
    ttft: Annotated[
        float | None, typer.Option(metavar="MS", help="Objective: milliseconds until the first token.", show_default="none")
    ] = None,
    itl: Annotated[
        float | None, typer.Option(metavar="MS", help="Objective: between tokens, the mean of an answer.", show_default="none")
    ] = None,
    e2e: Annotated[
        float | None, typer.Option(metavar="MS", help="Objective: until the end of the answer.", show_default="none")
    ] = None,
    find_rate: Annotated[
        bool, typer.Option("--find-rate", help="Find the highest rate that meets the objectives, from --rate or 1 on.")
    ] = False,
    share: Annotated[float, typer.Option(metavar="X", help="Share of requests that must meet them.")] = 0.95,
    prices: Annotated[
        Path | None,
        typer.Option("--prices", metavar="FILE", help="Price list: tell what the tokens cost.", show_default="none"),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report as one page to FILE.", show_default="none")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare with what --json wrote before, beyond noise.", show_default="none"),
    ] = None,
    repeat: Repeat = 3,
    as_json: JsonFile = None,
    revision: Revision = None,
    *,
    settings: dict[str, Any],
) -> None:
    """A server under load: requests and tokens per second, time until the first token and between tokens.

    Any server with OpenAI's chat completions. A model is served by a process that is started for it. With --rate or
    --arrivals requests come by themselves, latencies count from when they were to be sent, and those that meet all objectives
    are the goodput.
    """
    if prompts is not None and prompt_tokens is not None:
        raise WrongUsage("prompt_tokens", "--prompt-tokens is for random words: leave out that or --prompts.")
    check_file(as_json)
    check_file(None if html is None else str(html))
    outputs = Outputs(as_json, html, None if baseline is None else read_document(baseline), prices)
    loop = OpenLoop(rate, arrivals, time_scale, seconds, workload, {"ttft": ttft, "itl": itl, "e2e": e2e}, find_rate, share)
    check_open(loop, {"concurrency": concurrency, "requests": requests, "offline": offline, "prompts": prompts}, outputs)
    from obole.bench.load import Load

    load = Load(
        concurrency=concurrency or CONCURRENCY,
        requests=requests or REQUESTS,
        prompt_tokens=prompt_tokens or PROMPT_TOKENS,
        output_tokens=output_tokens,
        prompts=None if prompts is None else read_prompts(prompts),
        long_prompt_every=long_prompt_every,
        long_prompt_tokens=long_prompt_tokens,
        ignore_eos=ignore_eos,
        model_name=model_name,
        extra=extra_fields(extra),
        seed=seed,
    )
    check_target(target, load, offline, revision, settings)
    key = api_key or os.environ.get(KEY, "")
    if loop.open:
        with at_address(target, revision, settings) as address:
            measure_open(target, address, loop, load, repeat, key, outputs)
    else:
        measure(target, load, repeat, offline, key, outputs, revision, settings)


def measure(
    target: str,
    load: Load,
    repeat: int,
    offline: bool,
    key: str,
    outputs: Outputs,
    revision: str | None,
    settings: Mapping[str, Any],
) -> None:
    """Put the load on the server and show what came of it; exit status 1 if any request failed."""
    from obole.bench.client import Client
    from obole.bench.machine import this_machine
    from obole.bench.report import circumstances, to_json
    from obole.bench.serve import serve as put_under_load

    with ExitStack() as stack:
        own = None
        if offline:
            most = min(load.concurrency, engine_config(settings).scheduler.max_sequences)
            own = stack.enter_context(open_engine(target, revision, {**settings, "max_sequences": most}))
        address = stack.enter_context(at_address(target, revision, settings))
        report = stack.enter_context(progress_bar())
        spent = meter()
        found = put_under_load(Client(address, key), load, repeat, own, report)
        joules = spent.look() if not offline and is_loopback(address.host) else {}
        more = {**model_costs(address.url, key), **({"joules": joules} if joules else {})}
    document = {**circumstances("serve", this_machine()), "model": target, "repeat": repeat}
    document |= {**more, "rows": [to_json(found.row)]}
    document |= {name: to_json(row) for name, row in (("long", found.long), ("offline", found.offline)) if row is not None}
    changes = compared(outputs.baseline, document)
    show(outputs.as_json, {**document, **changes_json(changes)}, lambda: serve_tables(found, changes))
    if any(row is not None and row.errors for row in (found.row, found.long, found.offline)):
        raise typer.Exit(FAILURE)
