"""From prompts to deltas: everything about answering that is the same in all APIs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from obole.engine.async_stream import AsyncStream
from obole.engine.prompts import Prompt, oversize
from obole.engine.results import Delta, Result, receipt_json
from obole.errors import EngineFailure
from obole.prices import price
from obole.server.endpoint import Call
from obole.server.errors import DRAINING_SECONDS, ApiError, refused
from obole.server.pace import held, singles
from obole.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt for the engine."""

    prompt: Prompt
    params: SamplingParams
    tools: Sequence[dict[str, Any]] | None = None


class Generation:
    """The answers to one HTTP request: an async iterator of (choice, delta), choices being numbered across prompts.

    Use it as an async context: leaving cancels what has not ended. Raises `EngineFailure` while iterating when the engine
    failed, and `ApiError` (503) when the server cancelled the answer because its time to shut down was up.
    """

    def __init__(self, call: Call, streams: list[AsyncStream], choices: int) -> None:
        self._call = call
        self._streams = streams
        self._choices = choices
        self._last: dict[int, float] = {}  # when the last token of a choice came
        self._ended = 0

    def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        return self._paced(self._call.pace) if self._call.pace else self._deltas()

    async def _paced(self, rate: float) -> AsyncIterator[tuple[int, Delta]]:
        """Token by token; what is not streamed is held."""
        record, tokens = self._call.record, 0
        async for choice, delta in self._deltas():
            tokens += len(delta.token_ids)
            for one in singles(delta):
                yield choice, one
        if not record.streamed:
            await held(time.monotonic() - record.arrived, tokens, rate)

    async def _deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        if len(self._streams) == 1:
            async for delta in self._streams[0]:
                self._note(0, delta)
                self._passed_on(0, delta)
                yield delta.index, delta
            return
        async for place, delta in _merged(self._take, len(self._streams)):
            self._passed_on(place, delta)
            yield place * self._choices + delta.index, delta

    async def _take(self, place: int) -> Delta:
        """Raises `StopAsyncIteration` at the end of the stream."""
        delta = await anext(self._streams[place])
        self._note(place, delta)
        return delta

    async def finish(self) -> list[Result]:
        """Wait for the end; the results, one for each prompt."""
        async for _ in self:
            pass
        return self.results

    @property
    def results(self) -> list[Result]:
        """The results so far: of prompts whose answers have all ended."""
        return [stream.result for stream in self._streams if stream.result is not None]

    @property
    def complete(self) -> bool:
        """Whether every answer has ended, and its last delta has been taken."""
        return self._ended == len(self._streams)

    @property
    def timed_out(self) -> bool:
        return any(stream.timed_out for stream in self._streams)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; known from the beginning."""
        return sum(stream.prompt_tokens for stream in self._streams)

    def cancel(self) -> None:
        """End the answers before the next step; reading them then raises `ApiError`."""
        for stream in self._streams:
            stream.cancel()

    async def settle(self) -> None:
        """For a client that has left: end the answers, and book what was computed until then. Takes a step of the engine."""
        self.cancel()
        for place, stream in enumerate(self._streams):
            with suppress(EngineFailure):
                async for delta in stream:
                    self._note(place, delta)

    def usage(self) -> dict[str, Any]:
        """Token counts of all prompts in OpenAI's form."""
        first, *more = [result.usage for result in self.results]
        for usage in more:
            first = _added(first, usage)
        return first

    def report(self) -> dict[str, Any]:
        """What responses have under `obole`: the receipt of every choice, and whether the request's own time was up.

        With a price list each has its `price`; the prompt is charged with its first answer.
        """
        prices = self._call.server.prices
        receipts = []
        for choice in (choice for result in self.results for choice in result.choices):
            document = receipt_json(choice.receipt)
            if prices is not None:
                document["price"] = price(choice.receipt, prices, prompt=choice.index == 0).to_json()
            receipts.append(document)
        return {"receipts": receipts, "timed_out": self.timed_out}

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def _note(self, place: int, delta: Delta) -> None:
        """Book a delta as soon as it is taken: metrics and log; the place in the queue of the tenant."""
        metrics, record = self._call.server.metrics, self._call.record
        if delta.token_ids:
            now = time.monotonic()
            choice = place * self._choices + delta.index
            since = self._last.get(choice)
            self._last[choice] = now
            if record.first_token is None:
                record.first_token = now
                metrics.first.observe(now - record.arrived)
                if self._call.place is not None:
                    self._call.place.started()
            if since is not None:
                count = len(delta.token_ids)
                metrics.between.observe((now - since) / count, count)
            metrics.tokens(delta)
        if delta.result is not None:
            record.results.append(delta.result)
            metrics.result(self._call.tenant.index, delta.result)

    def _passed_on(self, place: int, delta: Delta) -> None:
        """A delta goes to the client now. Raises `ApiError` if the server has cut the answer short."""
        if delta.result is None:
            return
        self._ended += 1
        if self.complete:
            self._call.server.metrics.whole.observe(time.monotonic() - self._call.record.arrived)
        cut = any(choice.finish_reason is FinishReason.CANCELLED for choice in delta.result.choices)
        if cut and not self._streams[place].timed_out:
            text = "The server shut down before this answer was complete."
            raise ApiError(503, text, code="shutting_down", retry_after=DRAINING_SECONDS)


async def start(call: Call, asks: Sequence[Ask], timeout: float | None = None) -> Generation:
    """Have all prompts accepted by the engine, or none. `timeout`: seconds until what has not ended is cut short.

    Raises `InvalidRequest`, `Overloaded`, `EngineClosed`, `EngineFailure`.
    """
    engine = call.server.engine
    for ask in asks:
        check_size(ask.prompt, engine.engine.max_context)
    call.server.metrics.requests.labels(call.tenant.index).inc()
    if call.server.log.prompts:
        call.record.prompt = [ask.prompt for ask in asks]

    async def one(ask: Ask) -> AsyncStream:
        return await engine.submit(ask.prompt, ask.params, tenant=call.tenant.salt, tools=ask.tools, timeout=timeout)

    streams = [await one(asks[0])] if len(asks) == 1 else await _all_or_none(map(one, asks))
    generation = Generation(call, streams, asks[0].params.n)
    call.settle = generation.settle
    return generation


async def _all_or_none(asked: Iterable[Awaitable[AsyncStream]]) -> list[AsyncStream]:
    found = await asyncio.gather(*asked, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each  # the streams of the others are dropped, which cancels them
    return [each for each in found if isinstance(each, AsyncStream)]


def check_size(prompt: Prompt, max_context: int) -> None:
    """Refuse what cannot fit into the context, however its text becomes tokens. Raises `ApiError`."""
    messages = not isinstance(prompt, str) and any(isinstance(piece, dict) for piece in prompt)
    texts = [prompt] if isinstance(prompt, str) else list(_texts(prompt)) if messages else []
    count = oversize(texts, max_context)
    if count is not None:
        problem = f"The prompt has {count} bytes, far more than the context of {max_context} tokens can hold: shorten it."
        raise refused("messages" if messages else "prompt", problem)


def _texts(value: Any) -> list[str]:
    """All strings within some JSON data."""
    found, open_ = [], [value]
    while open_:
        one = open_.pop()
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, dict):
            open_ += one.values()
        elif isinstance(one, list | tuple):
            open_ += one
    return found


def _added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {key: _added(value, other[key]) if isinstance(value, dict) else value + other[key] for key, value in one.items()}


async def _merged(take: Callable[[int], Awaitable[Delta]], count: int) -> AsyncIterator[tuple[int, Delta]]:
    """The deltas of so many streams as they come, with the place of their stream; one of each is taken ahead."""
    nexts = {asyncio.ensure_future(take(place)): place for place in range(count)}
    try:
        while nexts:
            done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = nexts.pop(task)
                try:
                    delta = task.result()
                except StopAsyncIteration:
                    continue
                yield place, delta
                nexts[asyncio.ensure_future(take(place))] = place
    finally:
        for task in nexts:
            task.cancel()
