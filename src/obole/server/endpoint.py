"""The way of every request: who sends it, may they, what do they say; then the endpoint's own part; then log and metrics."""

from __future__ import annotations

import asyncio
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from obole.server.body import decoded, read_body
from obole.server.errors import OPENAI, ErrorForm, api_error
from obole.server.limits import Place
from obole.server.logs import Record
from obole.server.state import Server

T = TypeVar("T")

CLIENT_LEFT = 499  # in log and metrics, as other servers have it; nobody is there to receive it


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method of one path.

    `body`, `answer`: msgspec types of the JSON that comes and goes, for validation and for the document at /openapi.json.
    `public`: needs no key. `limited`: counts among the requests of its tenant and is refused while the server shuts down.
    `quiet`: asked again and again by machines, so that only its failures are logged. `names`: what the API calls the
    engine's fields, for errors about them. `more_statuses`: of responses that are no errors of the frame, with their meaning.
    """

    method: str
    path: str
    handle: Callable[[Call], Awaitable[Response]]
    about: str
    body: Any = None
    answer: Any = None
    answer_type: str = "application/json"
    streams: bool = False
    public: bool = False
    limited: bool = False
    quiet: bool = False
    errors: ErrorForm = OPENAI
    names: Mapping[str, str] = field(default_factory=dict)
    more_statuses: Mapping[int, str] = field(default_factory=dict)


class Call:
    """One request to an endpoint, on the task that serves it. When its client leaves, that task is cancelled."""

    def __init__(self, server: Server, endpoint: Endpoint, scope: Scope, receive: Receive) -> None:
        self.server = server
        self.endpoint = endpoint
        self.scope = scope
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.record = Record(f"req-{secrets.token_hex(12)}", scope["method"], endpoint.path, time.monotonic())
        self.record.prices = server.prices
        self.tenant = server.tenants.all[0]
        self.place: Place | None = None
        self.pace = server.config.pace  # tokens per second of an answer that gives nothing away by its timing; 0: at once
        self.names = dict(endpoint.names)  # what this request calls the engine's fields
        self.gone = False  # the client has left
        self.settle: Callable[[], Awaitable[None]] | None = None  # books what was computed for a client that has left
        self._receive = receive
        self._task = asyncio.current_task()
        self._watch: asyncio.Task[None] | None = None

    async def body(self, kind: type[T]) -> T:
        """The JSON of the request as `kind`. From here on it is noticed when the client leaves. Raises `ApiError`."""
        config = self.server.config
        raw = await read_body(self._receive, self.headers, config.body_bytes, config.body_seconds)
        self._watch = asyncio.create_task(self._until_gone())
        return await decoded(raw, kind)

    async def respond(self) -> Response:
        """The endpoint's response, or that of what went wrong."""
        try:
            if not self.endpoint.public:
                self.tenant = self.server.tenants.of(self.headers)
                self.record.tenant = self.tenant.label
            if self.endpoint.limited:
                self.server.check_open()
                self.place = self.server.limits.enter(self.tenant)
            return await self.endpoint.handle(self)
        except Exception as error:
            return self.endpoint.errors.response(self.told(error))

    def told(self, error: Exception) -> Any:
        """An exception as the `ApiError` that the client is told, noted in the log."""
        problem = api_error(error, self.names)
        self.record.error = problem.message
        if problem.code == "internal_error":
            trace = "".join(traceback.format_exception(error))
            self.server.log.failure(f"{self.record.id}: unexpected {type(error).__name__}", trace)
        return problem

    def abort(self) -> None:
        """Cut the connection, without regard to what is still to be sent."""
        cut = self.scope.get("extensions", {}).get("obole.abort")
        if cut is not None:
            cut()
        elif self._task is not None:
            self._leave()

    def end(self) -> None:
        """The request is over, one way or another."""
        if self._watch is not None:
            self._watch.cancel()
        if self.place is not None:
            self.place.leave()
        record = self.record
        record.finished = time.monotonic()
        self.server.metrics.http_requests.labels(record.path, record.status).inc()
        if not self.endpoint.quiet or record.status >= 400:
            self.server.log.request(record)

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        self.gone = True
        if self._task is not None:
            self._task.cancel()


class EndpointApp:
    """An endpoint as an ASGI application."""

    def __init__(self, server: Server, endpoint: Endpoint) -> None:
        self._server = server
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(self._server, self._endpoint, scope, receive)
        try:
            response = await call.respond()
            response.headers["x-request-id"] = response.headers["request-id"] = call.record.id  # OpenAI's name and Anthropic's
            call.record.status = response.status_code
            await response(scope, receive, send)
        except asyncio.CancelledError:
            call.record.status = CLIENT_LEFT
            task = asyncio.current_task()
            if not call.gone or task is None:
                raise
            task.uncancel()  # nobody is left to hear of it
            if call.settle is not None:
                await call.settle()
        finally:
            call.end()


def json_response(value: Any, status: int = 200) -> Response:
    """Anything that msgspec encodes. Numbers that JSON lacks become null."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
