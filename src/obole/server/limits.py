"""How much each tenant may ask for at a time. Requests above it are turned away before anything is done for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from obole.server.auth import Tenant
from obole.server.config import ServerConfig
from obole.server.errors import ApiError

SOON = 1.0  # seconds after which one of many requests is likely to have ended


@dataclass(slots=True)
class _Use:
    open: int = 0  # requests
    waiting: int = 0  # of these, requests without a first token
    allowance: float = 0.0  # requests that may still come now
    since: float = 0.0  # when `allowance` was right


class Limits:
    """Counts the requests of each tenant. For one thread. `clock`: seconds."""

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._uses: dict[int, _Use] = {}

    def enter(self, tenant: Tenant) -> Place:
        """A place for one request. Raises `ApiError` (429) when the tenant has used up its own."""
        config, use = self._config, self._use(tenant)
        if use.open >= config.tenant_concurrency:
            _too_many(f"{config.tenant_concurrency} requests of this API key are under way already", SOON)
        if use.waiting >= config.tenant_waiting:
            _too_many(f"{config.tenant_waiting} requests of this API key are waiting already", SOON)
        self._meter(use)
        use.open += 1
        use.waiting += 1
        return Place(use)

    def _use(self, tenant: Tenant) -> _Use:
        use = self._uses.get(tenant.index)
        if use is None:
            use = self._uses[tenant.index] = _Use(allowance=self._config.tenant_per_minute, since=self._clock())
        return use

    def _meter(self, use: _Use) -> None:
        """Take one request from the allowance, which fills up again within a minute."""
        most = self._config.tenant_per_minute
        if not most:
            return
        now = self._clock()
        use.allowance = min(most, use.allowance + (now - use.since) * most / 60)
        use.since = now
        if use.allowance < 1:
            _too_many(f"This API key may send {most} requests a minute", (1 - use.allowance) * 60 / most)
        use.allowance -= 1


class Place:
    """One request among those of its tenant, from `enter` to `leave`."""

    def __init__(self, use: _Use) -> None:
        self._use = use
        self._waits = True
        self._left = False

    def started(self) -> None:
        """The first token is there: the request waits no longer."""
        if self._waits:
            self._waits = False
            self._use.waiting -= 1

    def leave(self) -> None:
        if not self._left:
            self._left = True
            self.started()
            self._use.open -= 1


def _too_many(problem: str, seconds: float) -> None:
    raise ApiError(429, f"{problem}: try again later.", code="rate_limit_exceeded", retry_after=seconds)
