"""A server whose streams have known contents and known pauses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from obole.bench.client import Address

FIRST, BETWEEN = 0.05, 0.02  # seconds: until the first token, from one to the next
TEMPLATE_TOKENS = 11
Tell = Callable[[dict[str, Any]], bytes | None]  # a whole response in place of a stream; None: the stream


def chunk(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def refusal(status: int, message: str) -> bytes:
    body = json.dumps({"error": {"message": message}}).encode()
    return f"HTTP/1.1 {status} No\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class Scripted:
    """Answers every chat with as many tokens as it asks for, three tokens a word in prompts. `seen`: bodies of requests.

    `answers`: after so many it closes a connection, as if nobody had said that it would be kept.
    """

    def __init__(self, tell: Tell = lambda _: None, answers: int = 1000) -> None:
        self.tell = tell
        self.answers = answers
        self.seen: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.connections = self.open = self.most = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            for _ in range(self.answers):
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head.decode())
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.seen.append(body)
                self.open += 1
                self.most = max(self.most, self.open)
                if (told := self.tell(body)) is not None:
                    writer.write(told)
                    if b"connection: close" in told:
                        return
                else:
                    await self.stream(writer, body)
                self.open -= 1
                if b"connection: close" in head:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def stream(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        def send(data: bytes) -> None:
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        send(chunk(**delta(role="assistant", content="")))  # nothing of the answer yet
        for i in range(body["max_tokens"]):
            await asyncio.sleep(BETWEEN if i else FIRST)
            send(chunk(**delta(content="x")))
        words = len(body["messages"][-1]["content"].split())
        usage = {"prompt_tokens": TEMPLATE_TOKENS + 3 * words, "completion_tokens": body["max_tokens"]}
        send(chunk(choices=[], usage={**usage, "prompt_tokens_details": {"cached_tokens": 2}}))
        send(b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


@asynccontextmanager
async def scripted(server: Scripted) -> AsyncIterator[Address]:
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    async with listening:
        yield Address("http", "127.0.0.1", listening.sockets[0].getsockname()[1])
