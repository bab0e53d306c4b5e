"""The description of the API at /openapi.json, made from the endpoints and their types, and /docs, which shows it.

https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

import msgspec
from starlette.responses import Response

from obole import __version__
from obole.server.endpoint import Call, Endpoint

_REFERENCE = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"{(\w+)(?::path)?}")
# What the frame itself answers, whatever the endpoint. Those for reading a body come with a body, and so on.
_ALWAYS = {400: "The request makes no sense; `param` names what is at fault.", 500: "The server failed."}
_KEYED = {401: "An API key is missing or not known."}
_BODIED = {
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is compressed, or of another type than application/json.",
}
_LIMITED = {
    429: "Too many requests of this API key; come back after `Retry-After` seconds.",
    503: "Too many requests wait, or the server shuts down.",
}


def openapi(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    endpoints = list(endpoints)
    types = [kind for e in endpoints for kind in (e.body, e.answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = _PARAMETER.sub(r"{\1}", endpoint.path)
        paths.setdefault(path, {})[endpoint.method.lower()] = _operation(endpoint, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "obole", "version": __version__, "description": "An inference engine with receipts."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"summary": endpoint.about, "responses": _responses(endpoint, schema_of)}
    names = _PARAMETER.findall(endpoint.path)
    if names:
        made["parameters"] = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names]
    if endpoint.body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema_of[endpoint.body]}}}
    if not endpoint.public:
        made["security"] = [{"key": []}, {}]  # a server without keys lets everybody in
    return made


def _responses(endpoint: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {endpoint.answer_type: {"schema": {"type": "string"}}}
    if endpoint.answer is not None:
        content = {"application/json": {"schema": schema_of[endpoint.answer]}}
    if endpoint.streams:
        content["text/event-stream"] = {}
    made: dict[str, Any] = {"200": {"description": "Done.", "content": content}}
    errors = {
        **_ALWAYS,
        **({} if endpoint.public else _KEYED),
        **({} if endpoint.body is None else _BODIED),
        **(_LIMITED if endpoint.limited else {}),
    }
    if _PARAMETER.search(endpoint.path):
        errors[404] = "There is no such thing."
    made |= {str(status): {"description": about, "content": content} for status, about in endpoint.more_statuses.items()}
    for status, about in sorted(errors.items()):
        made[str(status)] = {"description": about, "content": {"application/json": {"schema": endpoint.errors.schema}}}
    return made


def documentation(endpoints: Sequence[Endpoint]) -> tuple[Endpoint, ...]:
    """The endpoints that describe these, and themselves."""

    async def document(_call: Call) -> Response:
        return Response(encoded, media_type="application/json")

    async def page(_call: Call) -> Response:
        return Response(html, media_type="text/html", headers={"content-security-policy": POLICY})

    own = (
        Endpoint(method="GET", path="/openapi.json", handle=document, about="This API as an OpenAPI document.", public=True),
        Endpoint(method="GET", path="/docs", handle=page, about="The same to read.", answer_type="text/html", public=True),
    )
    encoded = msgspec.json.encode(openapi([*endpoints, *own]))
    html = files("obole.server").joinpath("docs.html").read_bytes()
    return own


# The page shows text from this server only, and loads nothing from anywhere else.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
