"""Many clients with many kinds of requests, good ones, bad ones, and ones that are given up."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from obole.bench.answers import DONE, events
from obole.bench.client import Client, Line, Reply

from .asking import CHAT, TEXT, strict, user

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
VARIANTS = 3  # of each kind of request
PATIENCE = 0.15  # seconds, on average, until a request is given up that is not waited for
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"day": {"enum": [1, 2]}}}},
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A request whose answer is always the same, since it is greedy or has a seed."""

    path: str
    body: Mapping[str, Any]

    def request(self, client: Client) -> bytes:
        return client.request("POST", self.path, json.dumps(self.body).encode())

    def told(self, reply: Reply) -> Any:
        """What the answer comes to, without ids and times. Raises `AssertionError` for anything but a whole answer."""
        assert not reply.problem, reply.problem
        assert reply.status == 200, (reply.status, reply.body)
        if not self.body.get("stream"):
            return self.whole(strict(reply.body))
        found = [data for _, data in events(reply.pieces)]
        assert found.pop() == DONE
        return _choices(map(strict, found))

    def whole(self, document: dict[str, Any]) -> Any:
        if self.path == RESPONSES:
            return [item["content"] for item in document["output"]], document["status"]
        if self.path == MESSAGES:
            return document["content"], document["stop_reason"]
        return document.get("tokens") or _choices([document])


def _choices(documents: Any) -> list[tuple[tuple[int, ...], str]]:
    """Token ids and the reason of the end, of each choice."""
    ids: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    for document in documents:
        assert "error" not in document, document
        for choice in document["choices"]:
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    assert set(ids) == set(reasons), "a choice without an end"
    return [(tuple(ids[index]), reasons[index]) for index in sorted(ids)]


def good_requests() -> list[Asked]:
    """Of every kind, some variants."""
    return [asked for variant in range(VARIANTS) for asked in _kinds(variant)]


def _kinds(i: int) -> list[Asked]:
    ids = {"return_token_ids": True}
    chat = {"messages": user(f"Tell me about the number {i}."), "max_tokens": 20 + i, **ids}
    rules = [{"role": "system", "content": "You are short and exact. " * 12}, *user(f"What is {i} and {i}?")]
    text = {"prompt": f"Once upon a time, {i}", "max_tokens": 24, **ids}
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": i}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    return [
        Asked(CHAT, chat),
        Asked(CHAT, {**chat, "stream": True}),
        Asked(CHAT, {**chat, **sampled, "stream": True, "speculate": "off"}),
        Asked(CHAT, {**chat, "messages": rules}),  # a beginning that all have in common
        Asked(CHAT, {**chat, "messages": rules, "stream": True, "repetition_penalty": 1.1}),
        Asked(CHAT, {**chat, "response_format": form, "max_tokens": 40}),
        Asked(CHAT, {**chat, "response_format": {"type": "regex", "regex": f"[a-d]{{{9 + i}}}"}, "stream": True}),
        Asked(CHAT, {**chat, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 60}),
        Asked(CHAT, {**chat, "logprobs": True, "top_logprobs": 3, "stop": ["ee", "a b"]}),
        Asked(TEXT, {**text, "n": 3, **sampled}),
        Asked(TEXT, {**text, "stream": True, "ignore_eos": True, "prediction": {"type": "content", "content": "there was"}}),
        Asked(TEXT, {**text, "prompt": [f"one {i}", f"two {i}", f"three {i}"], "stream": True}),
        Asked(TEXT, {**text, "prompt": [list(range(20, 40 + i))], "echo": True, "logprobs": 1}),
        Asked(RESPONSES, {"input": f"Count to {i}.", "max_output_tokens": 20, "store": i == 0}),
        Asked(MESSAGES, {"messages": user(f"Count to {i}."), "max_tokens": 20}),
        Asked("/tokenize", {"prompt": f"Count to {i}."}),
    ]


LONG = json.dumps({"messages": user("word " * 40_000)}).encode()  # as long as is read before it is refused
BAD: Sequence[tuple[int, str, str, bytes]] = (  # status, method, path, body
    (400, "POST", CHAT, b'{"messages": [{"role": "user", "content": "hi"}],}'),
    (400, "POST", CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}'),
    (400, "POST", CHAT, json.dumps({"messages": user(), "max_tokens": 10**9}).encode()),
    (400, "POST", CHAT, json.dumps({"messages": user(), "no_such_field": 1}).encode()),
    (400, "POST", CHAT, LONG),
    (400, "POST", CHAT, json.dumps({"messages": user(), "response_format": {"type": "regex", "regex": "("}}).encode()),
    (400, "POST", TEXT, json.dumps({"prompt": ["fine", 5]}).encode()),
    (400, "POST", TEXT, json.dumps({"prompt": "x", "temperature": -1, "stream": True}).encode()),
    (400, "POST", MESSAGES, json.dumps({"messages": user()}).encode()),
    (400, "POST", RESPONSES, json.dumps({"input": []}).encode()),
    (404, "POST", CHAT, json.dumps({"messages": user(), "model": "nobody"}).encode()),
    (404, "GET", "/v1/nowhere", b""),
    (405, "GET", CHAT, b""),
)
GARBAGE = (b"POST / HTTP\r\n\r\n", b"\x16\x03\x01\x00\xa5\x01\x00\x00", b"GET / HTTP/1.1\r\nhost x\r\n\r\n", b"\r\n" * 40)


@dataclass(slots=True)
class Tally:
    """What came of the requests. `faults`: what must not have happened."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, what: str) -> None:
        self.counts["faults"] += 1
        if len(self.faults) < 20:
            self.faults.append(what)


class Crowd:
    """`connections` clients that together send a number of requests, drawn by chance with a seed.

    One in ten is given up after a time, at whatever point it is then; one in twenty is malformed.
    """

    def __init__(self, client: Client, good: Sequence[Asked], expected: Sequence[Any], connections: int, seed: int) -> None:
        self.client, self.good, self.expected, self.connections = client, good, expected, connections
        self.chance = random.Random(seed)
        self.tally = Tally()

    async def send(self, count: int) -> None:
        left = iter(range(count))

        async def work() -> None:
            line = Line(self.client)
            for _ in left:
                draw = self.chance.random()
                if draw < 0.10:
                    await self.give_up()
                elif draw < 0.15:
                    await self.malformed(line)
                else:
                    await self.proper(line)
            line.close()

        async with asyncio.TaskGroup() as group:
            for _ in range(self.connections):
                group.create_task(work())

    async def proper(self, line: Line) -> None:
        place = self.chance.randrange(len(self.good))
        asked = self.good[place]
        reply = await line.ask(asked.request(self.client))
        try:
            told = asked.told(reply)
        except AssertionError as error:
            self.tally.fault(f"{asked.path} {asked.body}: {error}")
            return
        self.tally.counts["answered"] += 1
        if told != self.expected[place]:
            self.tally.fault(f"{asked.path} {asked.body}: another answer than alone: {told}, not {self.expected[place]}")

    async def give_up(self) -> None:
        """On a connection of its own, which is closed without a word."""
        connection = await self.client.connect()
        asking = asyncio.ensure_future(connection.ask(self.chance.choice(self.good).request(self.client)))
        await asyncio.wait({asking}, timeout=self.chance.choice((0.0, 1.0)) * self.chance.expovariate(1 / PATIENCE))
        self.tally.counts["too late to give up" if asking.done() else "given up"] += 1
        asking.cancel()
        await asyncio.wait({asking})
        connection.close()

    async def malformed(self, line: Line) -> None:
        self.tally.counts["malformed"] += 1
        if self.chance.random() < 0.3:
            await self.garbage()
            return
        status, method, path, body = self.chance.choice(BAD)
        reply = await line.ask(self.client.request(method, path, body))
        if reply.status != status:
            self.tally.fault(
                f"{method} {path} {body[:80]!r}: {reply.status} {reply.problem} {reply.body[:200]!r}, not {status}"
            )

    async def garbage(self) -> None:
        """What is no HTTP, or only half a request."""
        connection = await self.client.connect()
        half = self.chance.choice(self.good).request(self.client)
        asking = asyncio.ensure_future(connection.ask(self.chance.choice((*GARBAGE, half[: len(half) // 2]))))
        await asyncio.wait({asking}, timeout=0.1)
        asking.cancel()
        await asyncio.wait({asking})
        if not asking.cancelled() and asking.exception() is None and not 400 <= asking.result().status < 500:
            self.tally.fault(f"no HTTP, and the answer is {asking.result().status}")
        connection.close()


async def answers(client: Client, good: Sequence[Asked]) -> list[Any]:
    """To each request, one after the other."""
    line = Line(client)
    found = [asked.told(await line.ask(asked.request(client))) for asked in good]
    line.close()
    return found


async def at_their_largest(client: Client) -> None:
    """Many prompts at once that are too long, so that what reading them takes is not taken for a leak later."""
    lines = [Line(client) for _ in range(16)]
    for _ in range(2):
        replies = await asyncio.gather(*(line.ask(client.request("POST", CHAT, LONG)) for line in lines))
        assert {reply.status for reply in replies} == {400}
    for line in lines:
        line.close()


async def watch(client: Client, look: Callable[[], None], waits: list[float], tally: Tally) -> None:
    """Until it is cancelled: /health on a connection of its own, again and again. `waits`: seconds for each answer."""
    line = Line(client)
    try:
        while True:
            reply = await line.ask(client.request("GET", "/health"))
            if reply.status != 200:
                tally.fault(f"/health: {reply.status} {reply.problem} {reply.body!r}")
            waits.append(reply.ended - reply.sent)
            look()
            await asyncio.sleep(0.1)
    finally:
        line.close()
