"""The body of a request: read within its limits, strict JSON, then the data that the endpoint asks for."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, Never, TypeVar

import msgspec
from starlette.types import Message, Receive

from obole.server.errors import ApiError, refused

T = TypeVar("T")

LARGE = 1 << 16  # bytes: to read more takes long enough to keep it off the event loop
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PLACE = re.compile(r"^(?P<problem>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_INVALID = re.compile(r"Invalid (?:enum )?value (.*)")


async def read_body(receive: Receive, headers: dict[bytes, bytes], limit: int, seconds: float) -> bytes:
    """The whole body. Raises `ApiError`: 413 above `limit` bytes (without reading them), 408 after `seconds`, 415."""
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "A body must not be compressed: leave content-encoding out.", code="unsupported_encoding")
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, "The body must be JSON: send the header content-type: application/json.", code="unsupported_type")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > limit:
        _too_large(limit)
    try:
        async with asyncio.timeout(seconds):
            return await _collect(receive, limit)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {seconds:g} seconds.", code="request_timeout") from None


async def _collect(receive: Receive, limit: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "The body is incomplete.", code="incomplete_body")
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limit:
            _too_large(limit)
        if not message.get("more_body", False):
            return b"".join(pieces)


def _too_large(limit: int) -> Never:
    raise ApiError(413, f"The body has more than {limit} bytes, which is the limit.", code="body_too_large")


async def decoded(body: bytes, kind: type[T]) -> T:
    """A body as `kind` (a msgspec type). Raises `ApiError` naming what is wrong."""
    if len(body) > LARGE:
        return await asyncio.to_thread(_decode, body, kind)
    return _decode(body, kind)


def _decode(body: bytes, kind: type[T]) -> T:
    return converted(strict_json(body), kind)


def strict_json(body: bytes) -> Any:
    """JSON data. Raises `ApiError` for what is no JSON, or JSON that means different things to different readers."""
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_number, parse_float=_finite, parse_int=_integer
        )
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        _no_json(f"it is not UTF-8 (byte {error.start})")
    except UnicodeEncodeError:
        _no_json("a string holds half a character, a lone surrogate")
    except RecursionError:
        _no_json("it is nested too deeply")
    except json.JSONDecodeError as error:
        _no_json(f"{error.msg[0].lower()}{error.msg[1:]} at line {error.lineno}, column {error.colno}")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for place, key in enumerate(keys) if key in keys[:place])
        raise ApiError(400, f"The body is not proper JSON: the key {twice!r} is there twice.", param=twice, code="invalid_json")
    return made


def _no_number(word: str) -> Never:
    _no_json(f"{word} is not a number")


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        _no_json(f"{word[:40]} is too large a number")
    return value


def _integer(word: str) -> int:
    if len(word) > 40:
        _no_json(f"{word[:40]}... is too large a number")
    return int(word)


def _no_json(problem: str) -> Never:
    raise ApiError(400, f"The body is not proper JSON: {problem}.", code="invalid_json")


def converted(value: Any, kind: type[T]) -> T:
    """JSON data as `kind`, nothing left out, nothing guessed. Raises `ApiError` naming the field."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explained(str(error)) from None
    except RecursionError:
        _no_json("it is nested too deeply")


def _explained(text: str) -> ApiError:
    match = _PLACE.match(text)
    problem, path = (match["problem"], match["path"] or "$") if match else (text, "$")
    path = path.removeprefix("$").removeprefix(".")
    if unknown := _UNKNOWN.fullmatch(problem):
        name = f"{path}.{unknown[1]}" if path else unknown[1]
        return ApiError(400, f"There is no field {name!r} here: leave it out.", param=name, code="unknown_parameter")
    if missing := _MISSING.fullmatch(problem):
        name = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(400, f"The field {name!r} is missing.", param=name, code="missing_required_parameter")
    if not path:
        return ApiError(400, f"The body must be a JSON object: {_lowered(problem)}.", code="invalid_type")
    if invalid := _INVALID.fullmatch(problem):
        return refused(path, f"{path} cannot be {invalid[1]} here.")
    return ApiError(400, f"{path}: {_lowered(problem)}.", param=path, code="invalid_type")


def _lowered(problem: str) -> str:
    return problem[0].lower() + problem[1:].rstrip(".")
