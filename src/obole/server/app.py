"""The web application: all endpoints on one router."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from obole.server import anthropic, cache, chat, completions, models, page, responses, tokenization
from obole.server.endpoint import Endpoint, EndpointApp
from obole.server.errors import OPENAI, ApiError
from obole.server.logs import Record
from obole.server.openapi import documentation
from obole.server.state import Server

GROUPS: tuple[Sequence[Endpoint], ...] = (
    chat.ENDPOINTS,
    completions.ENDPOINTS,
    responses.ENDPOINTS,
    anthropic.ENDPOINTS,
    models.ENDPOINTS,
    cache.ENDPOINTS,
    tokenization.ENDPOINTS,
    page.ENDPOINTS,
)


class _ByMethod:
    """The endpoints of one path."""

    def __init__(self, server: Server, apps: Mapping[str, EndpointApp]) -> None:
        self._server = server
        self._apps = apps
        self._allowed = [*apps, "HEAD"] if "GET" in apps else [*apps]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        app = self._apps.get("GET" if method == "HEAD" else method)
        if app is not None:
            await app(scope, receive, send)
            return
        problem = ApiError(405, f"{method} is not for {scope['path']}.", code="method_not_allowed")
        await _refuse(self._server, problem, {"allow": ", ".join(self._allowed)}, scope, receive, send)


async def _refuse(
    server: Server, problem: ApiError, headers: Mapping[str, str], scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer a request that belongs to no endpoint."""
    now = time.monotonic()
    record = Record("-", scope["method"], "other", now, status=problem.status, error=problem.message, finished=now)
    server.metrics.http_requests.labels(record.path, record.status).inc()
    server.log.request(record)
    response = OPENAI.response(problem)
    response.headers.update(headers)
    await response(scope, receive, send)


def build_app(server: Server) -> Router:
    """Everything that the server answers, as an ASGI application.

    There is nothing between the router and the endpoints, which catch what goes wrong themselves: in a stream each layer is
    one more for every token.
    """
    endpoints = [endpoint for group in GROUPS for endpoint in group]
    endpoints += documentation(endpoints)
    paths: dict[str, dict[str, EndpointApp]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method] = EndpointApp(server, endpoint)

    async def lost(scope: Scope, receive: Receive, send: Send) -> None:
        problem = ApiError(404, f"There is nothing at {scope['path']}.", code="not_found")
        await _refuse(server, problem, {}, scope, receive, send)

    return Router([Route(path, _ByMethod(server, apps)) for path, apps in paths.items()], default=lost)
