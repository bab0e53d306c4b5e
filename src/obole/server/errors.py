"""What goes wrong with a request, as HTTP has it: a status, and one sentence in the form that the client's API expects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.responses import Response

from obole.errors import EngineClosed, EngineFailure, InvalidRequest, ModelError, Overloaded

OVERLOADED_SECONDS = 5.0  # to come back after; what waits now is a matter of seconds
DRAINING_SECONDS = 10.0  # for another server to take over

# The names that OpenAI's clients know their exceptions by.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """A refusal, or an answer that was lost. `param`: the field at fault; `retry_after`: seconds."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, _TYPES[400 if self.status < 500 else 500])


def refused(param: str, message: str) -> ApiError:
    """A request that cannot be served as asked."""
    return ApiError(400, message, param=param, code="invalid_value")


def api_error(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """Any exception as what the client is told. `names`: what the endpoint calls the engine's fields."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return refused((names or {}).get(error.field, error.field), str(error))
    if isinstance(error, ModelError):  # of a chat template; no other request would fare better with it
        return ApiError(400, str(error), code="model_error")
    if isinstance(error, Overloaded):
        return ApiError(503, str(error), code="overloaded", retry_after=OVERLOADED_SECONDS)
    if isinstance(error, EngineClosed):
        return ApiError(503, str(error), code="shutting_down", retry_after=DRAINING_SECONDS)
    if isinstance(error, EngineFailure):
        return ApiError(500, str(error), code="engine_failure")
    return ApiError(500, "The server failed on this request; its log says why.", code="internal_error")


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """How an API writes its errors: as the JSON of a response, and as an event of a stream that has begun.

    `schema`: the JSON schema of the former, for the document at /openapi.json.
    """

    body: Callable[[ApiError], Any]
    event: Callable[[ApiError], bytes]
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "required": ["error"]})

    def response(self, error: ApiError) -> Response:
        headers = {} if error.retry_after is None else {"retry-after": str(max(1, math.ceil(error.retry_after)))}
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
        content = msgspec.json.encode(self.body(error))
        return Response(content, error.status, headers, media_type="application/json")


def openai_body(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


_TEXT, _MAYBE = {"type": "string"}, {"type": ["string", "null"]}
_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": _TEXT, "type": _TEXT, "param": _MAYBE, "code": _MAYBE},
        }
    },
}

OPENAI = ErrorForm(openai_body, lambda error: b"data: " + msgspec.json.encode(openai_body(error)) + b"\n\n", _SCHEMA)
