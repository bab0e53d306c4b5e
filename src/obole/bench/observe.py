"""What an observer of the network sees of streamed answers: when bytes came, and how many; nothing of what is in them.

Reads of the socket stand for packets, as encryption leaves their sizes and times as they are (see `economics/leak.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from obole.bench.answers import read_answer
from obole.bench.client import Client, Connection
from obole.bench.load import CHAT, Load, Messages
from obole.bench.openloop import run_punctually

Reads = tuple[tuple[float, int], ...]  # seconds after the request was sent, and bytes


@dataclass(frozen=True, slots=True)
class Secret:
    """A request whose `label` the observer wants to know, asked with further `fields`. `first`: ask the same thing before, so
    that it is cached, with an answer of one token; what is seen of that does not count."""

    label: int
    messages: Messages
    fields: Mapping[str, Any]
    first: bool = False


@dataclass(frozen=True, slots=True)
class Sight:
    """What was seen of one secret; `problem`: why there is nothing to see. `first_token_seconds` and `whole_seconds` are what
    the client itself waited, who can read the stream."""

    label: int
    reads: Reads
    problem: str = ""
    first_token_seconds: float = 0.0
    whole_seconds: float = 0.0


class Tapped(Connection):
    """A connection that notes every read before anything is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[float, int]] = []

    def data_received(self, data: bytes) -> None:
        self.reads.append((time.perf_counter(), len(data)))
        super().data_received(data)


def observe(client: Client, load: Load, secrets: Sequence[Secret], at_once: int, seen: Callable[[], None]) -> list[Sight]:
    """Ask them in the order given, so many at a time, each over a connection of its own. `seen` is called after each."""
    return run_punctually(_observe(client, load, secrets, at_once, seen))


async def _observe(
    client: Client, load: Load, secrets: Sequence[Secret], at_once: int, seen: Callable[[], None]
) -> list[Sight]:
    free = asyncio.Semaphore(at_once)

    async def one(secret: Secret) -> Sight:
        async with free:
            if secret.first:
                await _ask(client, load.body(secret.messages, 1), secret.label)
            body = load.with_fields(secret.fields).body(secret.messages, load.output_tokens)
            found = await _ask(client, body, secret.label)
            seen()
            return found

    return list(await asyncio.gather(*map(one, secrets)))


async def _ask(client: Client, body: bytes, label: int) -> Sight:
    connection: Tapped | None = None
    try:
        async with asyncio.timeout(client.timeout):
            connection = await client.connect_as(Tapped)
            reply = await connection.ask(client.request("POST", CHAT, body))
    except TimeoutError:
        return Sight(label, (), f"no whole answer within {client.timeout:g} s")
    except (OSError, ValueError) as error:
        return Sight(label, (), str(error) or type(error).__name__)
    finally:
        if connection is not None:
            connection.close()
    answer = read_answer(reply)
    if answer.problem:
        return Sight(label, (), answer.problem)
    reads = tuple((at - reply.sent, count) for at, count in connection.reads)
    return Sight(label, reads, "", answer.first_token_seconds, answer.ended - answer.sent)
