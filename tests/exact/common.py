"""What "equal" means here: token ids, text, and the very bits of every log-probability."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

from obole import Engine, SamplingParams
from obole.engine.results import Choice, Result


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def fingerprint(choice: Choice) -> tuple[object, ...]:
    entries = [(e.token_id, bits(e.logprob), tuple((t, bits(p)) for t, p in e.top)) for e in choice.logprobs or ()]
    return choice.token_ids, choice.text, choice.finish_reason, tuple(entries)


def fingerprints(results: Sequence[Result]) -> list[tuple[object, ...]]:
    return [tuple(fingerprint(c) for c in r.choices) for r in results]


def random_prompt(rng: random.Random, length: int, vocab: int) -> list[int]:
    return [rng.randrange(3, vocab) for _ in range(length)]


def random_params(rng: random.Random, max_tokens: int) -> SamplingParams:
    """Greedy and sampled, plain and penalised, always with a seed and the top five log-probabilities."""
    sampled = rng.random() < 0.6
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=rng.choice([0.5, 1.0, 1.5]) if sampled else 0.0,
        top_k=rng.choice([0, 0, 20]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=rng.choice([0.0, 0.02]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        presence_penalty=rng.choice([0.0, 0.5]),
        seed=rng.randrange(2**32),
        ignore_eos=rng.random() < 0.5,
        logprobs=5,
    )


def check_idle(engine: Engine) -> None:
    """Nothing is running, no block is held, the books balance (invariant 5)."""
    assert not engine._scheduler.has_work
    engine._scheduler.check()
