"""Has an engine read prompts and decode, and takes the time: what the benchmarks of whole steps have in common.

Prompts are random token ids, each run under a tenant of its own, so that nothing is found in the prefix cache. Decoding is
greedy, without drafts, and goes past the end of sequence.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from obole.bench import inside
from obole.config import BLOCK_SIZE
from obole.engine.engine import Engine, Stream
from obole.errors import InvalidRequest
from obole.types import Receipt, SamplingParams


@dataclass(frozen=True, slots=True)
class Decoding:
    """Steps that gave each of `sequences` sequences one token. Bytes are those of all the steps together."""

    sequences: int
    step_seconds: tuple[float, ...]
    weight_bytes: int
    kv_bytes: int

    @property
    def seconds(self) -> float:
        return sum(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        return self.sequences * len(self.step_seconds) / self.seconds

    @property
    def bytes_per_step(self) -> float:
        return (self.weight_bytes + self.kv_bytes) / len(self.step_seconds)


def check_repeat(repeat: int) -> None:
    if repeat < 1:
        raise InvalidRequest("repeat", f"repeat must be at least 1, not {repeat}.")


def check_length(engine: Engine, field: str, prompt: int, output: int) -> None:
    """Refuse what one sequence cannot have. `field` names the option to change."""
    if prompt < 1 or output < 1:
        raise InvalidRequest(field, f"A prompt of {prompt} and {output} further tokens: both must be at least 1.")
    if prompt + output > engine.max_context:
        raise InvalidRequest(
            field,
            f"{prompt} tokens and {output} more do not fit into this model's context of {engine.max_context}: ask for fewer.",
        )


def check_sequences(engine: Engine, sequences: int, prompt: int, output: int) -> None:
    """Refuse more sequences than take part in one step, or than the KV pool holds."""
    limits = inside.scheduling(engine)
    most = min(limits.max_sequences, limits.max_batch_tokens)
    if not 1 <= sequences <= most:
        raise InvalidRequest("sequences", f"sequences must be from 1 to {most} (see max_sequences), not {sequences}.")
    # before all prompts are read, the first sequences have decoded some tokens already
    length = prompt + output + prompting_steps(engine, sequences, prompt)
    check_length(engine, "sequences", prompt, length - prompt)
    needed = sequences * -(-length // BLOCK_SIZE) * BLOCK_SIZE
    if needed > engine.info.kv_tokens:
        raise InvalidRequest(
            "sequences", f"{sequences} sequences need room for {needed} tokens, but the KV pool holds {engine.info.kv_tokens}."
        )


def prompting_steps(engine: Engine, sequences: int, prompt: int) -> int:
    """Steps until all prompts are read, at most: decoding sequences take one row of each, prompts the rest."""
    budget = inside.scheduling(engine).max_batch_tokens
    return -(-sequences * prompt // max(budget - sequences, 1)) + 1


def prompts(engine: Engine, count: int, length: int, seed: int) -> list[list[int]]:
    ids: list[list[int]] = np.random.default_rng(seed).integers(0, inside.vocab_size(engine), (count, length)).tolist()
    return ids


def read_prompt(engine: Engine, length: int, seed: int) -> Receipt:
    """The receipt of a prompt that was read and continued by one token."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, speculate="off")
    [result] = engine.generate(prompts(engine, 1, length, seed), params, tenant=_new_tenant())
    return result.receipt


def decode(
    engine: Engine,
    sequences: int,
    context: int,
    steps: int,
    seed: int,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Decoding:
    """Decode `steps` tokens for each of `sequences` sequences at once, after prompts of `context` tokens.

    Reading the prompts is not part of it. `around()` is entered for the steps that are timed. Raises `InvalidRequest` for
    what does not fit, before anything is computed.
    """
    check_sequences(engine, sequences, context, steps)
    params = SamplingParams(ignore_eos=True, speculate="off")
    tenant = _new_tenant()
    streams: list[Stream] = []
    seconds: list[float] = []
    try:
        streams += [engine.stream(prompt, params, tenant=tenant) for prompt in prompts(engine, sequences, context, seed)]
        for stream in streams:
            next(stream)
        before = inside.bytes_read(streams)
        with around():
            for _ in range(steps):
                start = time.perf_counter()
                inside.step(engine)
                seconds.append(time.perf_counter() - start)
        if inside.running(engine) != sequences:
            raise RuntimeError(f"Only {inside.running(engine)} of {sequences} sequences were decoding.")
        after = inside.bytes_read(streams)
    finally:
        for stream in streams:
            stream.close()
    return Decoding(sequences, tuple(seconds), after.weights - before.weights, after.kv - before.kv)


def _new_tenant() -> str:
    return f"benchmark {secrets.token_hex(8)}"
