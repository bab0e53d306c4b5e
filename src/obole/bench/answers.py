"""What a streamed chat completion said, and when: from the bytes that arrived to numbers.

Format: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import msgspec

from obole.bench.client import Reply

DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; all times in seconds of one clock.

    `arrivals`: of events that brought something of the answer, be it one token or several. `prompt_tokens`, `cached_tokens`
    (of the prompt, found in the server's cache) and `output_tokens` are what the server says. `problem`: why the answer does
    not count; empty if it does. `receipts`: from a server that gives them. `accepted_tokens` and `rejected_tokens`: that were
    drafted, where the server says so. `digest`: of the text of the answer.
    """

    sent: float
    ended: float
    arrivals: tuple[float, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    problem: str = ""
    receipts: tuple[Mapping[str, Any], ...] = ()
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    digest: bytes = field(default=b"", compare=False)

    @property
    def first_token_seconds(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def intervals(self) -> list[float]:
        """Seconds between each event and the next."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]


def events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """When each event of a stream was complete, and its data. Lines may end in any of the three ways that the format allows
    but a single carriage return. What has no empty line after it is no event."""
    rest, data = b"", list[bytes]()
    for at, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield at, b"\n".join(data)
                data = []


def read_answer(reply: Reply) -> Answer:
    """The answer of a streamed chat completion that asked for its usage."""
    if reply.problem or reply.status != 200:
        return Answer(reply.sent, reply.ended, problem=reply.problem or f"{reply.status}: {told(reply.body)}")
    arrivals: list[float] = []
    usage: dict[str, Any] | None = None
    whole = False
    receipts: tuple[Mapping[str, Any], ...] = ()
    timings: Mapping[str, Any] = {}
    said: dict[int, list[str]] = {}
    for at, data in events(reply.pieces):
        if data == DONE:
            whole = True
            break
        try:
            chunk = msgspec.json.decode(data)
            if chunk.get("error"):
                return Answer(reply.sent, reply.ended, problem=told(data))
            if _says_something(chunk):
                arrivals.append(at)
            for choice in chunk.get("choices") or ():
                said.setdefault(choice.get("index", 0), []).append((choice.get("delta") or {}).get("content") or "")
            usage = chunk.get("usage") or usage
            receipts = tuple((chunk.get("obole") or {}).get("receipts") or receipts)
            timings = chunk.get("timings") or timings
        except (msgspec.DecodeError, AttributeError, TypeError):
            return Answer(reply.sent, reply.ended, problem=f"no chunk of a chat completion: {_short(data)}")
    if not whole:
        return Answer(reply.sent, reply.ended, problem="the stream broke off")
    if usage is None:
        return Answer(reply.sent, reply.ended, problem="no usage in the stream: the server does not know include_usage")
    if not arrivals:
        return Answer(reply.sent, reply.ended, problem="the answer is empty")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    counts = (int(usage.get("prompt_tokens") or 0), int(cached), int(usage.get("completion_tokens") or 0))
    drafts = _drafts(receipts, usage.get("completion_tokens_details") or {}, timings)
    return Answer(reply.sent, reply.ended, tuple(arrivals), *counts, "", receipts, *drafts, _digest(said))


def _drafts(receipts: Iterable[Mapping[str, Any]], details: Mapping[str, Any], timings: Mapping[str, Any]) -> tuple[int, int]:
    """Drafted tokens that were accepted and rejected: by receipts, by OpenAI's usage, or by the timings of llama.cpp."""
    drafted = sum(sum((receipt.get("drafted") or {}).values()) for receipt in receipts)
    if drafted:
        rejected = sum(sum(receipt["rejected"].values()) for receipt in receipts)
        return drafted - rejected, rejected
    if timings.get("draft_n"):
        accepted = int(timings.get("draft_n_accepted") or 0)
        return accepted, int(timings["draft_n"]) - accepted
    return int(details.get("accepted_prediction_tokens") or 0), int(details.get("rejected_prediction_tokens") or 0)


def told(body: bytes) -> str:
    """The message of an error in OpenAI's form, or the beginning of whatever it is."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return _short(body)


def _says_something(chunk: dict[str, Any]) -> bool:
    """Whether it holds part of an answer. Tokens without a text of their own show only where the server names sources."""
    if (chunk.get("obole") or {}).get("sources"):
        return True
    deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or ()]
    return any(delta.get(key) for delta in deltas for key in ("content", "reasoning_content", "tool_calls"))


def _digest(said: Mapping[int, Iterable[str]]) -> bytes:
    """Of the texts of all choices, however they were cut into events."""
    found = blake2b(digest_size=16)
    for index, parts in sorted(said.items()):
        found.update(f"{index}:{''.join(parts)}\0".encode("utf-8", "surrogatepass"))
    return found.digest()


def _short(data: bytes) -> str:
    text = data[:200].decode("utf-8", "replace").strip()
    return text or "nothing"
