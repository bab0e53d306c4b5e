"""Servers on free ports, each in a thread of its own, in front of models whose answers are known."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from obole import Engine
from obole.server.config import ServerConfig
from obole.server.serve import Web, listen, serve, url_of
from obole.server.state import Server

from .puppets import TEMPLATE, open_speaking


class Served:
    """A server that answers at `url`. `client` speaks to it; `server` is its inside."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self._bound = listen(config.host, 0)
        self.url = url_of(self._bound)
        self._web: Web | None = None
        self._up = threading.Event()
        self._failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(engine, config))
        self.thread.start()
        assert self._up.wait(30)
        if self._failure is not None:
            raise self._failure
        self.client = httpx.Client(base_url=self.url, timeout=30)

    @property
    def web(self) -> Web:
        assert self._web is not None
        return self._web

    @property
    def server(self) -> Server:
        return self.web.served

    def drain(self) -> None:
        """What the first signal does."""
        assert self.web._loop is not None
        self.web._loop.call_soon_threadsafe(self.web.begin_drain)

    def stop(self) -> None:
        self.client.close()
        if self.thread.is_alive():
            self.drain()
        self.thread.join(30)
        assert not self.thread.is_alive()

    def _run(self, engine: Engine, config: ServerConfig) -> None:
        try:
            asyncio.run(serve(engine, config, self._bound, self._ready))
        except BaseException as error:
            self._failure = error
        self._up.set()

    def _ready(self, web: Web) -> None:
        self._web = web
        self._up.set()


Serve = Callable[..., Served]


@pytest.fixture
def serve_engine() -> Iterator[Serve]:
    """Serves an engine; `settings` are fields of `ServerConfig`. Everything is stopped, idle and balanced in the end."""
    running: list[tuple[Served, Engine]] = []

    def start(engine: Engine, **settings: Any) -> Served:
        running.append((Served(engine, ServerConfig(**{"drain_seconds": 0.0, **settings})), engine))
        return running[-1][0]

    yield start
    for served, engine in running:
        served.stop()
        engine._scheduler.check()


@pytest.fixture
def serve_speaking(tmp_path: Path, serve_engine: Serve) -> Serve:
    """Serves a model that answers every chat with the given pieces of text, a token each."""

    def start(pieces: Sequence[str | bytes], *, template: str | None = TEMPLATE, **settings: Any) -> Served:
        return serve_engine(open_speaking(tmp_path, pieces, template=template), **settings)

    return start


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests that leave it as it is.

    It answers chats with "Hello there, you", and continues letters with the alphabet.
    """
    engine = open_speaking(tmp_path_factory.mktemp("plain"), ["Hello", " there", ", you"])
    served = Served(engine, ServerConfig(drain_seconds=0.0, model_names=("puppet", "other-name")))
    yield served
    served.stop()
    engine._scheduler.check()
    usage = engine._scheduler.cache.usage()
    assert usage.in_use == 0


@pytest.fixture
def client(plain: Served) -> httpx.Client:
    return plain.client
