"""Conversations of other APIs as chat messages: what they have in common. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from obole.server.errors import refused
from obole.server.fields import CacheControl

Message: TypeAlias = dict[str, Any]
# Of fields that ask for what is not done here: values that ask for nothing after all, and what to do instead.
Unsupported: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]


MARK = "cache_control"  # of a message up to whose end the prompt is to be held, with the seconds


def marked(message: Message, *controls: CacheControl | None) -> Message:
    """A message with the longest of the times that it, or a part of it, asks for; without a mark where there is none."""
    seconds = max((control.seconds for control in controls if control is not None), default=None)
    return message if seconds is None else {**message, MARK: max(seconds, message.get(MARK, 0.0))}


def without_marks(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Message], dict[str, Any]]:
    """Messages as models are shown them, and what their marks come to as arguments of `SamplingParams`.

    The prompt is held up to the last marked message, for the longest of the times.
    """
    marks = {i: message[MARK] for i, message in enumerate(messages) if MARK in message}
    plain = [{name: value for name, value in message.items() if name != MARK} for message in messages]
    return plain, {"hold_seconds": max(marks.values()), "hold_messages": max(marks) + 1} if marks else {}


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
    marks = [message[MARK] for message in messages[:first] if MARK in message]
    head: Message = {"role": "system", "content": "\n\n".join(system), **({MARK: max(marks)} if marks else {})}
    return ([head] if system else []) + list(messages[first:])
