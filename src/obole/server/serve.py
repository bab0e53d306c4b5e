"""The server process: its socket, its signals, its end.

The first SIGTERM or SIGINT starts the draining: new requests are refused, running ones may finish. The second ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from obole.engine.async_engine import AsyncEngine
from obole.engine.engine import Engine
from obole.errors import ConfigError, EngineFailure, OboleError
from obole.server.app import build_app
from obole.server.config import ServerConfig
from obole.server.logs import Log
from obole.server.memory import Rest, give_back
from obole.server.state import Server

FLUSH_SECONDS = 2.0  # for the last bytes of responses whose answers are complete
BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket with its address, on which nothing is accepted yet. Raises `ConfigError` when the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"There is no host {host!r} to listen on ({error}): choose another host.") from None
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        problem = f"Port {port} of {host} cannot be used ({error.strerror or error}): choose another port."
        raise ConfigError(problem) from None
    return bound


def url_of(bound: socket.socket) -> str:
    """Where a client on this machine finds the server."""
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _protocol(stall_seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's, with a way to cut a connection whose peer takes nothing: `close` would wait for it for ever."""

    class Cuttable(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connection = transport.get_extra_info("socket")
            with suppress(AttributeError, OSError):  # where there is such an option: also once the response is written
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_seconds * 1000))
            inner: ASGIApp = self.app  # type: ignore[has-type]

            async def app(scope: Scope, receive: Receive, send: Send) -> None:
                scope.setdefault("extensions", {})["obole.abort"] = transport.abort
                await inner(scope, receive, send)

            self.app = app

    return Cuttable


class _Relay(logging.Handler):
    """Puts what libraries have to say into the server's own log."""

    def __init__(self, log: Log) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is None:
            self._log.event(record.getMessage(), source=record.name)
        else:
            self._log.failure(record.getMessage(), logging.Formatter().formatException(record.exc_info))


@contextmanager
def _relayed(log: Log) -> Iterator[None]:
    relay = _Relay(log)
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "asyncio")]
    for logger in loggers:
        logger.addHandler(relay)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(relay)


class Web(uvicorn.Server):
    """uvicorn, but that signals start the draining first."""

    def __init__(self, server: Server) -> None:
        config = server.config
        super().__init__(
            uvicorn.Config(
                build_app(server),
                http=_protocol(config.stall_seconds),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=int(FLUSH_SECONDS),
            )
        )
        self.served = server
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._rest = Rest(self._computing)

    def _computing(self) -> bool:
        load = self.served.engine.snapshot()
        return load.running + load.waiting > 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def on_tick(self, counter: int) -> bool:
        if not self.served.engine.healthy and self._drain is None:
            self.begin_drain()  # nothing is left to wait for but the last words to clients
        if self._rest.look():
            asyncio.get_running_loop().run_in_executor(None, give_back)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """A signal: drain, or if that is under way, leave."""
        if self.served.draining:
            sys.stderr.flush()
            os._exit(128 + sig)
        self.served.draining = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Refuse new requests, let running ones finish, then stop serving."""
        if self._drain is None:
            self.served.draining = True
            self._drain = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        server = self.served
        load = server.engine.snapshot()
        server.log.event(
            f"shutting down: {load.running + load.waiting} answers may finish within {server.config.drain_seconds:g} s",
            running=load.running,
            waiting=load.waiting,
        )
        await server.engine.drain(server.config.drain_seconds)
        self.should_exit = True


async def serve(engine: Engine, config: ServerConfig, bound: socket.socket, ready: Callable[[Web], None]) -> None:
    """Serve until a signal says to stop. Takes the engine over, and closes it. `ready` is called once requests are taken.

    Raises `EngineFailure` when the engine failed in a way that no further request can survive.
    """
    async with AsyncEngine(engine, max_waiting=config.max_waiting) as shared:
        await _warm_up(shared)
        web = Web(Server(shared, config))
        with _relayed(web.served.log):
            task = asyncio.ensure_future(web.serve([bound]))
            while not web.started and not task.done():
                await asyncio.sleep(0.005)
            if web.started:
                ready(web)
            await task
        if shared.failure is not None:
            raise EngineFailure(f"The engine failed for good ({shared.failure!r}): start the server again.")


async def _warm_up(engine: AsyncEngine) -> None:
    """Start the process that renders chat templates, so that the first request need not wait for it."""
    if engine.engine.has_chat_template:
        with suppress(OboleError):
            await engine.count_tokens([{"role": "user", "content": "."}])


def run(engine: Engine, config: ServerConfig, bound: socket.socket, ready: Callable[[Web], None]) -> None:
    """`serve` on an event loop of its own."""
    asyncio.run(serve(engine, config, bound, ready))
