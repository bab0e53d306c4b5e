"""The engine for asyncio: one thread computes, event loops submit requests and read streams.

Whatever takes long is kept off the event loops: texts become tokens in a small thread pool, everything else happens on the
engine thread, between two steps. The engine thread never waits for a reader: it hands all news of a step to a loop in one
call, and what a reader has not taken yet is joined.
"""

from __future__ import annotations

import asyncio
import atexit
import heapq
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import NamedTuple, TypeAlias

from obole.cache.tiers.reuse import Reuse
from obole.cache.tiers.store import StoreStats
from obole.engine.async_stream import AsyncStream, Feed
from obole.engine.engine import Engine, _Live
from obole.engine.prompts import Prompt, Tools, prompt_ids
from obole.engine.results import Forgotten
from obole.errors import ConfigError, EngineClosed, EngineFailure, InvalidRequest, Overloaded
from obole.types import SamplingParams

Call: TypeAlias = Callable[[], None]

TEXT_THREADS = 4  # a slow chat template must not hold up plain prompts
FRUITLESS_STEPS = 3  # steps in a row that raise without ending a request: no further one can be expected to do better
LOST = "The engine failed while it computed this answer: send the request again"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How busy the engine is: sequences (n for a request with n choices) and blocks of KV cache."""

    running: int
    waiting: int
    blocks_used: int
    blocks_total: int


class _Job(NamedTuple):
    live: _Live
    feed: Feed


class AsyncEngine:
    """Runs an `Engine` on a thread of its own, for any number of event loops. Takes the engine over: use it no more, except
    for what never changes (`info`, `tokenizer`, `max_context`, `has_chat_template`).

    `max_waiting`: sequences that may wait for a place in a step; more are turned away. Raises `ConfigError`.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 1024) -> None:
        if isinstance(max_waiting, bool) or not isinstance(max_waiting, int) or max_waiting < 1:
            raise ConfigError(f"max_waiting must be a whole number of at least 1, not {max_waiting!r}.")
        self.engine = engine
        self._max_waiting = max_waiting
        self._door = threading.Lock()  # of `_arriving` and `_shut`
        self._arriving = 0  # requests on their way to the scheduler
        self._shut = False  # the last call is in the queue
        self._closing = False
        self._failure: BaseException | None = None
        self._texts = ThreadPoolExecutor(TEXT_THREADS, "obole-text")
        self._calls: SimpleQueue[Call] = SimpleQueue()  # to be made on the engine thread, which owns all that follows
        self._open = True
        self._jobs: dict[str, _Job] = {}  # unfinished requests by id
        self._deadlines: list[tuple[float, str]] = []  # a heap; ids of finished requests stay until their time
        self._watchers: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []  # to be told when nothing is left to do
        self._fruitless = 0
        self._thread = threading.Thread(target=self._run, name="obole-engine", daemon=True)
        self._thread.start()
        atexit.register(self._halt)  # a thread that wants to leave the kernels after the interpreter is gone ends in an abort

    # -- for event loops --------------------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        tenant: str = "",
        tools: Tools | None = None,
        timeout: float | None = None,
    ) -> AsyncStream:
        """Queue a request; returns when the scheduler has accepted it.

        `timeout`: seconds from now after which the request is cancelled, whether it runs or waits; the stream is then
        `timed_out`. Raises `InvalidRequest` for what cannot be served, `Overloaded`, `EngineClosed` once `drain` or `close`
        was called, `EngineFailure` when the engine is not `healthy`. Cancelling this coroutine cancels the request.
        """
        deadline = math.inf if timeout is None else self.engine._clock() + _checked_timeout(timeout)
        loop = asyncio.get_running_loop()
        self._arrive()
        try:
            params = SamplingParams() if params is None else params
            live = await loop.run_in_executor(self._texts, self._prepare, prompt, params, tenant, tools)
            feed = Feed(loop, live.request, self.engine._unwanted)
            self._post(partial(self._admit, _Job(live, feed), deadline))
        except BaseException:
            self._arrived()
            raise
        try:
            await feed.accepted
        except asyncio.CancelledError:
            feed.cancel()
            raise
        return AsyncStream(feed)

    async def count_tokens(self, prompt: Prompt, tools: Tools | None = None) -> list[int]:
        """Token ids of a prompt, as `submit` would make them. Raises `InvalidRequest`, `EngineClosed`."""
        self._refuse()
        return list(await asyncio.get_running_loop().run_in_executor(self._texts, self._ids, prompt, tools))

    async def forget(self, tenant: str = "") -> Forgotten:
        """As `Engine.forget`. Raises `EngineClosed`."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Forgotten] = loop.create_future()
        self._post(partial(self._forget, tenant, loop, done))
        forgotten = await done
        await asyncio.to_thread(self.engine._flush)
        return forgotten

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, wait at most `seconds` for those that were accepted, then cancel what is left of them."""
        self._closing = True
        idle = asyncio.Event()
        try:
            self._post(partial(self._watch, asyncio.get_running_loop(), idle))
            try:
                await asyncio.wait_for(idle.wait(), seconds)
            except TimeoutError:
                self._post(self._cancel_all)
                await idle.wait()
        except EngineClosed:
            return  # then nothing is left

    async def close(self) -> None:
        """Cancel all requests, stop the thread and close the engine."""
        await self.drain(0)
        await asyncio.to_thread(self._halt)
        atexit.unregister(self._halt)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def healthy(self) -> bool:
        """False once the engine failed in a way that no further request can survive; `failure` is then the reason."""
        return self._failure is None

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def snapshot(self) -> Snapshot:
        """How busy the engine is, roughly, since a step may be under way. From any thread."""
        scheduler = self.engine._scheduler
        usage = scheduler.cache.usage()
        return Snapshot(scheduler.num_running, scheduler.num_waiting, usage.in_use, usage.total)

    def tier_stats(self) -> StoreStats | None:
        """What the tiers below the KV pool hold and have moved; None without any. From any thread."""
        return self.engine.tier_stats

    def reuse(self) -> Reuse:
        """As `Engine.reuse`."""
        return self.engine.reuse

    def _arrive(self) -> None:
        """Count a request among those that wait, though the scheduler does not know it yet."""
        with self._door:
            self._refuse()
            if self._arriving + self.engine._scheduler.num_waiting >= self._max_waiting:
                raise Overloaded(f"{self._max_waiting} sequences are waiting already: try again later.")
            self._arriving += 1

    def _arrived(self) -> None:
        with self._door:
            self._arriving -= 1

    def _refuse(self) -> None:
        if self._failure is not None:
            raise _failure("The engine has failed for good: start it again", self._failure)
        if self._closing:
            raise EngineClosed("The engine is shutting down: send the request to another one.")

    def _halt(self) -> None:
        self._texts.shutdown()  # first, since it may use what the engine closes
        with self._door:
            if not self._shut:
                self._shut = True
                self._calls.put(self._stop)
        self._thread.join()

    def _ids(self, prompt: Prompt, tools: Tools | None) -> tuple[int, ...]:
        self._refuse()
        engine = self.engine
        return prompt_ids(prompt, engine.tokenizer, engine._template, engine.vocab_size, tools=tools)

    def _prepare(self, prompt: Prompt, params: SamplingParams, tenant: str, tools: Tools | None) -> _Live:
        return self.engine._prepare(prompt, self._ids(prompt, tools), params, tenant, tools)

    def _post(self, call: Call) -> None:
        """Have something done by the engine thread before its next step. Every call that gets in is made."""
        with self._door:
            if self._shut:
                raise EngineClosed("The engine was closed: send the request to another one.")
            self._calls.put(call)

    # -- on the engine thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._open:
                try:
                    self._cycle()
                except BaseException as error:
                    self._fail(error)
            self.engine.close()
        finally:
            with self._door:
                self._shut = self._closing = True
            while not self._calls.empty():
                self._calls.get()()

    def _cycle(self) -> None:
        """Make the calls of others, waiting for one when there is nothing to compute; then one step."""
        while self._open and (not self._jobs or not self._calls.empty()):
            if self._calls.empty() and self.engine._when_idle():
                continue
            self._calls.get()()
        now = self.engine._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            late = self._jobs.get(heapq.heappop(self._deadlines)[1])
            if late is not None and not late.feed.cancelled:
                late.feed.timed_out = True
                late.feed.cancel()
        if self._jobs:
            self._hand_over(self._step())

    def _step(self) -> Exception | None:
        try:
            self.engine._step()
        except Exception as error:
            return error
        return None

    def _admit(self, job: _Job, deadline: float) -> None:
        self._arrived()
        live, feed = job
        if feed.cancelled:
            return
        try:
            self._refuse()
            self.engine._enter(live)
        except Exception as error:
            _tell(feed.loop, partial(feed.refuse, error))
            return
        self._jobs[live.request.id] = job
        if deadline < math.inf:
            heapq.heappush(self._deadlines, (deadline, live.request.id))
        if not _tell(feed.loop, feed.accept):
            feed.cancel()

    def _hand_over(self, error: Exception | None) -> None:
        """Give the news of a step to the loops, one call for each. `error`: what the step raised."""
        news: dict[asyncio.AbstractEventLoop, list[Call]] = {}
        over: list[_Job] = []
        for job in self._jobs.values():
            live, feed = job
            if not live.deltas:
                continue
            calls = news.setdefault(feed.loop, [])
            if not live.unfinished:
                over.append(job)
            if not live.unfinished and error is not None and not feed.cancelled:
                calls.append(partial(feed.fail, _failure(LOST, error), live.result))
            else:
                calls += [partial(feed.push, delta) for delta in live.deltas]
            live.deltas.clear()
        for job in over:
            del self._jobs[job.live.request.id]
            self.engine._drop(job.live)
        for loop, calls in news.items():
            if not _tell(loop, partial(_make, calls)):
                for job in self._jobs.values():
                    if job.feed.loop is loop:
                        job.feed.cancel()
        self._look_after(error, len(over))
        self._tell_watchers()

    def _look_after(self, error: Exception | None, ended: int) -> None:
        """Raise the error of a step if it is not the only one, and ended nothing that could be to blame."""
        self._fruitless = self._fruitless + 1 if error is not None and not ended else 0
        if error is None:
            return
        if self._fruitless >= FRUITLESS_STEPS:
            raise error
        for job in self._jobs.values():  # the step may have failed before it came to these
            if job.feed.cancelled:
                self.engine._unwanted.append(job.live.request.id)

    def _fail(self, error: BaseException) -> None:
        """The engine is beyond repair: end all requests, now and later."""
        self._failure = error
        for live, feed in self._jobs.values():
            _tell(feed.loop, partial(feed.fail, _failure(LOST, error), live.result))
        self._jobs.clear()
        self._deadlines.clear()
        self._tell_watchers()

    def _forget(self, tenant: str, loop: asyncio.AbstractEventLoop, done: asyncio.Future[Forgotten]) -> None:
        try:
            forgotten = self.engine._forget(tenant)
        except Exception as error:
            _tell(loop, partial(_settle, done, error))
        else:
            _tell(loop, partial(_settle, done, forgotten))

    def _watch(self, loop: asyncio.AbstractEventLoop, idle: asyncio.Event) -> None:
        self._watchers.append((loop, idle))
        self._tell_watchers()

    def _tell_watchers(self) -> None:
        if not self._jobs:
            for loop, idle in self._watchers:
                _tell(loop, idle.set)
            self._watchers.clear()

    def _cancel_all(self) -> None:
        for job in self._jobs.values():
            job.feed.cancel()

    def _stop(self) -> None:
        self._open = False


def _tell(loop: asyncio.AbstractEventLoop, call: Call) -> bool:
    """Make a call on a loop's thread; False if the loop is closed, so that nobody is left to hear of it."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        return False
    return True


def _settle(done: asyncio.Future[Forgotten], outcome: Forgotten | Exception) -> None:
    if done.cancelled():
        return
    if isinstance(outcome, Exception):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)


def _make(calls: list[Call]) -> None:
    for call in calls:
        call()


def _failure(message: str, cause: BaseException) -> EngineFailure:
    """A new exception for each stream: raising one changes it."""
    failure = EngineFailure(f"{message} ({cause!r}).")
    failure.__cause__ = cause
    return failure


def _checked_timeout(timeout: float) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 <= timeout < math.inf:
        raise InvalidRequest("timeout", f"timeout must be a number of seconds of at least 0, not {timeout!r}.")
    return timeout
