"""/v1/chat/completions: https://platform.openai.com/docs/api-reference/chat"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.responses import Response

from obole.server.chatting import Chat, ChatAsk, News, chat
from obole.server.endpoint import Call, Endpoint, json_response
from obole.server.errors import refused
from obole.server.fields import Positive, Sampling, TopLogprobs, sized
from obole.server.messages import AnyChoice, Message, Tool, tool_choice
from obole.server.shapes import Report, Usage, chat_logprobs
from obole.server.sse import DONE, EventStream
from obole.text.tool_calls import CallArguments, CallStart, TextPart
from obole.types import TokenLogprob

_encode = msgspec.json.Encoder().encode


class ChatRequest(Sampling, kw_only=True):
    """A conversation to be continued."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[Tool] | None = None
    tool_choice: AnyChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    reasoning_effort: Literal["none"] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    safety_identifier: str | None = None
    audio: None = None
    functions: None = None
    function_call: None = None
    web_search_options: None = None

    def ask(self, call: Call) -> ChatAsk:
        """The request in neutral terms. Raises `ApiError`."""
        call.server.check_model(self.model)
        if self.store:
            raise refused("store", "This server stores no answers: leave store out.")
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", "top_logprobs needs logprobs to be true.")
        sampling = self.sampling(call)
        sampling["max_tokens"] = self._most_tokens()
        if self.max_completion_tokens is not None:
            call.names["max_tokens"] = "max_completion_tokens"
        sampling["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        tools = [tool.plain() for tool in self.tools or ()]
        sized(call, _encode(tools).decode(), "tools")
        return ChatAsk(
            messages=[message.plain() for message in self.messages],
            sampling=sampling,
            tools=tools,
            tool_choice=tool_choice(self.tool_choice),
            parallel=self.parallel_tool_calls is not False,
            grammar=self.grammar(call),
            timeout=self.timeout,
        )

    def _most_tokens(self) -> int | None:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise refused("max_tokens", "max_tokens is the older name of max_completion_tokens: give only one of them.")
        return old if new is None else new


class CallFunction(Struct, kw_only=True):
    name: str
    arguments: str


class AnswerCall(Struct, kw_only=True):
    id: str
    type: Literal["function"]
    function: CallFunction


class AnswerMessage(Struct, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class AnswerChoice(Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, kw_only=True):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[AnswerChoice]
    usage: Usage
    obole: Report


class ChunkChoice(Struct, kw_only=True):
    index: int
    delta: dict[str, Any]
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChunkHead(Struct, kw_only=True):
    """What all pieces of an answer begin with."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str


class ChunkRest(Struct, kw_only=True):
    """What follows. `obole.sources`: who proposed each token that came with the piece."""

    choices: list[ChunkChoice]
    usage: dict[str, Any] | UnsetType | None = UNSET
    obole: dict[str, Any] | UnsetType = UNSET


class _Writer:
    """What the chunks of one request have in common, and what is known of its choices."""

    def __init__(self, call: Call, request: ChatRequest) -> None:
        self.id = f"chatcmpl-{call.record.id.removeprefix('req-')}"
        self.created = int(time.time())
        self._tokenizer = call.server.engine.engine.tokenizer
        self._request = request
        head = ChunkHead(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=call.server.model,
            system_fingerprint=call.server.fingerprint,
        )
        self._head = b"data: " + _encode(head).removesuffix(b"}") + b","
        asked = request.stream_options.include_usage if request.stream_options else None
        self.usage_apart = asked is True
        # Without being asked OpenAI's API tells no usage in streams. Here the last chunk that a client of that API reads
        # anyway has it, which breaks no reader: its `choices` are what they would be.
        self.usage_last = asked is None
        self._seen: set[int] = set()

    def chunk(self, choices: list[ChunkChoice], **more: Any) -> bytes:
        if self.usage_apart:
            more.setdefault("usage", None)
        return b"".join((self._head, _encode(ChunkRest(choices=choices, **more)).removeprefix(b"{"), b"\n\n"))

    def news(self, news: News) -> bytes:
        """The chunk of what came; its end is another one."""
        delta = _delta(news)
        if news.choice not in self._seen:
            self._seen.add(news.choice)
            delta = {"role": "assistant", "content": "" if "tool_calls" not in delta else None, **delta}
        choice = ChunkChoice(index=news.choice, delta=delta, logprobs=self.logprobs(news.logprobs))
        if self._request.return_token_ids:
            choice.token_ids = list(news.token_ids)
        return self.chunk([choice], obole={"sources": news.sources})

    def logprobs(self, entries: Any) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, entries) if self._request.logprobs else None


def _delta(news: News) -> dict[str, Any]:
    text = "".join(part.text for part in news.parts if isinstance(part, TextPart))
    calls: list[dict[str, Any]] = []
    for part in news.parts:
        if isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            calls.append({"index": part.index, "id": _call_id(), "type": "function", "function": function})
        elif isinstance(part, CallArguments):
            if calls and calls[-1]["index"] == part.index:
                calls[-1]["function"]["arguments"] += part.fragment
            else:
                calls.append({"index": part.index, "function": {"arguments": part.fragment}})
    delta: dict[str, Any] = {}
    if text:
        delta["content"] = text
    if calls:
        delta["tool_calls"] = calls
    return delta


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


async def complete(call: Call) -> Response:
    request = await call.body(ChatRequest)
    answers = await chat(call, request.ask(call))
    writer = _Writer(call, request)
    if request.stream:
        return EventStream(call, _events(writer, answers))
    return await _whole(writer, answers, call, request)


async def _events(writer: _Writer, chat: Chat) -> AsyncGenerator[bytes, None]:
    async with chat as answers:
        generation = answers.generation
        async for news in answers:
            if news.parts or news.sources:
                yield writer.news(news)
            if news.finish_reason is None:
                continue
            last = ChunkChoice(index=news.choice, delta={}, finish_reason=news.finish_reason)
            more: dict[str, Any] = {}
            if generation.complete and not writer.usage_apart:
                more["obole"] = generation.report()
                if writer.usage_last:
                    more["usage"] = generation.usage()
            yield writer.chunk([last], **more)
        if writer.usage_apart:
            yield writer.chunk([], usage=generation.usage(), obole=generation.report())
    yield DONE


class _Choice:
    """One answer while its news come in."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.calls: list[AnswerCall] = []
        self.logprobs: list[TokenLogprob] = []
        self.token_ids: list[int] = []
        self.reason = ""

    def take(self, news: News) -> None:
        for part in news.parts:
            if isinstance(part, TextPart):
                self.text.append(part.text)
            elif isinstance(part, CallStart):
                function = CallFunction(name=part.name, arguments="")
                self.calls.append(AnswerCall(id=_call_id(), type="function", function=function))
            elif isinstance(part, CallArguments):
                self.calls[part.index].function.arguments += part.fragment
        self.logprobs += news.logprobs
        self.token_ids += news.token_ids
        self.reason = news.finish_reason or self.reason

    def answer(self, index: int, writer: _Writer, request: ChatRequest) -> AnswerChoice:
        text = "".join(self.text)
        message = AnswerMessage(role="assistant", content=text)
        if self.calls:
            message = AnswerMessage(role="assistant", content=text or None, tool_calls=self.calls)
        reason: Any = self.reason
        made = AnswerChoice(index=index, message=message, logprobs=writer.logprobs(self.logprobs), finish_reason=reason)
        if request.return_token_ids:
            made.token_ids = self.token_ids
        return made


async def _whole(writer: _Writer, chat: Chat, call: Call, request: ChatRequest) -> Response:
    choices = [_Choice() for _ in range(request.n or 1)]
    async with chat as answers:
        async for news in answers:
            choices[news.choice].take(news)
        generation = answers.generation

    def response() -> Response:
        return json_response(
            ChatCompletion(
                id=writer.id,
                object="chat.completion",
                created=writer.created,
                model=call.server.model,
                system_fingerprint=call.server.fingerprint,
                choices=[choice.answer(index, writer, request) for index, choice in enumerate(choices)],
                usage=msgspec.convert(generation.usage(), Usage),
                obole=msgspec.convert(generation.report(), Report),
            )
        )

    # log-probabilities of many tokens take long to write down
    return await asyncio.to_thread(response) if request.logprobs else response()


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        handle=complete,
        about="Continue a conversation.",
        body=ChatRequest,
        answer=ChatCompletion,
        streams=True,
        limited=True,
        names={"prompt": "messages", "prompt_logprobs": "logprobs"},
    ),
)
