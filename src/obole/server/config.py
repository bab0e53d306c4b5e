"""What may be set about the server. The only source of its defaults; the command line is generated from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from obole.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, whom it lets in, and how much it takes on. Raises `ConfigError`."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free
    model_names: tuple[str, ...] = ()  # what requests may call the model; none: the name it was opened by
    api_keys: tuple[str, ...] = ()  # none here and in `key_file`: everybody is let in
    key_file: Path | None = None
    secret_file: Path | None = None  # of the salt from which tenants' caches are told apart; None: another at each start
    temperature: float = 0.0  # of requests that do not say

    max_waiting: int = 1024  # sequences in the queue of the whole server
    tenant_concurrency: int = 256  # requests of one tenant at a time
    tenant_waiting: int = 256  # of these, requests that have no token yet
    tenant_per_minute: int = 0  # requests of one tenant in a minute; 0: any number
    body_bytes: int = 16 << 20
    schema_bytes: int = 256 << 10  # of a response format, or of the tools, of one request
    max_messages: int = 4096
    max_prompts: int = 128  # of one request for completions
    max_stops: int = 16
    max_choices: int = 16

    stored_responses: int = 1024  # that can be asked for again or continued; 0: none
    stored_bytes: int = 64 << 20  # of all of them
    stored_seconds: float = 86400.0  # after its last use a response is forgotten

    drain_seconds: float = 30.0  # that running requests have to finish after the first signal to stop
    stall_seconds: float = 60.0  # after which a reader that takes nothing is dropped
    body_seconds: float = 60.0  # that a request has to arrive in
    ping_seconds: float = 15.0  # of silence in a stream after which a comment is sent
    pace: float = 0.0  # tokens per second of streams that give nothing away by their timing; 0: as they come

    prices: Path | None = None  # what tokens cost; none: receipts have no price
    log_format: str = "text"  # "json"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        _count("port", self.port, 0, 65535)
        for name in ("max_waiting", "tenant_concurrency", "tenant_waiting", "body_bytes", "schema_bytes", "max_messages"):
            _count(name, getattr(self, name), 1, 1 << 40)
        for name, most in (("max_prompts", 1 << 20), ("max_stops", 64), ("max_choices", 128)):
            _count(name, getattr(self, name), 1, most)
        for name in ("tenant_per_minute", "stored_responses", "stored_bytes"):
            _count(name, getattr(self, name), 0, 1 << 40)
        for name in ("drain_seconds", "temperature", "pace", "stored_seconds"):
            _amount(name, getattr(self, name), 0.0)
        for name in ("stall_seconds", "body_seconds", "ping_seconds"):
            _amount(name, getattr(self, name), 0.1)
        if self.log_format not in ("text", "json"):
            raise ConfigError(f"log_format must be text or json, not {self.log_format!r}.")
        for name in ("model_names", "api_keys"):
            if not all(isinstance(value, str) and value.strip() == value != "" for value in getattr(self, name)):
                raise ConfigError(f"{name} must not be empty, nor begin or end with white space.")


def _count(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} must be a whole number from {least} to {most}, not {value!r}.")


def _amount(name: str, value: object, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise ConfigError(f"{name} must be a finite number of at least {least}, not {value!r}.")


FIELDS = tuple(field.name for field in fields(ServerConfig))
