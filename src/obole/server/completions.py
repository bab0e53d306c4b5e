"""/v1/completions: https://platform.openai.com/docs/api-reference/completions"""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.responses import Response

from obole.engine.prompts import Prompt
from obole.engine.results import Choice, Delta, Result
from obole.server.chatting import finish_reason
from obole.server.endpoint import Call, Endpoint, json_response
from obole.server.errors import refused
from obole.server.fields import Natural, Sampling, TopLogprobs
from obole.server.generation import Ask, Generation, start
from obole.server.shapes import Report, Usage, finite, token_spelling
from obole.server.sse import DONE, EventStream
from obole.text.tokenizer import Tokenizer
from obole.types import SamplingParams, TokenLogprob

DEFAULT_TOKENS = 16  # as in OpenAI's API

_encode = msgspec.json.Encoder().encode


class CompletionRequest(Sampling, kw_only=True):
    """Texts (or token ids) to be continued. Control tokens in a text count as such."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    max_tokens: Natural | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: int | None = None
    suffix: None = None

    def prompts(self, call: Call) -> list[Prompt]:
        """The prompts one by one. Raises `ApiError`."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        kinds = {type(one) for one in given}
        if len(kinds) != 1:
            raise refused(
                "prompt", "prompt must be a text, a list of token ids, a list of texts, or a list of lists of token ids."
            )
        if kinds == {int}:
            return [[one for one in given if isinstance(one, int)]]
        most = call.server.config.max_prompts
        if len(given) > most:
            raise refused("prompt", f"There may be {most} prompts in a request; these are {len(given)}.")
        return [one for one in given if not isinstance(one, int)]

    def params(self, call: Call) -> SamplingParams:
        """How each is continued. Raises `ApiError`, `InvalidRequest`."""
        call.server.check_model(self.model)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise refused("best_of", "best_of other than n is not done here: ask for n answers and choose.")
        sampling = self.sampling(call)
        most = DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        if most == 0 and not self.echo:
            raise refused("max_tokens", "max_tokens of 0 leaves nothing to answer: set echo to true to score the prompt.")
        if self.stream and self.echo and self.logprobs is not None:
            raise refused("logprobs", "logprobs of an echoed prompt do not come as a stream: set stream to false.")
        scored = self.logprobs if self.echo else None
        grammar = self.grammar(call)
        return SamplingParams(**sampling, max_tokens=most, logprobs=self.logprobs, prompt_logprobs=scored, grammar=grammar)


class Logprobs(Struct, kw_only=True):
    """Lists beside each other, one entry for each token. `text_offset`: where in `text` a token begins, in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, kw_only=True):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """The whole answer, or a piece of it where it is streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    obole: Any = UNSET


class _Speller:
    """Turns log-probabilities of consecutive tokens into the API's lists."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def spell(self, token_ids: Sequence[int], entries: Iterable[TokenLogprob | None]) -> Logprobs:
        """`entries`: None for a token that has nothing before it."""
        made = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token_id, entry in zip(token_ids, entries, strict=True):
            made.tokens.append(self._name(token_id))
            made.token_logprobs.append(None if entry is None else finite(entry.logprob))
            made.top_logprobs.append(None if entry is None else {self._name(i): finite(p) for i, p in entry.top})
            made.text_offset.append(self._offset)
            shown = b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
            self._offset += len(self._decoder.decode(shown))
        return made

    def _name(self, token_id: int) -> str:
        """A token that is no text of its own is spelt in bytes, so that no two look alike."""
        spelling = token_spelling(self._tokenizer, token_id)
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


class _Writer:
    """What the pieces of one response have in common."""

    def __init__(self, call: Call, request: CompletionRequest, prompts: list[Prompt]) -> None:
        self.request = request
        self.choices = request.n or 1
        self.tokenizer = call.server.engine.engine.tokenizer
        self._prompts = prompts
        self._id = f"cmpl-{call.record.id.removeprefix('req-')}"
        self._created = int(time.time())
        self._server = call.server
        asked = request.stream_options.include_usage if request.stream_options else None
        self.usage_apart = asked is True
        self.usage_last = asked is None  # see the chat completions

    def completion(self, choices: list[CompletionChoice], **more: Any) -> Completion:
        return Completion(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._server.model,
            system_fingerprint=self._server.fingerprint,
            choices=choices,
            **more,
        )

    def event(self, choices: list[CompletionChoice], **more: Any) -> bytes:
        if self.usage_apart:
            more.setdefault("usage", None)
        return b"data: " + _encode(self.completion(choices, **more)) + b"\n\n"

    def echo(self, index: int) -> str:
        """What stands before the answer: the text as it was given, or that of the token ids."""
        if not self.request.echo:
            return ""
        prompt = self._prompts[index // self.choices]
        if isinstance(prompt, str):
            return prompt
        return "" if self.tokenizer is None else self.tokenizer.decode(prompt)  # type: ignore[arg-type]


async def complete(call: Call) -> Response:
    request = await call.body(CompletionRequest)
    params, prompts = request.params(call), request.prompts(call)
    generation = await start(call, [Ask(prompt=prompt, params=params) for prompt in prompts], request.timeout)
    writer = _Writer(call, request, prompts)
    if request.stream:
        return EventStream(call, _events(writer, generation))
    return await _whole(writer, generation)


async def _events(writer: _Writer, answers: Generation) -> AsyncGenerator[bytes, None]:
    spellers: dict[int, _Speller] = {}
    async with answers as generation:
        async for index, delta in generation:
            first = index not in spellers
            speller = spellers.setdefault(index, _Speller(writer.tokenizer))
            text = writer.echo(index) + delta.text if first else delta.text
            if text or delta.token_ids:
                yield _piece(writer, speller, index, text, delta)
            if delta.finish_reason is not None:
                yield _end(writer, generation, index, delta)
        if writer.usage_apart:
            yield writer.event([], usage=generation.usage(), obole=generation.report())
    yield DONE


def _piece(writer: _Writer, speller: _Speller, index: int, text: str, delta: Delta) -> bytes:
    choice = CompletionChoice(index=index, text=text, logprobs=None, finish_reason=None)
    if delta.logprobs is not None:
        choice.logprobs = speller.spell(delta.token_ids, delta.logprobs)
    if writer.request.return_token_ids:
        choice.token_ids = list(delta.token_ids)
    return writer.event([choice], obole={"sources": delta.sources})


def _end(writer: _Writer, generation: Generation, index: int, delta: Delta) -> bytes:
    assert delta.finish_reason is not None
    reason: Any = finish_reason(delta.finish_reason, called=False)
    more: dict[str, Any] = {}
    if generation.complete and not writer.usage_apart:
        more["obole"] = generation.report()
        if writer.usage_last:
            more["usage"] = generation.usage()
    return writer.event([CompletionChoice(index=index, text="", logprobs=None, finish_reason=reason)], **more)


async def _whole(writer: _Writer, answers: Generation) -> Response:
    async with answers as generation:
        results = await generation.finish()

    def response() -> Response:
        choices = [_choice(writer, result, choice) for result in results for choice in result.choices]
        for index, choice in enumerate(choices):
            choice.index, choice.text = index, writer.echo(index) + choice.text
        usage = msgspec.convert(generation.usage(), Usage)
        return json_response(writer.completion(choices, usage=usage, obole=msgspec.convert(generation.report(), Report)))

    # log-probabilities of many tokens take long to write down
    return await asyncio.to_thread(response) if writer.request.logprobs is not None else response()


def _choice(writer: _Writer, result: Result, choice: Choice) -> CompletionChoice:
    request = writer.request
    reason: Any = finish_reason(choice.finish_reason, called=False)
    made = CompletionChoice(index=choice.index, text=choice.text, logprobs=None, finish_reason=reason)
    if request.logprobs is not None:
        ids, entries = list(choice.token_ids), list[TokenLogprob | None](choice.logprobs or ())
        if request.echo:
            ids, entries = [*result.prompt_ids, *ids], [*(result.prompt_logprobs or ()), *entries]
        made.logprobs = _Speller(writer.tokenizer).spell(ids, entries)
    if request.return_token_ids:
        made.token_ids, made.prompt_token_ids = list(choice.token_ids), list(result.prompt_ids)
    return made


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/completions",
        handle=complete,
        about="Continue a text.",
        body=CompletionRequest,
        answer=Completion,
        streams=True,
        limited=True,
        names={"prompt_logprobs": "logprobs"},
    ),
)
