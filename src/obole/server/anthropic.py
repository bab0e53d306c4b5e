"""/v1/messages and /v1/messages/count_tokens, as in Anthropic's API: https://platform.claude.com/docs/en/api/messages"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from obole.server.anthropic_convert import (
    chat_choice,
    chat_messages,
    chat_tools,
    messages_usage,
    sampling,
    stop_sequence,
)
from obole.server.anthropic_events import Content, Event
from obole.server.anthropic_shapes import (
    UNSUPPORTED,
    CountRequest,
    MessageAnswer,
    MessageReport,
    MessagesRequest,
    MessagesUsage,
    TokenCount,
)
from obole.server.body import converted
from obole.server.chatting import Chat, ChatAsk, chat, chat_tokens
from obole.server.conversation import Message, supported
from obole.server.endpoint import Call, Endpoint, json_response
from obole.server.errors import ApiError, ErrorForm, refused
from obole.server.fields import set_pace, sized
from obole.server.sse import EventStream
from obole.server.tools import plan_tools
from obole.types import Grammar

T = TypeVar("T", bound=CountRequest)

_encode = msgspec.json.Encoder().encode
# what this API calls the fields of chats
_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "grammar": "output_config.format",
    "response_format": "output_config.format",
}
_TEMPLATE_TOKENS = 1024  # that a chat template may well write for a message, and at its own beginning
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


async def _request(call: Call, kind: type[T]) -> T:
    request = converted(supported(await call.body(dict[str, Any]), UNSUPPORTED), kind)
    call.server.check_model(request.model)
    return request


class _Writer:
    """One message: its content as it comes in, and its end."""

    def __init__(self, call: Call, request: MessagesRequest, chat: Chat) -> None:
        self.content = Content()
        self._call = call
        self._request = request
        self._chat = chat
        self._id = f"msg_{call.record.id.removeprefix('req-')}"

    def start(self) -> MessageAnswer:
        """The message before anything has come. How much of the prompt is cached is not known yet; its end tells."""
        usage = MessagesUsage(input_tokens=self._chat.generation.prompt_tokens, output_tokens=0)
        return self._message(usage, stop_reason=None, stop_sequence=None)

    def whole(self, reason: str) -> MessageAnswer:
        usage = messages_usage(self._chat.generation.usage())
        return self._message(usage, content=self.content.blocks, **self.end(reason), obole=self.report())

    def _message(self, usage: MessagesUsage, **more: Any) -> MessageAnswer:
        return MessageAnswer(**{"id": self._id, "model": self._call.server.model, "content": [], "usage": usage, **more})

    def end(self, reason: str) -> dict[str, str | None]:
        """`stop_reason` and `stop_sequence`. `reason`: as chat completions have it."""
        generation = self._chat.generation
        result = generation.results[0]
        found = None
        if reason == "tool_calls":
            name = "tool_use"
        elif reason == "length":
            short = result.receipt.output_tokens < self._request.max_tokens and not generation.timed_out
            name = "model_context_window_exceeded" if short else "max_tokens"
        else:
            tokenizer = self._call.server.engine.engine.tokenizer
            stops = self._request.stop_sequences
            if stops and tokenizer is not None:
                shown = () if self._chat.plan is None else self._chat.plan.shown
                found = stop_sequence(stops, result.choices[0], tokenizer, result.prompt_ids, shown)
            name = "end_turn" if found is None else "stop_sequence"
        return {"stop_reason": name, "stop_sequence": found}

    def report(self) -> MessageReport:
        made = msgspec.convert(self._chat.generation.report(), MessageReport)
        if self.content.partial:
            made.partial_inputs = self.content.partial
        return made

    def last(self, reason: str, sources: list[str]) -> Event:
        """The event that ends the message. `sources`: of tokens that no other event has told of, as those around calls."""
        usage = messages_usage(self._chat.generation.usage())
        report = {"sources": sources, **msgspec.to_builtins(self.report())}
        return {"type": "message_delta", "delta": self.end(reason), "usage": usage, "obole": report}


async def create(call: Call) -> Response:
    request = await _request(call, MessagesRequest)
    if request.metadata is not None and request.metadata.user_id is not None:
        call.record.notes["user"] = request.metadata.user_id
    set_pace(call, request.pace, request.stream)
    answers = await chat(call, await _ask(call, request))
    writer = _Writer(call, request, answers)
    if request.stream:
        return EventStream(call, _events(writer, answers))
    reason = ""
    async with answers:
        async for news in answers:
            writer.content.take(news)
            reason = news.finish_reason or reason
    return json_response(writer.whole(reason))


async def _events(writer: _Writer, chat: Chat) -> AsyncGenerator[bytes, None]:
    reason = ""
    sources: list[str] = []  # of tokens that no event has told of yet
    async with chat as answers:
        yield _event({"type": "message_start", "message": writer.start()}) + _event({"type": "ping"})
        async for news in answers:
            sources += news.sources
            reason = news.finish_reason or reason
            if events := writer.content.take(news):  # which are sent together
                if sources:
                    events[0]["obole"] = {"sources": sources}
                    sources = []
                yield b"".join(map(_event, events))
        yield _event(writer.last(reason, sources)) + _event({"type": "message_stop"})


def _event(event: Event) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), _encode(event))


async def _ask(call: Call, request: MessagesRequest) -> ChatAsk:
    """The request in neutral terms. Raises `ApiError`."""
    config = call.server.config
    made = sampling(request, config.temperature)
    if len(made["stop"]) > config.max_stops:
        raise refused("stop_sequences", f"stop_sequences may have at most {config.max_stops} strings here.")
    if "" in made["stop"]:
        raise refused("stop_sequences", "stop_sequences must not have an empty string.")
    messages, tools = _conversation(call, request)
    choice, parallel = chat_choice(request.tool_choice)
    made["max_tokens"] = await _most_tokens(call, request, messages, tools)
    format = None if request.output_config is None else request.output_config.format
    grammar = None
    if format is not None:
        grammar = Grammar("json_schema", sized(call, _encode(format.schema).decode(), "output_config.format"))
    return ChatAsk(
        messages=messages,
        sampling=made,
        tools=tools,
        tool_choice=choice,
        parallel=parallel,
        grammar=grammar,
        timeout=request.timeout,
    )


def _conversation(call: Call, request: CountRequest) -> tuple[list[Message], list[dict[str, Any]]]:
    messages, tools = chat_messages(request), chat_tools(request.tools or ())
    sized(call, _encode(tools).decode(), "tools")
    return messages, tools


async def _most_tokens(
    call: Call, request: MessagesRequest, messages: list[Message], tools: Sequence[dict[str, Any]]
) -> int | None:
    """`max_tokens`, or None, which means all that the context has room for, if that is less.

    It has to be given in this API, and clients give more than small contexts hold.
    """
    room = call.server.engine.engine.max_context - request.max_tokens
    # a token is a byte at least, so that most requests can do without counting
    if len(_encode(messages)) + len(_encode(tools)) + _TEMPLATE_TOKENS * (len(messages) + 1) <= room:
        return request.max_tokens
    return request.max_tokens if room > 0 and await _count(call, request, messages, tools) <= room else None


async def _count(call: Call, request: CountRequest, messages: list[Message], tools: Sequence[dict[str, Any]]) -> int:
    """Tokens of the prompt. Raises `ApiError`."""
    choice, parallel = chat_choice(request.tool_choice)
    plan = await asyncio.to_thread(plan_tools, call.server.engine.engine, tools, choice, parallel) if tools else None
    return len(await chat_tokens(call, messages, plan))


async def count(call: Call) -> Response:
    request = await _request(call, CountRequest)
    return json_response(TokenCount(input_tokens=await _count(call, request, *_conversation(call, request))))


def _error_body(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


_SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_FORM = ErrorForm(_error_body, lambda error: _event(_error_body(error)), _SCHEMA)

ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/messages",
        handle=create,
        about="Continue a conversation, as in Anthropic's API.",
        body=MessagesRequest,
        answer=MessageAnswer,
        streams=True,
        limited=True,
        errors=_FORM,
        names=_NAMES,
    ),
    Endpoint(
        method="POST",
        path="/v1/messages/count_tokens",
        handle=count,
        about="How many tokens a conversation is.",
        body=CountRequest,
        answer=TokenCount,
        limited=True,
        errors=_FORM,
        names=_NAMES,
    ),
)
