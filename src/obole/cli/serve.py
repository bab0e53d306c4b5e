"""`obole serve`: the model over HTTP, until a signal says to stop."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from obole import __version__
from obole.cli.answering import open_engine
from obole.cli.failures import guarded
from obole.cli.options import DEFAULT_MODEL, METAVARS, MODEL_HELP, Help, Revision, WrongUsage, parse_size, with_options
from obole.errors import ConfigError
from obole.server.config import FIELDS, ServerConfig

if TYPE_CHECKING:
    from obole.server.serve import Web

KEYS = "OBOLE_API_KEYS"  # as the option, but not for everybody to see in the list of processes
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def size(value: str | int) -> int:
    """Bytes; the default comes as a number already."""
    return value if isinstance(value, int) else parse_size(value)


SERVER: Mapping[str, Help] = {
    "host": Help("Address to listen on; 0.0.0.0 is all of this machine's.", metavar="HOST"),
    "port": Help("Port to listen on; 0: any that is free."),
    "model_names": Help("What requests call the model; repeatable.", unset="as it was opened", name="name", metavar="NAME"),
    "api_keys": Help(f"Let in who has this key; repeatable. Or set {KEYS}.", unset="everybody", name="api-key", metavar="KEY"),
    "key_file": Help("Keys, one on a line, each after a label if you like.", unset="none", metavar="FILE"),
    "secret_file": Help("Keeps the tenants' caches apart across restarts; made if missing.", unset="none", metavar="FILE"),
    "temperature": Help("Of requests that do not say; 0 takes the likeliest token.", name="default-temperature"),
    "max_waiting": Help("Answers that may wait, of all tenants; more are turned away."),
    "tenant_concurrency": Help("Requests of one key at a time."),
    "tenant_waiting": Help("Requests of one key that may wait for their first token."),
    "tenant_per_minute": Help("Requests of one key in a minute; 0: any number."),
    "body_bytes": Help("Largest request.", unset="16MiB", metavar="SIZE", parser=size),
    "schema_bytes": Help("Largest response format or list of tools.", unset="256KiB", metavar="SIZE", parser=size),
    "max_messages": Help("Messages in a request."),
    "max_prompts": Help("Prompts in a request."),
    "max_stops": Help("Stop strings in a request."),
    "max_choices": Help("Answers to a prompt (n)."),
    "stored_responses": Help("Responses that /v1/responses keeps to be continued; 0: none."),
    "stored_bytes": Help("Most bytes of these.", unset="64MiB", metavar="SIZE", parser=size),
    "stored_seconds": Help("Forget a response so long after its last use."),
    "drain_seconds": Help("How long running requests may take after the first signal to stop."),
    "stall_seconds": Help("Drop readers that take nothing for so long."),
    "body_seconds": Help("How long a request may take to arrive."),
    "ping_seconds": Help("Send a comment after so much silence in a stream."),
    "pace": Help("Tokens per second of all streams, whatever was computed when; 0: as they come."),
    "prices": Help(
        "Price list (TOML or JSON), by which receipts, the log and metrics say what tokens cost.", unset="none", metavar="FILE"
    ),
    "log_format": Help("text or json.", metavar="FORMAT"),
    "log_prompts": Help("Write prompts into the log."),
}


def option_name(field: str) -> str:
    """The option that sets a field: "--api-key" for "api_keys"."""
    return f"--{SERVER[field].name or field.replace('_', '-')}"


def server_options() -> list[inspect.Parameter]:
    """An option for each field of `ServerConfig`, with its type and default."""
    hints = typing.get_type_hints(ServerConfig)
    return [_option(field.name, hints[field.name], field.default) for field in dataclasses.fields(ServerConfig)]


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    about = SERVER[name]
    if typing.get_origin(annotation) is tuple:
        annotation, default = list[str], []
    info = typer.Option(
        option_name(name),
        help=about.text,
        metavar=about.metavar or METAVARS.get(annotation),
        parser=about.parser,
        show_default=about.unset or not (default is False or default == []),
        rich_help_panel="Server",
        envvar=None if name == "api_keys" else f"OBOLE_SERVER_{name.upper()}",
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, info])


def server_config(values: Mapping[str, Any]) -> ServerConfig:
    """The configuration from the values of the options. Raises `WrongUsage` in the names of the options."""
    made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    made["api_keys"] += tuple(key for key in re.split(r"[\s,]+", os.environ.get(KEYS, "")) if key)
    try:
        return ServerConfig(**made)
    except ConfigError as error:
        name, _, rest = str(error).partition(" ")
        raise WrongUsage(name, f"{option_name(name)} {rest}" if name in SERVER else str(error)) from None


def with_server(command: Callable[..., None]) -> Callable[..., None]:
    """Give a Typer command the server's options; it receives them as `config: ServerConfig`."""
    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        config = server_config({name: values.pop(name) for name in FIELDS})
        command(**values, config=config)

    kept = [p for p in own.parameters.values() if p.name != "config"]
    place = next(i for i, p in enumerate(kept) if p.name == "settings")
    parameters = [*kept[:place], *server_options(), *kept[place:]]
    wrapper.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return wrapper


def ready_line(web: Web, url: str) -> None:
    """Say where the server is, and who may use it."""
    server = web.served
    config = server.config
    message = f"obole {__version__} serves {server.model} at {url} (API at {url}/v1, documentation at {url}/docs)"
    server.log.event(message, url=url, model=server.model)
    if config.host not in LOOPBACK and not (config.api_keys or config.key_file):
        server.log.event("Everybody who reaches this machine may use it: --api-key lets in only those who have a key.")


@guarded
@with_options()
@with_server
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = DEFAULT_MODEL,
    revision: Revision = None,
    *,
    config: ServerConfig,
    settings: dict[str, Any],
) -> None:
    """Answer requests over HTTP as OpenAI's API does.

    The first Ctrl-C or SIGTERM lets running requests finish, the second ends at once.
    """
    from obole.server.serve import listen, run, url_of

    bound = listen(config.host, config.port)  # first: to load a model takes longer than to find that the port is taken
    with bound, open_engine(model, revision, settings) as engine:
        run(engine, config, bound, lambda web: ready_line(web, url_of(bound)))
