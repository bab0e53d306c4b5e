"""Paced streams: records of one size at one rate, whatever was accepted, cached or drafted; and the same text."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from obole.engine.async_stream import joined
from obole.engine.results import Delta
from obole.server.pace import RECORD_BYTES, held, padding, shaped, singles
from obole.types import Source, TokenLogprob

from .asking import CHAT, TEXT, chat, refusal, said, strict, user
from .puppets import always_drafting, open_speaking

T = TypeVar("T")

BODY = {"prompt": "a", "max_tokens": 60, "stream": True}


def wire(served, **body) -> list[bytes]:
    """The chunks of a stream as they come."""
    with served.client.stream("POST", TEXT, json={**BODY, **body}) as response:
        return list(response.iter_raw())


def content(chunks: list[bytes]) -> str:
    blocks = [block for block in b"".join(chunks).decode().split("\n\n") if block.startswith("data: {")]
    return said(strict(block.removeprefix("data: ")) for block in blocks)


def test_a_paced_stream_is_made_of_records_and_not_before_its_time(tmp_path, serve_engine):
    served = serve_engine(always_drafting(open_speaking(tmp_path, ["one"])))
    expected = "".join(chr(97 + (i + 1) % 26) for i in range(60))
    start = time.monotonic()
    plain = wire(served, speculate="off", pace=100)
    assert time.monotonic() - start > 1.5  # a second to the first token, then one every hundredth of a second
    prediction = {"prediction": {"type": "content", "content": expected}, "speculate": "prediction"}
    again = wire(served, pace=100, **prediction)
    assert content(plain) == content(again) == expected
    assert b"model" in b"".join(plain)
    assert b'"sources":["prediction"]' in b"".join(again)
    for chunks in (plain, again):
        assert {len(b"".join(chunks)) % RECORD_BYTES} == {0}


def test_a_server_may_pace_all_answers(serve_speaking):
    served = serve_speaking(["one"], pace=50.0)
    start = time.monotonic()
    assert chat(served.client)["choices"][0]["message"]["content"] == "one"
    assert time.monotonic() - start > 1.9
    for wrong in (0, 51):
        body = {"messages": user(), "stream": True, "pace": wrong}
        assert refusal(served.client.post(CHAT, json=body))["param"] == "pace"
    assert refusal(served.client.post(CHAT, json={"messages": user(), "pace": 10}))["param"] == "pace"
    response = served.client.post(CHAT, json={"messages": user(), "stream": True, "pace": 40})
    assert content([response.content]) == "one"
    assert len(response.content) % RECORD_BYTES == 0


class Skipping(asyncio.SelectorEventLoop):
    """A loop that does not wait: where nothing else is to be done, its clock goes on to the next timer."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: Skipping) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None):
        self._loop.now += timeout or 0.0
        return super().select(0)


def skipping(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=Skipping) as runner:
        return runner.run(main)


async def sent(computed: Sequence[float], rate: float) -> list[tuple[float, int, bool]]:
    """When each record is sent, its bytes, and whether it holds an event. `computed`: when each event is there."""
    clock = asyncio.get_running_loop().time

    async def events() -> AsyncGenerator[bytes, None]:
        for at in computed:
            await asyncio.sleep(max(0.0, at - clock()))
            yield b"data: x\n\n"

    return [(round(clock(), 6), len(record), b"x" in record) async for record in shaped(events(), rate)]


def test_what_goes_over_the_wire_is_the_same_whatever_was_computed_when():
    at_once, late, steady = [0.0] * 60, [0.99] * 60, [0.9 + 0.009 * i for i in range(60)]
    bursts = [0.8 + 0.05 * (i // 5) for i in range(60)]
    expected = [(tick / 100, RECORD_BYTES, tick >= 100) for tick in range(1, 160)]
    for computed in (at_once, late, steady, bursts):
        assert skipping(sent(computed, 100.0)) == expected


def test_a_model_that_cannot_keep_the_pace_shows_by_padding_alone():
    records = skipping(sent([0.5, 1.45, 1.45, 1.45, 1.45], 10.0))
    assert [at for at, _, _ in records] == [tick / 10 for tick in range(1, 19)]
    assert [at for at, _, event in records if event] == [1.0, 1.5, 1.6, 1.7, 1.8]
    assert {length for _, length, _ in records} == {RECORD_BYTES}


@pytest.mark.parametrize(("seconds", "until"), [(0.01, 3.0), (1.9, 3.0), (3.0, 3.0), (3.2, 4.0)])
def test_whole_answers_are_held_to_a_whole_second(seconds, until):
    async def main() -> float:
        clock = asyncio.get_running_loop().time
        await held(seconds, tokens=64, rate=40.0)
        return seconds + clock()

    assert skipping(main()) == pytest.approx(until)


def test_padding_is_of_any_length_and_no_event():
    for count in range(50):
        made = padding(count)
        assert len(made) == count
        assert all(not line or line.startswith(b":") for line in made.split(b"\n"))
        assert not made or made.endswith(b"\n")


def test_events_of_any_length_are_whole_in_the_records():
    given_events = [b"data: " + b"x" * length + b"\n\n" for length in (1, 1015, 1016, 1017, 1018, 5000, 3)]

    async def main() -> bytes:
        async def events():
            for event in given_events:
                yield event

        made = [record async for record in shaped(events(), 2000.0)]
        assert all(len(record) == RECORD_BYTES for record in made)
        return b"".join(made)

    lines = [line for line in asyncio.run(main()).split(b"\n") if line and not line.startswith(b":")]
    assert lines == [event.strip() for event in given_events]


def test_closing_a_paced_stream_closes_what_it_reads():
    closed = []

    async def main() -> None:
        async def events():
            try:
                yield b"data: 1\n\n"
                await asyncio.sleep(60)
            finally:
                closed.append(True)

        stream = shaped(events(), 1000.0)
        async with asyncio.timeout(5):
            async for record in stream:
                if record.startswith(b"data"):
                    break
            await stream.aclose()

    asyncio.run(main())
    assert closed == [True]


@given(st.text(), st.integers(1, 9), st.booleans())
def test_deltas_token_by_token(text, count, scored):
    logprobs = tuple(TokenLogprob(i, -1.0) for i in range(count)) if scored else None
    delta = Delta(2, text, tuple(range(count)), None, None, (Source.MODEL,) * count, logprobs)
    parts = list(singles(delta))
    assert [part.token_ids for part in parts] == [(i,) for i in range(count)]
    assert joined(parts) == delta
