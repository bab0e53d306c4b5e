"""The deltas of a request on their way from the engine thread to a reader on an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from itertools import chain
from types import TracebackType

from obole.engine.results import Delta, Result
from obole.errors import EngineFailure
from obole.types import Request


@dataclass(frozen=True, slots=True)
class _Pile:
    since: float
    deltas: list[Delta]


class Unread:
    """Deltas that nobody has taken yet. Those of one choice are taken as one, so that a slow reader catches up.

    Not thread-safe. `clock`: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._piles: dict[int, _Pile] = {}  # by choice, in the order in which they are taken

    def __bool__(self) -> bool:
        return bool(self._piles)

    @property
    def seconds(self) -> float:
        """How long the oldest delta has been here; 0 if there is none."""
        return self._clock() - min(pile.since for pile in self._piles.values()) if self._piles else 0.0

    def push(self, delta: Delta) -> None:
        pile = self._piles.get(delta.index)
        if pile is None:
            pile = self._piles[delta.index] = _Pile(self._clock(), [])
        pile.deltas.append(delta)
        if delta.result is not None:  # the last of its request is taken last
            self._piles[delta.index] = self._piles.pop(delta.index)

    def take(self) -> Delta:
        return joined(self._piles.pop(next(iter(self._piles))).deltas)


def joined(deltas: list[Delta]) -> Delta:
    """Consecutive deltas of one choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    asked = next((delta.logprobs for delta in deltas if delta.logprobs is not None), None)
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        sources=tuple(chain.from_iterable(delta.sources for delta in deltas)),
        logprobs=None if asked is None else tuple(chain.from_iterable(delta.logprobs or () for delta in deltas)),
    )


class Feed:
    """What the engine thread and the reader of one request share.

    `cancel` is for any thread, the engine thread marks who is `timed_out`, and all else belongs to the thread of the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, request: Request, unwanted: deque[str]) -> None:
        self.loop = loop
        self.request = request
        self.accepted: asyncio.Future[None] = loop.create_future()
        self.unread = Unread(loop.time)
        self._awaited: asyncio.Future[None] | None = None  # by the reader
        self.over = False
        self.result: Result | None = None
        self.failure: EngineFailure | None = None
        self.cancelled = False
        self.timed_out = False
        self._unwanted = unwanted

    def cancel(self) -> None:
        """End the request before the next step.

        Takes no lock, since a garbage collection may call it anywhere, and wakes nobody, since the engine thread only sleeps
        when there is nothing to cancel. A request that is not queued yet never will be.
        """
        if not self.over and not self.cancelled:
            self.cancelled = True
            self._unwanted.append(self.request.id)

    # -- on the loop's thread ---------------------------------------------------------------------------------------------

    def accept(self) -> None:
        if not self.accepted.done():
            self.accepted.set_result(None)

    def refuse(self, error: Exception) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(error)

    def push(self, delta: Delta) -> None:
        self.unread.push(delta)
        if delta.result is not None:
            self.result = delta.result
            self.over = True
        self._wake()

    def fail(self, failure: EngineFailure, result: Result | None) -> None:
        self.failure, self.result, self.over = failure, result, True
        self._wake()

    def news(self) -> asyncio.Future[None]:
        """Done as soon as something is pushed, or fails. There is one reader, so only the last one that was given counts."""
        self._awaited = self.loop.create_future()
        return self._awaited

    def _wake(self) -> None:
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)


class AsyncStream(AsyncIterator[Delta]):
    """The deltas of one request, for one reader on the loop that submitted it; the last one carries the `Result`.

    A reader that is slower than the engine gets longer deltas, not more of them. `async for` raises `EngineFailure`, after
    the deltas that came before, when the engine failed. Leaving the `async with` block of a stream, or dropping the stream,
    cancels the request if it is not finished.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.id = feed.request.id
        self.prompt_tokens = len(feed.request.prompt_ids)

    async def __anext__(self) -> Delta:
        feed = self._feed
        while not feed.unread:
            if feed.failure is not None:
                raise feed.failure
            if feed.over:
                raise StopAsyncIteration
            await feed.news()
        return feed.unread.take()

    @property
    def result(self) -> Result | None:
        """The whole result once the request has ended (also when it was cancelled), else None."""
        return self._feed.result

    @property
    def timed_out(self) -> bool:
        """Whether the request was cancelled because its time was up."""
        return self._feed.timed_out

    @property
    def stalled_seconds(self) -> float:
        """How long the oldest delta that was not taken yet has been waiting for the reader."""
        return self._feed.unread.seconds

    def cancel(self) -> None:
        """End the request before the next step. From any thread, as often as you like. The last delta then says so."""
        self._feed.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()
