"""The web application: all endpoints on one router."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
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

    def __init__(self, apps: Mapping[str, EndpointApp]) -> None:
        self._apps = apps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        await self._apps["GET" if method == "HEAD" else method](scope, receive, send)


def build_app(server: Server) -> Starlette:
    """Everything that the server answers, as an ASGI application."""
    endpoints = [endpoint for group in GROUPS for endpoint in group]
    endpoints += documentation(endpoints)
    paths: dict[str, dict[str, EndpointApp]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method] = EndpointApp(server, endpoint)
    routes = [Route(path, _ByMethod(apps), methods=list(apps)) for path, apps in paths.items()]

    async def lost(request: Request, error: Exception) -> Response:
        """No such path, or no such method: nothing of the frame has seen the request."""
        assert isinstance(error, HTTPException)
        told = {404: f"There is nothing at {request.url.path}.", 405: f"{request.method} is not for {request.url.path}."}
        message = told.get(error.status_code, error.detail)
        now = time.monotonic()
        record = Record("-", request.method, "other", now, status=error.status_code, error=message, finished=now)
        server.metrics.http_requests.labels(record.path, record.status).inc()
        server.log.request(record)
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        response = OPENAI.response(ApiError(error.status_code, message, code=code))
        response.headers.update(dict(error.headers or {}))
        return response

    handlers: dict[Any, Any] = {HTTPException: lost}
    return Starlette(routes=routes, exception_handlers=handlers)
