"""Load for a server: streamed chat completions, so many at a time, each sent as soon as one before it has ended."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from obole.bench import texts
from obole.bench.answers import Answer, read_answer
from obole.bench.client import Client, Line, Reply
from obole.errors import ConfigError, InvalidRequest

CHAT = "/v1/chat/completions"
_ENGLISH = " ".join((texts.STORY, *texts.STORIES, *(question for _, question in texts.QUESTIONS)))
WORDS = tuple(sorted(set(re.findall(r"\b[a-z]{2,}\b", _ENGLISH))))
PROBES = (64, 256)  # words of the two prompts that tell how many tokens words have
WARMING = 32  # tokens of the answers that are not counted
LONG_OUTPUT = 16  # tokens of the answers to long prompts, which are about the prompt
LONG_SEED = 1 << 32  # added to seeds of long prompts, so that they begin like no other

Messages = Sequence[Mapping[str, Any]]
Ended = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of a server. Raises `InvalidRequest`.

    `prompts`: conversations to be sent in turn, or None for random words of about `prompt_tokens` tokens, chat template
    included, each prompt another. `long_prompt_every`: seconds between prompts of `long_prompt_tokens` tokens that are sent
    meanwhile; 0: none. `ignore_eos`: ask for answers of exactly `output_tokens` tokens by the field of that name, which not
    every server takes. `model_name`: what requests say for `model`; `extra`: further fields of every request.
    """

    concurrency: int = 8
    requests: int = 64
    prompt_tokens: int = 300
    output_tokens: int = 128
    prompts: tuple[Messages, ...] | None = None
    long_prompt_every: float = 0.0
    long_prompt_tokens: int = 4096
    ignore_eos: bool = True
    model_name: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("concurrency", "requests", "prompt_tokens", "output_tokens", "long_prompt_tokens"):
            if getattr(self, name) < 1:
                raise InvalidRequest(name, f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.prompts is not None and not self.prompts:
            raise InvalidRequest("prompts", "There are no prompts: give at least one.")
        if not 0 <= self.long_prompt_every < float("inf"):
            raise InvalidRequest(
                "long_prompt_every", f"long_prompt_every must be a number of seconds from 0, not {self.long_prompt_every}."
            )

    def with_fields(self, fields: Mapping[str, Any]) -> Load:
        """The same with further fields of every request."""
        return dataclasses.replace(self, extra={**self.extra, **fields})

    def body(self, messages: Messages, max_tokens: int) -> bytes:
        """A request for one answer."""
        asked: dict[str, Any] = {"messages": list(messages), "max_tokens": max_tokens, "temperature": 0}
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if self.model_name is not None:
            asked["model"] = self.model_name
        return json.dumps({**asked, **self.extra}).encode()


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many tokens words have with a server's model: `fixed` for what the chat template adds, `per_word` on average."""

    fixed: float
    per_word: float

    def words(self, tokens: int, field: str) -> int:
        """Words of a prompt of about so many tokens. Raises `InvalidRequest` if the template alone has more."""
        count = round((tokens - self.fixed) / self.per_word)
        if count < 1:
            raise InvalidRequest(field, f"The chat template alone has about {self.fixed:.0f} tokens: ask for longer prompts.")
        return count


@dataclass(frozen=True, slots=True)
class Run:
    """One round. `started` and `ended` are in seconds of the answers' clock; `client_seconds`: processor time of this process
    meanwhile. `long`: answers to the long prompts that were answered before the others were done."""

    answers: tuple[Answer, ...]
    long: tuple[Answer, ...]
    started: float
    ended: float
    client_seconds: float


def random_messages(words: int, *seed: int) -> list[dict[str, str]]:
    """A conversation of so many random words; the same seed, the same words."""
    chosen = np.random.default_rng(seed).choice(len(WORDS), words)
    return [{"role": "user", "content": " ".join(WORDS[i] for i in chosen)}]


async def find_lengths(client: Client, load: Load) -> Lengths:
    """Asks the server how many tokens two prompts have. Raises `ConfigError` when it cannot be measured."""
    line = client.line()
    try:
        few, many = [await _probe(client, line, load, words) for words in PROBES]
    finally:
        line.close()
    per_word = (many - few) / (PROBES[1] - PROBES[0])
    if per_word <= 0:
        raise ConfigError(f"{client.address.url} does not say how long prompts are (usage.prompt_tokens).")
    return Lengths(few - per_word * PROBES[0], per_word)


async def _probe(client: Client, line: Line, load: Load, words: int) -> int:
    body = load.body(random_messages(words, load.seed, words), 1)
    return _answered(client, read_answer(await line.ask(client.request("POST", CHAT, body)))).prompt_tokens


def _answered(client: Client, answer: Answer) -> Answer:
    if answer.problem:
        raise ConfigError(f"{client.address.url} cannot be measured: {answer.problem.rstrip('.')}.")
    return answer


def conversations(load: Load, lengths: Lengths | None, round_: int) -> list[Messages]:
    """Those of one round; another round has other random words, so that nothing of them is cached."""
    if load.prompts is not None:
        return [load.prompts[i % len(load.prompts)] for i in range(load.requests)]
    assert lengths is not None
    words = lengths.words(load.prompt_tokens, "prompt_tokens")
    return [random_messages(words, load.seed, round_, i) for i in range(load.requests)]


async def warm_up(client: Client, load: Load, lengths: Lengths | None) -> None:
    """As many requests at once as later, with short answers. Raises `ConfigError` if one fails."""
    tokens = min(WARMING, load.output_tokens)
    asked = itertools.islice(itertools.cycle(conversations(load, lengths, -1 % 2**32)), load.concurrency)
    requests = [client.request("POST", CHAT, load.body(messages, tokens)) for messages in asked]
    for reply in await _all(client, load.concurrency, requests, lambda: None):
        _answered(client, read_answer(reply))


async def run(client: Client, load: Load, lengths: Lengths | None, round_: int, ended: Ended) -> Run:
    """Send all requests of a round. `ended` is called after each of them."""
    asked = conversations(load, lengths, round_)
    requests = [client.request("POST", CHAT, load.body(messages, load.output_tokens)) for messages in asked]
    long_replies: list[Reply] = []
    processor, started = time.process_time(), time.perf_counter()
    disturbing = None
    if load.long_prompt_every:
        lengths = lengths or await find_lengths(client, load)
        disturbing = asyncio.create_task(_disturb(client, load, lengths, round_, long_replies))
    try:
        replies = await _all(client, load.concurrency, requests, ended)
    finally:
        if disturbing is not None:
            disturbing.cancel()
    over, spent = time.perf_counter(), time.process_time() - processor
    return Run(tuple(map(read_answer, replies)), tuple(map(read_answer, long_replies)), started, over, spent)


async def _all(client: Client, concurrency: int, requests: Sequence[bytes], ended: Ended) -> list[Reply]:
    """The replies, in the order in which they came."""
    left: Iterator[bytes] = iter(requests)
    replies: list[Reply] = []

    async def work() -> None:
        line = client.line()
        try:
            for request in left:  # shared by all
                replies.append(await line.ask(request))
                ended()
        finally:
            line.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(work())
    return replies


async def _disturb(client: Client, load: Load, lengths: Lengths, round_: int, replies: list[Reply]) -> None:
    """Send a long prompt every so many seconds, but not before the last one is answered."""
    words = lengths.words(load.long_prompt_tokens, "long_prompt_tokens")
    line = client.line()
    clock = asyncio.get_running_loop().time
    due = clock()
    try:
        for number in itertools.count():
            due = max(due + load.long_prompt_every, clock())
            await asyncio.sleep(due - clock())
            messages = random_messages(words, load.seed + LONG_SEED, round_, number)
            replies.append(await line.ask(client.request("POST", CHAT, load.body(messages, LONG_OUTPUT))))
    finally:
        line.close()
