"""Requests sent at given times, however long the answers take: what many clients do that do not know of each other.

A load that waits for answers sends less while the server is slow, and so leaves out the very requests that would have waited
(coordinated omission). Here every request has a time at which it was meant to be sent, and its latencies count from that.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import select
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from obole.bench.answers import Answer, read_answer
from obole.bench.client import Client, Line, Reply

Ended = Callable[[], None]
Hopeless = Callable[[Answer], bool]
GIVEN_UP = "given up"
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class OpenRun:
    """One round. `answers`: in the order of the requests, each `sent` when it was meant to be. `late`: seconds by which this
    process sent each of them later than that. `started` and `ended`: of the answers' clock."""

    answers: tuple[Answer, ...]
    late: tuple[float, ...]
    started: float
    ended: float
    client_seconds: float


if hasattr(selectors, "EpollSelector"):

    class Punctual(selectors.EpollSelector):
        """Wakes up to the microsecond: epoll itself waits whole milliseconds."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0:
                select.select([self.fileno()], [], [], timeout)
                timeout = 0
            return super().select(timeout)

    def _loop() -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(Punctual())

else:
    _loop = asyncio.new_event_loop


def run_punctually(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` with a loop whose timers are exact."""
    with asyncio.Runner(loop_factory=_loop) as runner:
        return runner.run(main)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Without pauses of the garbage collector, which would be taken for the server's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _GivenUpError(Exception):
    """The rest need not be waited for."""


async def run_open(
    client: Client, requests: Sequence[bytes], offsets: Sequence[float], ended: Ended, hopeless: Hopeless | None = None
) -> OpenRun:
    """Send each request at its time, in seconds after the beginning; `offsets` ascend. `ended` is called after each answer.

    A connection that is free is taken again, the one used last first; else a new one is opened, for which the request waits.
    `hopeless` sees each answer as it comes; once it says so, all others are given up, which is then their problem.
    """
    idle: list[Line] = []
    lines: list[Line] = []
    replies: list[Reply | None] = [None] * len(requests)
    began: list[float] = []

    async def one(number: int) -> None:
        if idle:
            line = idle.pop()
        else:
            line = client.line()
            lines.append(line)
        began.append(time.perf_counter())
        reply = replies[number] = await line.ask(requests[number])
        idle.append(line)
        ended()
        if hopeless is not None and hopeless(_answer(reply, started + offsets[number], 0.0)):
            raise _GivenUpError

    with no_collection():
        processor, started = time.process_time(), time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for number, offset in enumerate(offsets):
                    wait = started + offset - time.perf_counter()
                    # also when late, so that answers are read before more is sent
                    await asyncio.sleep(max(0.0, wait))
                    group.create_task(one(number))
        except* _GivenUpError:
            pass
        finally:
            for line in lines:
                line.close()
        over, spent = time.perf_counter(), time.process_time() - processor
    meant = [started + offset for offset in offsets]
    answers = [_answer(reply, at, over) for reply, at in zip(replies, meant, strict=True)]
    late = [at - due for at, due in zip(began, meant, strict=False)]  # what was given up may not have been sent
    return OpenRun(tuple(answers), tuple(late), started, over, spent)


def _answer(reply: Reply | None, meant: float, over: float) -> Answer:
    """Its latencies count from when it was meant to be sent."""
    if reply is None:
        return Answer(meant, over, problem=GIVEN_UP)
    return dataclasses.replace(read_answer(reply), sent=meant)
