"""Paced streams: records of one size at one rate, whatever was accepted, cached or drafted; and the same text."""

from __future__ import annotations

import asyncio
import time

from hypothesis import given
from hypothesis import strategies as st

from obole.engine.async_stream import joined
from obole.engine.results import Delta
from obole.server.pace import RECORD_BYTES, padding, shaped, singles
from obole.types import Source, TokenLogprob

from .asking import CHAT, TEXT, chat, refusal, said, strict, user

BODY = {"prompt": "a", "max_tokens": 60, "stream": True}


def records(served, **body) -> tuple[list[bytes], list[float]]:
    """The chunks of a stream as they come, and when (in seconds)."""
    chunks, times = [], []
    with served.client.stream("POST", TEXT, json={**BODY, **body}) as response:
        for chunk in response.iter_raw():
            chunks.append(chunk)
            times.append(time.monotonic())
    return chunks, times


def content(chunks: list[bytes]) -> str:
    blocks = [block for block in b"".join(chunks).decode().split("\n\n") if block.startswith("data: {")]
    return said(strict(block.removeprefix("data: ")) for block in blocks)


def test_what_goes_over_the_wire_is_the_same_whatever_was_computed_when(serve_speaking):
    served = serve_speaking(["one"])
    expected = "".join(chr(97 + (i + 1) % 26) for i in range(60))
    plain, _ = records(served, speculate="off", pace=100)
    prediction = {"prediction": {"type": "content", "content": expected}, "speculate": "prediction"}
    again, times = records(served, pace=100, **prediction)
    assert content(plain) == content(again) == expected
    assert b"model" in b"".join(plain)
    assert b'"sources":["prediction"]' in b"".join(again)
    for chunks in (plain, again):
        assert {len(b"".join(chunks)) % RECORD_BYTES} == {0}
    assert abs(len(b"".join(plain)) - len(b"".join(again))) <= 2 * RECORD_BYTES  # the receipt, which is longer
    assert 1.5 < times[-1] - times[0] < 3.0  # a second to the first token, then one every hundredth of a second


def test_a_server_may_pace_all_answers(serve_speaking):
    served = serve_speaking(["one"], pace=50.0)
    start = time.monotonic()
    assert chat(served.client)["choices"][0]["message"]["content"] == "one"
    assert 1.9 < time.monotonic() - start < 4
    for wrong in (0, 51):
        body = {"messages": user(), "stream": True, "pace": wrong}
        assert refusal(served.client.post(CHAT, json=body))["param"] == "pace"
    assert refusal(served.client.post(CHAT, json={"messages": user(), "pace": 10}))["param"] == "pace"
    response = served.client.post(CHAT, json={"messages": user(), "stream": True, "pace": 40})
    assert content([response.content]) == "one"
    assert len(response.content) % RECORD_BYTES == 0


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
