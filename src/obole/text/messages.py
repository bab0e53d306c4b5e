"""Conversations as templates want them: checked, in one form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from obole.errors import InvalidRequest
from obole.text.tokenizer import check_text

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_ .-]{0,63}")
_DEPTH = 100  # of nested lists and objects


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Copies of the messages, each with its content as one string. Raises `InvalidRequest` (field "messages").

    Text parts are joined in order. Content that is null or absent becomes "", beside tool calls it is left out, as are
    all entries that are null; arguments of tool calls given as JSON text become the object that templates expect.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise InvalidRequest("messages", f"messages must be a list, not {type(messages).__name__}.")
    if not messages:
        raise InvalidRequest("messages", "messages must hold at least one message.")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest("messages", f"{name} must be an object, not {type(message).__name__}.")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise InvalidRequest("messages", f"{name}.role must be a name such as 'user', not {role!r}.")
    made: dict[str, Any] = plain_data({k: v for k, v in message.items() if v is not None and k != "content"}, name)
    calls = made.get("tool_calls")
    if calls is not None:
        made["tool_calls"] = _tool_calls(calls, name)
    content = message.get("content")
    if content is not None:
        made["content"] = _content(content, name)
    elif not calls:
        made["content"] = ""
    return made


def _content(content: object, name: str) -> str:
    if isinstance(content, str):
        check_text(content, "messages")
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest("messages", f"{name}.content must be text or a list of parts, not {type(content).__name__}.")
    texts = []
    for place, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            problem = f'must be {{"type": "text", "text": ...}}, not {kind!r}: the model reads text only.'
            raise InvalidRequest("messages", f"{name}.content[{place}] {problem}")
        check_text(part["text"], "messages")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(calls: object, name: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidRequest("messages", f"{name}.tool_calls must be a list of objects.")
    for call in calls:
        function = call.get("function")
        holder = function if isinstance(function, dict) else call
        arguments = holder.get("arguments")
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except (ValueError, RecursionError):
                continue  # the model's own broken JSON, shown to it as it was
            if isinstance(parsed, dict):
                holder["arguments"] = parsed
    return calls


def plain_data(value: object, name: str, depth: int = 0) -> Any:
    """A copy of JSON-like data. Raises `InvalidRequest` (field "messages") for anything else."""
    if depth > _DEPTH:
        raise InvalidRequest("messages", f"{name} is nested more than {_DEPTH} levels deep.")
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        check_text(value, "messages")
        return str.__str__(value)  # without the methods of a subclass
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequest("messages", f"{name} has a key that is not text.")
        return {plain_data(key, name, depth): plain_data(item, name, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item, name, depth + 1) for item in value]
    raise InvalidRequest("messages", f"{name} must hold JSON data only, not {type(value).__name__}.")
