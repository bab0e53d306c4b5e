"""/tokenize and /detokenize: texts as the model sees them, and back."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.responses import Response

from obole.server.chatting import chat_tokens
from obole.server.endpoint import Call, Endpoint, json_response
from obole.server.errors import ApiError, refused
from obole.server.generation import check_size
from obole.server.messages import Message, Tool
from obole.server.tools import plan_tools
from obole.text.tokenizer import Tokenizer


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A text as /v1/completions would take it, or messages as /v1/chat/completions would."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None


class Tokens(Struct, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class Text(Struct, kw_only=True):
    """Control tokens are not part of the text."""

    prompt: str


async def tokenize(call: Call) -> Response:
    request = await call.body(TokenizeRequest)
    server = call.server
    server.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise refused("prompt", "Give a prompt or messages, one of the two.")
    engine = server.engine.engine
    tokenizer = _tokenizer(call)
    tools = [tool.plain() for tool in request.tools or ()]
    if request.messages is None:
        if tools:
            raise refused("tools", "tools are shown to the model beside messages: give messages with them.")
        check_size(request.prompt or "", engine.max_context)
        ids = await server.engine.count_tokens(request.prompt or "")
    else:
        plan = plan_tools(engine, tools, "auto", parallel=True)
        ids = await chat_tokens(call, [message.plain() for message in request.messages], plan)
    made = Tokens(tokens=ids, count=len(ids), max_model_len=engine.max_context)
    if request.return_token_strs:
        made.token_strs = [tokenizer.token_text(i) or "" for i in ids]
    return json_response(made)


async def detokenize(call: Call) -> Response:
    request = await call.body(DetokenizeRequest)
    call.server.check_model(request.model)
    tokenizer = _tokenizer(call)
    most = call.server.engine.engine.vocab_size
    for token in request.tokens:
        if not 0 <= token < most:
            raise refused("tokens", f"tokens has {token}, which is not a token id from 0 to {most - 1}.")
    return json_response(Text(prompt=tokenizer.decode(request.tokens)))


def _tokenizer(call: Call) -> Tokenizer:
    tokenizer = call.server.engine.engine.tokenizer
    if tokenizer is None:
        raise ApiError(400, "This model has no tokenizer.", code="no_tokenizer")
    return tokenizer


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/tokenize",
        handle=tokenize,
        about="The token ids of a text or a conversation.",
        body=TokenizeRequest,
        answer=Tokens,
        limited=True,
    ),
    Endpoint(
        method="POST",
        path="/detokenize",
        handle=detokenize,
        about="The text of token ids.",
        body=DetokenizeRequest,
        answer=Text,
        limited=True,
    ),
)
