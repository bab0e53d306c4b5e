"""What the engine hands back: plain, frozen, ready for JSON."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from obole.types import FinishReason, Receipt, Source, TokenLogprob


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `token_ids` includes the token that ended it; `text` does not (nor a stop string)."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Result:
    """All answers to one request. The shorthand properties speak of the first choice."""

    id: str
    prompt_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def receipt(self) -> Receipt:
        return self.choices[0].receipt

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's form."""
        completion = sum(c.receipt.output_tokens for c in self.choices)
        return {
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": completion,
            "total_tokens": len(self.prompt_ids) + completion,
            "prompt_tokens_details": {"cached_tokens": self.choices[0].receipt.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(c.receipt.sources.get(Source.PREDICTION, 0) for c in self.choices),
                "rejected_prediction_tokens": sum(c.receipt.rejected.get(Source.PREDICTION, 0) for c in self.choices),
            },
        }

    def to_json(self) -> dict[str, Any]:
        """The form printed by `obole run --json`; with n > 1 the further answers are under `choices`."""
        first, *more = [choice_json(c) for c in self.choices]
        document = {"id": self.id, **first, "usage": self.usage}
        if more:
            document["choices"] = [choice_json(c) for c in self.choices]
        if self.prompt_logprobs is not None:
            document["prompt_logprobs"] = [p and logprob_json(p) for p in self.prompt_logprobs]
        return document


def choice_json(choice: Choice) -> dict[str, Any]:
    document: dict[str, Any] = {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": str(choice.finish_reason),
        "receipt": receipt_json(choice.receipt),
    }
    if choice.logprobs is not None:
        document["logprobs"] = [logprob_json(p) for p in choice.logprobs]
    return document


def receipt_json(receipt: Receipt) -> dict[str, Any]:
    return dataclasses.asdict(receipt)


def logprob_json(entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": entry.token_id,
        "logprob": entry.logprob,
        "top": [{"token_id": t, "logprob": p} for t, p in entry.top],
    }


@dataclass(frozen=True, slots=True)
class Delta:
    """News of one choice while streaming; `result` comes with the last delta of the request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    result: Result | None = None
    sources: tuple[Source, ...] = ()  # who proposed each of `token_ids`
    logprobs: tuple[TokenLogprob, ...] | None = None  # of each of `token_ids`, where asked for


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities (natural) of given tokens; the first token has none, since nothing stands before it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    receipt: Receipt

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood over all tokens but the first; NaN for a single token."""
        known = [p for p in self.logprobs if p is not None]
        return -math.fsum(known) / len(known) if known else math.nan

    @property
    def perplexity(self) -> float:
        return perplexity_of(self.nll)


def perplexity_of(nll: float) -> float:
    """exp(nll); infinite where that is beyond a float."""
    return math.exp(nll) if nll < 709 else math.inf


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was deleted of a tenant: blocks in the pool, and blocks in the tiers below; a block may have been in both."""

    device_blocks: int
    tier_blocks: int


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine loaded and what it took of the machine. Sizes are bytes, times seconds."""

    model: str
    architecture: str
    parameters: int
    weight_bytes: int
    weights_digest: str
    kernels: str
    threads: int
    kv_dtype: str
    kv_bytes: int
    kv_tokens: int  # what the pool holds if all of it serves full-attention layers
    kv_bytes_per_token: int
    max_context: int
    load_seconds: float
