"""Conversations of other APIs as chat messages: what they have in common. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from obole.server.errors import refused

Message: TypeAlias = dict[str, Any]
# Of fields that ask for what is not done here: values that ask for nothing after all, and what to do instead.
Unsupported: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]


def supported(raw: Mapping[str, Any], unsupported: Unsupported) -> dict[str, Any]:
    """The fields of a request but for null ones and those not supported. Raises `ApiError` where these ask for anything."""
    given = {name: value for name, value in raw.items() if value is not None}
    for name, (harmless, advice) in unsupported.items():
        if name in given and given.pop(name) not in harmless:
            raise refused(name, advice)
    return given


def add_call(messages: list[Message], call_id: str, name: str, arguments: str) -> None:
    """Add a call that the assistant made to the end of a conversation: to its last message, if that is one of its."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)
    messages[-1]["content"] = messages[-1]["content"] or None


def called(messages: Iterable[Message]) -> set[str]:
    """The ids of all calls that were made."""
    return {call["id"] for message in messages for call in message.get("tool_calls", ())}


def with_instructions(instructions: str | None, messages: Sequence[Message]) -> list[Message]:
    """The conversation as the model is shown it. What systems say at its beginning is one message: templates know one."""
    first = 0
    while first < len(messages) and messages[first]["role"] == "system":
        first += 1
    system = [text for text in (instructions, *(message["content"] for message in messages[:first])) if text]
    head = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    return head + list(messages[first:])
