"""An HTTP/1.1 client for measuring servers: it notes when bytes arrive, and reads them when the run is over.

Client and server share the processors of one machine, so what the client computes meanwhile is taken from the server. A
connection is kept for one request after another, since a client that measures is no client that connects.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
import urllib.parse
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import httptools

from obole.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. `path` comes before that of every endpoint; `host` is a name or an address without brackets."""

    scheme: str
    host: str
    port: int
    path: str = ""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address_of(url: str) -> Address:
    """An address from "http://127.0.0.1:8000", with or without /v1 at its end. Raises `InvalidRequest` (field "url")."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or port == 0 or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        raise InvalidRequest("url", f"{url!r} is not the address of a server: write it like http://127.0.0.1:8000.")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.scheme, host, port or {"http": 80, "https": 443}[parts.scheme], path)


@dataclass(slots=True)
class Reply:
    """What came back for one request, and when, in seconds of `time.perf_counter`.

    `pieces`: parts of the body as they arrived. `problem`: why there is no whole reply; `status` is then what came of it, or 0.
    """

    sent: float
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0
    problem: str = ""

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class Unheard(ConnectionResetError):
    """The server closed the connection before it said anything about the request."""


class Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._reply = Reply(0.0)
        self._now = 0.0  # when bytes came last

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing() and self._done is None

    async def ask(self, request: bytes) -> Reply:
        """Send a whole request and wait for the whole response. Cancelling closes the connection.

        Raises `ConnectionError` (`Unheard`) when the server closes it in between, `ValueError` for what is no HTTP.
        """
        assert self.usable
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        reply = self._reply = Reply(time.perf_counter())
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        self._done = None
        return reply

    def close(self) -> None:
        """At once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    # -- called by the transport ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ValueError(f"the answer is not HTTP ({error})"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        kind = Unheard if self._now < self._reply.sent else ConnectionResetError
        self._fail(kind("the server closed the connection"))

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    # -- called by the parser ---------------------------------------------------------------------------------------------

    def on_body(self, body: bytes) -> None:
        self._reply.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        if self._done is None or self._done.done():
            return
        self._reply.status, self._reply.ended = self._parser.get_status_code(), self._now
        if not self._parser.should_keep_alive():
            self.close()
        self._done.set_result(None)


C = TypeVar("C", bound=Connection)


class Client:
    """Speaks to one server. `key`: sent as its API key, if there is one. `timeout`: seconds for a whole reply.

    `gather`: bytes that must have come before this process is woken for them; 0: every piece counts. It is woken for the end of
    a reply whatever that comes to, since the server then closes the connection. Between the two, times mean nothing.
    """

    def __init__(self, address: Address, key: str = "", timeout: float = 600.0, gather: int = 0) -> None:
        self.address = address
        self._key = key
        self.timeout = timeout
        self._gather = gather
        self._ssl = ssl.create_default_context() if address.scheme == "https" else None

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The bytes of a request."""
        lines = [f"{method} {self.address.path}{path} HTTP/1.1", f"host: {self.address.authority}", "accept: */*"]
        if self._key:
            lines.append(f"authorization: Bearer {self._key}")
        if self._gather:
            lines.append("connection: close")
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body

    async def connect(self) -> Connection:
        """Raises `OSError`."""
        return await self.connect_as(Connection)

    async def connect_as(self, kind: type[C]) -> C:
        """A connection that does more than the usual one. Raises `OSError`."""
        loop = asyncio.get_running_loop()
        transport, connection = await loop.create_connection(kind, self.address.host, self.address.port, ssl=self._ssl)
        if self._gather:
            with suppress(AttributeError, OSError):  # where there is no such option pieces come as they do
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, self._gather)
        return connection

    def gathering(self, gather: int) -> Client:
        """The same, woken less often."""
        return Client(self.address, self._key, self.timeout, gather)

    def line(self) -> Line:
        return Line(self)


class Line:
    """Sends one request after another, over one connection as long as the server keeps it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._connection: Connection | None = None

    async def ask(self, request: bytes) -> Reply:
        """The reply, also when it is that there is none: then `problem` says why.

        A server may close a kept connection just when the next request comes (RFC 9112, 9.5): that is sent once more.
        """
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self._client.timeout):
                if self._connection is not None and self._connection.usable:
                    with suppress(Unheard):
                        return await self._connection.ask(request)
                self._connection = await self._client.connect()
                return await self._connection.ask(request)
        except TimeoutError:
            problem = f"no whole answer within {self._client.timeout:g} s"
        except (OSError, ValueError) as error:
            problem = str(error) or type(error).__name__
        return Reply(start, ended=time.perf_counter(), problem=problem)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
