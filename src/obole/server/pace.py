"""Answers that give nothing away by their timing, to whoever sees the sizes and times of packets but not what is in them.

How many tokens were accepted, drafted or cached shows in when text comes and how much of it. A paced stream sends records of
one size at one rate, a token in each, or nothing but padding while the next token is not there yet. Its length still tells how
many tokens the answer has, and a pace that the model cannot keep up with shows where it fell behind. See the attack in
"Remote Timing Attacks on Efficient Language Model Inference", https://arxiv.org/abs/2410.17175.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from dataclasses import replace

from obole.engine.results import Delta

RECORD_BYTES = 1024  # more than one token's event; those that are longer take several records


async def shaped(events: AsyncGenerator[bytes, None], rate: float) -> AsyncGenerator[bytes, None]:
    """`rate` records a second, `RECORD_BYTES` each, that hold the events one by one. The first begins on a whole second."""
    clock = asyncio.get_running_loop().time
    start, tick, begun = clock(), 0, False
    first_ticks = max(1, round(rate))  # so that the time to the first token is known to the second only
    rest = b""
    coming = asyncio.ensure_future(anext(events))
    try:
        while True:
            tick += 1
            await asyncio.sleep(max(0.0, start + tick / rate - clock()))
            if not rest and coming.done() and (begun or tick % first_ticks == 0):
                try:
                    rest = coming.result()
                except StopAsyncIteration:
                    return
                begun = True
                coming = asyncio.ensure_future(anext(events))
            record, rest = rest[:RECORD_BYTES], rest[RECORD_BYTES:]
            yield record + padding(RECORD_BYTES - len(record))
    finally:
        coming.cancel()
        with suppress(asyncio.CancelledError, StopAsyncIteration, Exception):
            await coming
        await events.aclose()


def padding(count: int) -> bytes:
    """So many bytes that readers of server-sent events pass over, between two events."""
    return b"\n" * count if count < 3 else b":" + b" " * (count - 3) + b"\n\n"


def singles(delta: Delta) -> Iterator[Delta]:
    """A delta token by token, each with its share of the text."""
    count = len(delta.token_ids)
    if count < 2:
        yield delta
        return
    length = len(delta.text)
    for i in range(count):
        one = slice(i, i + 1)
        last = i == count - 1
        yield replace(
            delta,
            text=delta.text[length * i // count : length * (i + 1) // count],
            token_ids=delta.token_ids[one],
            sources=delta.sources[one],
            logprobs=None if delta.logprobs is None else delta.logprobs[one],
            finish_reason=delta.finish_reason if last else None,
            result=delta.result if last else None,
        )


async def held(seconds: float, tokens: int, rate: float) -> None:
    """Hold an answer that is not streamed, `seconds` after its request came, for as long as its tokens take at the rate."""
    due = max(math.ceil(seconds), math.ceil(tokens / rate) + 1)
    await asyncio.sleep(due - seconds)
