"""/v1/responses: conversations as items, kept by the server if the client likes.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.responses import Response

from obole.server.chatting import Chat, ChatAsk, News, chat
from obole.server.conversation import Message, with_instructions
from obole.server.endpoint import Call, Endpoint, json_response
from obole.server.errors import OPENAI, ApiError, ErrorForm, openai_body, refused
from obole.server.fields import NOTES, set_pace, sized
from obole.server.responses_convert import (
    echo,
    input_messages,
    output_messages,
    plain_choice,
    plain_tools,
    resolved,
    responses_usage,
    sampling,
)
from obole.server.responses_events import Event, Output
from obole.server.responses_shapes import (
    Deleted,
    Incomplete,
    Problem,
    ResponseObject,
    ResponsesRequest,
    read_request,
)
from obole.server.responses_store import Stored, Turn
from obole.server.shapes import Report, chat_logprobs
from obole.server.sse import EventStream

_encode = msgspec.json.Encoder().encode
# what this API calls the fields of chats
_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "grammar": "text.format",
    "response_format": "text.format",
}


class _Live:
    """One response from its acceptance to its end."""

    def __init__(self, call: Call, request: ResponsesRequest, chat: Chat, turn: Turn, stored: bool) -> None:
        server = call.server
        self.id = f"resp_{call.record.id.removeprefix('req-')}"
        self.chat = chat
        self._call = call
        self._turn = turn
        self._said = {
            **echo(request, server.config.temperature),
            "id": self.id,
            "created_at": int(time.time()),
            "model": server.model,
            "store": stored,
        }
        tokenizer = server.engine.engine.tokenizer
        self.output = Output((lambda entries: chat_logprobs(tokenizer, entries)["content"]) if request.wants_logprobs else None)
        self.cancelled = False
        self._reason = ""
        self._end: dict[str, Any] = {"status": "in_progress"}
        self._entry = Stored(call.tenant.index, self.id, self) if stored else None
        self._number = 0  # of the next event
        self._sources: list[str] = []  # of tokens that no event has told of yet

    @property
    def status(self) -> str:
        return str(self._end["status"])

    def json(self) -> bytes:
        return _encode(self.show())

    def show(self) -> ResponseObject:
        return ResponseObject(**self._said, output=list(self.output.snapshot()), **self._end)

    def cancel(self) -> None:
        self.cancelled = True
        self._end = {"status": "cancelled"}
        self.chat.generation.cancel()

    def begin(self) -> None:
        """Let others find the response."""
        if self._entry is not None:
            self._call.server.responses.begin(self._entry)

    def take(self, news: News) -> list[Event]:
        self._reason = news.finish_reason or self._reason
        return self.output.take(news)

    def finish(self) -> None:
        """The answer is complete, or was cancelled."""
        if not self.cancelled:
            generation = self.chat.generation
            self._end = {
                "status": "completed",
                "completed_at": int(time.time()),
                "usage": responses_usage(generation.usage()),
                "obole": msgspec.convert(generation.report(), Report),
            }
            if self._reason == "length":
                self._end |= {"status": "incomplete", "incomplete_details": Incomplete(reason="max_output_tokens")}
                self._end["completed_at"] = None
        self._keep()

    def fail(self, problem: ApiError) -> None:
        if not self.cancelled:
            self._end = {"status": "failed", "error": Problem(code="server_error", message=problem.message)}
        self._keep()

    def leave(self) -> None:
        """Nobody reads on. Does nothing after the end."""
        if self.status == "in_progress":
            self._end = {"status": "cancelled"}
            self._keep()

    def _keep(self) -> None:
        if self._entry is None or self._entry.live is None:
            return
        turn = None
        if self.status in ("completed", "incomplete"):
            turn = self._turn
            turn.messages = [*turn.messages, *output_messages(self.output.items)]
        self._call.server.responses.end(self._entry, turn)

    def event(self, event: Event) -> bytes:
        name = event.pop("type")
        number, self._number = self._number, self._number + 1
        if self._sources:
            event["obole"] = {"sources": self._sources}
            self._sources = []
        data = _encode({"type": name, "sequence_number": number, **event})
        return b"event: %s\ndata: %s\n\n" % (name.encode(), data)

    def news(self, news: News) -> bytes:
        """All events of what came, to be sent together."""
        self._sources += news.sources
        return b"".join(map(self.event, self.take(news)))

    def whole(self, name: str) -> bytes:
        """An event about the response as a whole."""
        return self.event({"type": f"response.{name}", "response": self.show()})

    def last(self) -> bytes:
        return self.whole(self.status)


async def create(call: Call) -> Response:
    request = read_request(await call.body(dict[str, Any]))
    call.server.check_model(request.model)
    sized(call, _encode(request.tools).decode(), "tools")
    if request.tools:  # schemas may be long: looking through them must not hold up the streams of others
        request.tools = await asyncio.to_thread(resolved, request.tools)
    set_pace(call, request.pace, request.stream)
    stored = _stored(call, request)
    before = _before(call, request)
    history = [] if before is None else before.conversation()
    added = input_messages(request.input, history)
    answers = await _chat(call, request, [*history, *added])
    live = _Live(call, request, answers, Turn(before, added), stored)
    if request.stream:
        return EventStream(call, _events(call, live))
    async with answers:
        async for news in answers:
            live.take(news)
    live.begin()
    live.finish()
    return json_response(live.show())


async def _events(call: Call, live: _Live) -> AsyncGenerator[bytes, None]:
    live.begin()
    try:
        async with live.chat as answers:
            yield live.whole("created") + live.whole("in_progress")
            async for news in answers:
                if events := live.news(news):
                    yield events
        live.finish()
        yield live.last()
    except Exception as error:
        # also what a cancelled answer ends with
        live.fail(ApiError(500, "cancelled") if live.cancelled else call.told(error))
        yield live.last()
    finally:
        live.leave()


def _stored(call: Call, request: ResponsesRequest) -> bool:
    if call.server.config.stored_responses:
        return request.store is not False
    if request.store:
        raise refused("store", "This server stores no responses: set store to false, and send the whole conversation.")
    return False


def _before(call: Call, request: ResponsesRequest) -> Turn | None:
    """What the request continues. Raises `ApiError`."""
    name = request.previous_response_id
    if name is None:
        return None
    stored = call.server.responses.find(call.tenant.index, name)
    if stored is None:
        problem = f"There is no response {name!r} (any more): send the conversation in input."
        raise ApiError(404, problem, param="previous_response_id", code="previous_response_not_found")
    if stored.turn is None:
        status = "in_progress" if stored.live is not None else stored.status
        raise refused("previous_response_id", f"The response {name!r} cannot be continued: its status is {status}.")
    return stored.turn


async def _chat(call: Call, request: ResponsesRequest, messages: Sequence[Message]) -> Chat:
    """Have the conversation accepted. Raises `ApiError` and what `chat` raises."""
    config = call.server.config
    shown = with_instructions(request.instructions, messages)
    if not shown:
        raise refused("input", "input must hold at least one item.")
    made = sampling(request, config.temperature)
    if len(made["stop"]) > config.max_stops:
        raise refused("stop", f"stop may have at most {config.max_stops} strings here.")
    call.record.notes |= {name: value for name in NOTES if (value := getattr(request, name)) is not None}
    format = None if request.text is None else request.text.format
    ask = ChatAsk(
        messages=shown,
        sampling=made,
        tools=plain_tools(request.tools or ()),
        tool_choice=plain_choice(request.tool_choice),
        parallel=request.parallel_tool_calls is not False,
        grammar=None if format is None else format.grammar(call),
        timeout=request.timeout,
    )
    try:
        return await chat(call, ask)
    except ApiError as error:
        error.param = _NAMES.get(error.param or "", error.param)
        raise


def _found(call: Call) -> Stored:
    """The response that the path names. Raises `ApiError` (404), also where it is of another tenant."""
    query = call.scope.get("query_string", b"").decode("latin-1")
    for name, value in parse_qsl(query, keep_blank_values=True):
        if (name, value) != ("stream", "false"):
            raise refused(name, f"The parameter {name!r} is not supported here: leave it out.")
    name = call.scope["path_params"]["id"]
    stored = call.server.responses.find(call.tenant.index, name)
    if stored is None:
        raise ApiError(404, f"There is no response {name!r} (any more).", param="id", code="response_not_found")
    return stored


def _response(stored: Stored) -> Response:
    return Response(stored.json(), media_type="application/json")


async def retrieve(call: Call) -> Response:
    return _response(_found(call))


async def cancel(call: Call) -> Response:
    stored = _found(call)
    if stored.live is not None:
        stored.live.cancel()
    elif stored.status != "cancelled":
        raise refused("id", f"The response has ended, its status is {stored.status}: only one in progress can be cancelled.")
    return _response(stored)


async def delete(call: Call) -> Response:
    stored = _found(call)
    call.server.responses.delete(stored)
    if stored.live is not None:
        stored.live.cancel()
    return json_response(Deleted(id=stored.id))


def _error_event(error: ApiError) -> bytes:
    data = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return b"event: error\ndata: " + _encode(data) + b"\n\n"


_FORM = ErrorForm(openai_body, _error_event, OPENAI.schema)
_ONE = "/v1/responses/{id}"

ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/responses",
        handle=create,
        about="Continue a conversation made of items.",
        body=ResponsesRequest,
        answer=ResponseObject,
        streams=True,
        limited=True,
        errors=_FORM,
        names=_NAMES,
    ),
    Endpoint(method="GET", path=_ONE, handle=retrieve, about="A stored response.", answer=ResponseObject),
    Endpoint(
        method="POST",
        path=f"{_ONE}/cancel",
        handle=cancel,
        about="End a stored response that is in progress, as its stream said.",
        answer=ResponseObject,
    ),
    Endpoint(
        method="DELETE", path=_ONE, handle=delete, about="Forget a response. Others can still continue it.", answer=Deleted
    ),
)
