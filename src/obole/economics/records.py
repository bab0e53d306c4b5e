"""What a log or a trace says of one request: plain data, in whatever format it came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A request with its words. `answer` is None where the log has none. Token counts are those of the log, or None.

    `key`: what a batch calls the request, by which its answer is found in another file.
    """

    prompt: str | list[int] | Messages
    answer: str | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    tenant: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A request of a trace: how long it and its answer are and, unless `keys` is None, hashes of the blocks of its prompt, each
    of which stands for all before it too. `at`: seconds, by one clock for all or, of an agent's `session`, by its own."""

    input_tokens: int
    output_tokens: int
    at: float | None = None
    session: int | None = None
    keys: list[int] | None = None
    block_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer of a batch, whose request is in another file."""

    key: str
    answer: str


Record = Text | Blocks
