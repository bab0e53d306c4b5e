"""Parts of responses that several APIs share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from obole.text.tokenizer import Tokenizer
from obole.types import TokenLogprob

LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON does not have, as in OpenAI's API


class CachedTokens(Struct, kw_only=True):
    cached_tokens: int


class PredictionTokens(Struct, kw_only=True):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct, kw_only=True):
    """Token counts. `accepted`, `rejected`: tokens of the request's `prediction` that were, or were not, in the answer."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: PredictionTokens


class Report(Struct, kw_only=True):
    """`receipts`: of each choice, where its tokens came from and what they cost. `timed_out`: by the request's `timeout`."""

    receipts: list[dict[str, Any]]
    timed_out: bool


def token_spelling(tokenizer: Tokenizer | None, token_id: int) -> bytes:
    """The bytes of a token as logprobs show it: of control tokens, their names."""
    if tokenizer is None:
        return b""
    return tokenizer.token_bytes(token_id) or (tokenizer.token_text(token_id) or "").encode()


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(tokenizer: Tokenizer | None, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a choice in a chat completion."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        spelling = token_spelling(tokenizer, token_id)
        return {"token": spelling.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(spelling)}

    content = [
        {**entry(one.token_id, one.logprob), "top_logprobs": [entry(token_id, p) for token_id, p in one.top]} for one in entries
    ]
    return {"content": content, "refusal": None}
