"""Chats, whatever API they come by: from messages, tools and formats to the news of each answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from obole.engine.results import Delta
from obole.server.conversation import without_marks
from obole.server.endpoint import Call
from obole.server.errors import ApiError, refused
from obole.server.generation import Ask, Generation, check_size, start
from obole.server.tools import ToolChoice, ToolPlan, chat_prompt, plan_tools
from obole.text.tool_calls import CallStart, Part, TextPart
from obole.types import FinishReason, Grammar, SamplingParams, Source, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAsk:
    """A chat request in neutral terms.

    `messages`: in OpenAI's form, content and tool calls as in chat completions. `sampling`: arguments of `SamplingParams`
    other than grammar and shown tokens. `tools`: {"type": "function", "function": {...}}. `timeout`: seconds.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: ToolChoice = "auto"
    parallel: bool = True
    grammar: Grammar | None = None
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class News:
    """What is new of one answer. `finish_reason`, with the last news of a choice: "stop", "length" or "tool_calls".

    `sources` and `logprobs`: of each of `token_ids`, which may be ahead of the text; logprobs only where asked for.
    """

    choice: int
    parts: Sequence[Part]
    token_ids: Sequence[int]
    sources: Sequence[Source]
    logprobs: Sequence[TokenLogprob]
    finish_reason: str | None


class Chat:
    """The answers to a chat request: an async iterator of `News`. Use it as an async context, as a `Generation`."""

    def __init__(self, generation: Generation, plan: ToolPlan | None, choices: int) -> None:
        self.generation = generation
        self.plan = plan
        self._readers = [_Reader(plan) for _ in range(choices)]

    async def __aiter__(self) -> AsyncIterator[News]:
        async for choice, delta in self.generation:
            news = self._readers[choice].read(choice, delta)
            if news is not None:
                yield news

    async def __aenter__(self) -> Chat:
        await self.generation.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.generation.__aexit__(*error)


class _Reader:
    """Follows one answer: finds calls in its text, keeps what belongs to text that is still held back."""

    def __init__(self, plan: ToolPlan | None) -> None:
        self._parser = None if plan is None else plan.parser()
        self._called = False
        self._token_ids: list[int] = []
        self._sources: list[Source] = []
        self._logprobs: list[TokenLogprob] = []

    def read(self, choice: int, delta: Delta) -> News | None:
        """The news in a delta; None while everything is held back."""
        parts = self._parts(delta)
        self._token_ids += delta.token_ids
        self._sources += delta.sources
        self._logprobs += delta.logprobs or ()
        if not parts and delta.finish_reason is None:
            return None
        token_ids, sources, logprobs = self._token_ids, self._sources, self._logprobs
        self._token_ids, self._sources, self._logprobs = [], [], []
        self._called = self._called or any(isinstance(part, CallStart) for part in parts)
        reason = None if delta.finish_reason is None else finish_reason(delta.finish_reason, self._called)
        return News(choice, parts, token_ids, sources, logprobs, reason)

    def _parts(self, delta: Delta) -> list[Part]:
        if self._parser is None:
            return [TextPart(delta.text)] if delta.text else []
        parts = self._parser.push(delta.text)
        return parts if delta.finish_reason is None else parts + self._parser.finish()


def finish_reason(reason: FinishReason, called: bool) -> str:
    """As OpenAI has it. An answer cut short by the request's own timeout ends by "length", as by any other limit."""
    if reason is not FinishReason.STOP:
        return "length"
    return "tool_calls" if called else "stop"


async def chat(call: Call, ask: ChatAsk) -> Chat:
    """Have the engine accept a chat request. Raises as `generation.start`, and `ApiError` for what no model could do."""
    server = call.server
    engine = server.engine.engine
    _check_template(call)
    if not ask.messages:
        raise refused("messages", "messages must hold at least one message.")
    if len(ask.messages) > server.config.max_messages:
        raise refused("messages", f"There may be {server.config.max_messages} messages; these are {len(ask.messages)}.")
    # schemas may be long: looking through them must not hold up the streams of others
    plan = await asyncio.to_thread(_plan, call, ask) if ask.tools else _plan(call, ask)
    grammar = ask.grammar if plan is None else plan.grammar
    shown = () if plan is None else plan.shown
    plain, hold = without_marks(ask.messages)
    messages, tools = chat_prompt(engine, plain, plan)
    if hold:
        hold["hold_messages"] += len(messages) - len(plain)  # tools may be told of in a message before the others
    params = SamplingParams(**ask.sampling, **hold, grammar=grammar, shown_token_ids=shown)
    generation = await start(call, [Ask(prompt=messages, params=params, tools=tools)], ask.timeout)
    return Chat(generation, plan, params.n)


async def chat_tokens(call: Call, messages: Sequence[Mapping[str, Any]], plan: ToolPlan | None) -> list[int]:
    """The token ids that `chat` would give to the model. Raises `ApiError`, `InvalidRequest`."""
    engine = call.server.engine
    _check_template(call)
    prompt, tools = chat_prompt(engine.engine, without_marks(messages)[0], plan)
    check_size(prompt, engine.engine.max_context)
    return await engine.count_tokens(prompt, tools=tools)


def _check_template(call: Call) -> None:
    if not call.server.engine.engine.has_chat_template:
        raise ApiError(400, "This model has no chat template, it only continues text: use /v1/completions.", code="no_chat")


def _plan(call: Call, ask: ChatAsk) -> ToolPlan | None:
    if ask.grammar is None:  # what is wrong with a grammar is then wrong with the tools
        call.names["response_format"] = call.names.get("tools", "tools")
    return plan_tools(call.server.engine.engine, ask.tools, ask.tool_choice, ask.parallel, ask.grammar)
