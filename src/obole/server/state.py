"""What all requests to one server share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from obole import __version__
from obole.engine.async_engine import AsyncEngine
from obole.prices import read_price_list
from obole.server.auth import Tenants, read_keys, read_secret
from obole.server.config import ServerConfig
from obole.server.errors import DRAINING_SECONDS, ApiError
from obole.server.limits import Limits
from obole.server.logs import Log
from obole.server.metrics import Metrics
from obole.server.responses_store import ResponseStore


class Server:
    """One engine, and how it is served. `draining`: no more requests are taken."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig, log: Log | None = None) -> None:
        """Raises `ConfigError` for key, secret and price files that cannot be used."""
        self.engine = engine
        self.config = config
        self.tenants = Tenants(read_keys(config.api_keys, config.key_file), read_secret(config.secret_file))
        self.prices = None if config.prices is None else read_price_list(config.prices)
        self.limits = Limits(config)
        self.metrics = Metrics(engine, self.prices, engine.engine)
        self.responses = ResponseStore(config.stored_responses, config.stored_bytes, config.stored_seconds, time.monotonic)
        self.log = log or Log(as_json=config.log_format == "json", prompts=config.log_prompts)
        self.model_names: Sequence[str] = config.model_names or (public_name(engine.engine.info.model),)
        # answers to the same request with the same seed are the same as long as this is the same
        self.fingerprint = f"obole-{__version__}-{engine.engine.info.weights_digest[:12]}"
        self.created = int(time.time())
        self.draining = False

    @property
    def model(self) -> str:
        """The name that responses give the model."""
        return self.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here; no name means the one there is. Raises `ApiError` (404)."""
        if name is not None and name not in self.model_names:
            there = ", ".join(self.model_names)
            raise ApiError(404, f"There is no model {name!r} here, only {there}.", param="model", code="model_not_found")

    def check_open(self) -> None:
        """Refuse requests while the server shuts down, or can do nothing for them. Raises `ApiError` (503)."""
        if not self.engine.healthy:
            raise ApiError(503, "The engine has failed for good.", code="engine_failure", retry_after=DRAINING_SECONDS)
        if self.draining:
            raise ApiError(503, "The server is shutting down.", code="shutting_down", retry_after=DRAINING_SECONDS)


def public_name(model: str) -> str:
    """What clients call a model that was opened by this name: where it lies on this machine is nothing to them."""
    path = Path(model)
    return path.name.removesuffix(".gguf") if path.exists() else model
