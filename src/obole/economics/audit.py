"""What a log says about its traffic: what could be copied, found in a cache or moved to the front, and what it is worth.

`Audit` takes one record after another and keeps a sample of prompts, the memory of drafts, and when blocks were used.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from obole.config import BLOCK_SIZE
from obole.economics.machine import Machine
from obole.economics.passages import Sample
from obole.economics.records import Blocks, Messages, Text
from obole.economics.replay import Answered, CopyFinder, Copying, Drafted, Replay
from obole.economics.stack import HitCurve, StackDistances

Encode = Callable[[Any, Any], Sequence[int]]  # prompt and tools -> token ids
MODES = ("lookup", "memory", "auto")  # of drafting: the request's own text, what its tenant left, both
NOTHING = 0.05  # share of an answer that drafts bring: below, it has no reusable passage
KEPT = 10_000  # latencies kept of each kind, for percentiles
RERUN = 64  # prompts kept for a real run


@dataclass(slots=True)
class Values:
    """Evenly drawn values of a stream, for percentiles."""

    seen: int = 0
    kept: list[float] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, value: float) -> None:
        self.seen += 1
        place = self._random.randrange(self.seen)
        if len(self.kept) < KEPT:
            self.kept.append(value)
        elif place < KEPT:
            self.kept[place] = value

    def percentile(self, share: float) -> float | None:
        return float(np.percentile(self.kept, share)) if self.kept else None


@dataclass(slots=True)
class Total:
    """What drafts of one mode bring for all answers together."""

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    seconds: float = 0.0
    plain: float = 0.0
    accepted: Counter[str] = field(default_factory=Counter)

    def add(self, one: Drafted) -> None:
        self.tokens += one.tokens
        self.passes += one.passes
        self.drafted += one.drafted
        self.seconds += one.seconds
        self.plain += one.plain
        self.accepted.update(one.accepted)


@dataclass(slots=True)
class Audit:
    """`machine`: None for traces without words, of which nothing is predicted. `share`: of the answers that are followed token
    by token, drawn evenly. `memory_bytes`: of all tenants' earlier texts, as in the engine."""

    machine: Machine | None
    encode: Encode | None
    tokens_of: Callable[[str], Sequence[int]] | None
    most_blocks: int = 1 << 20
    share: float = 1.0
    memory_bytes: int = 64 << 20
    kinds: Counter[str] = field(default_factory=Counter)
    tenants: set[int] = field(default_factory=set)
    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    answered: int = 0
    logged_cached: int = 0
    logged_prompts: int = 0
    with_blocks: int = 0
    block_tokens: int = 0
    curve: HitCurve = field(default_factory=HitCurve)
    copying: Copying = field(default_factory=Copying)
    totals: dict[str, Total] = field(default_factory=dict)
    lengths: dict[str, Values] = field(default_factory=lambda: {"prompt": Values(), "answer": Values()})
    whole: dict[str, float] = field(default_factory=lambda: {"plain": 0.0, "auto": 0.0})
    sample: Sample = field(default_factory=Sample)
    rerun: list[tuple[tuple[int, ...], int]] = field(default_factory=list)  # prompts and tokens of their answers
    latencies: dict[str, Values] = field(default_factory=dict)
    nothing: int = 0
    followed: int = 0
    _distances: StackDistances | None = None
    _replays: dict[str, Replay] = field(default_factory=dict)
    _finder: CopyFinder | None = None
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, kind: str, record: Text | Blocks) -> None:
        """Take in one request."""
        self.kinds[kind] += 1
        self.requests += 1
        if isinstance(record, Blocks):
            self._trace(record)
        else:
            self._words(record)

    @property
    def rate(self) -> float:
        """Share of all blocks that was looked at."""
        return 1.0 if self._distances is None else self._distances.rate

    def _trace(self, record: Blocks) -> None:
        self.prompt_tokens += record.input_tokens
        self.answer_tokens += record.output_tokens
        self.answered += 1
        self._measure(record.input_tokens, record.output_tokens)
        if record.keys is not None:
            size = record.block_tokens
            tokens = [min(size, max(0, record.input_tokens - i * size)) for i in range(len(record.keys))]
            self._look_up(record.keys, (), tokens, record.input_tokens, size)

    def _measure(self, prompt: int, answer: int) -> None:
        self.lengths["prompt"].add(prompt)
        self.lengths["answer"].add(answer)

    def _look_up(self, keys: Sequence[int], used: Sequence[int], tokens: Sequence[int], total: int, size: int) -> int:
        """Tokens of the prompt that a cache without bounds finds."""
        if self._distances is None:
            self._distances = StackDistances(self.most_blocks)
        self.with_blocks += 1
        self.block_tokens = size
        lookup = self._distances.request(keys, used)
        self.curve.add(lookup, tokens, total)
        known = lookup.places[np.isfinite(lookup.distances)]
        return int(sum(tokens[i] for i in known) * lookup.weight)

    def _words(self, record: Text) -> None:
        assert self.encode is not None
        assert self.tokens_of is not None
        prompt = self.encode(record.prompt, record.tools)
        answer = self.tokens_of(record.answer) if record.answer else ()
        self.tenants.add(hash_of(record.tenant))
        self.prompt_tokens += len(prompt)
        self.answer_tokens += len(answer)
        self._measure(len(prompt), len(answer))
        if record.cached_tokens is not None and record.input_tokens:
            self.logged_cached += record.cached_tokens
            self.logged_prompts += record.input_tokens
        keys = block_keys(record.tenant, [*prompt, *answer])
        own = max(0, len(prompt) - 1) // BLOCK_SIZE  # the last token is computed in any case
        cached = self._look_up(keys[:own], keys[own:], [BLOCK_SIZE] * own, len(prompt), BLOCK_SIZE)
        self.sample.add(prompt)
        if answer:
            self.answered += 1
            self._keep_for_rerun(prompt, len(answer))
            if self._random.random() < self.share:
                self._follow(Answered(prompt, answer, record.tenant, min(cached, len(prompt) - 1)))

    def _keep_for_rerun(self, prompt: Sequence[int], length: int) -> None:
        place = self._random.randrange(self.answered)
        if len(self.rerun) < RERUN:
            self.rerun.append((tuple(prompt), length))
        elif place < RERUN:
            self.rerun[place] = (tuple(prompt), length)

    def _follow(self, one: Answered) -> None:
        machine = self.machine
        assert machine is not None
        if self._finder is None:
            self._finder = CopyFinder(self.memory_bytes)
            for mode in MODES:
                self._replays[mode] = Replay(machine.cost, machine.told, machine.vocab_size, mode, self.memory_bytes)
                self.totals[mode] = Total()
        self.followed += 1
        self._finder.run(one, self.copying)
        found = {mode: replay.run(one) for mode, replay in self._replays.items()}
        for mode, drafted in found.items():
            self.totals[mode].add(drafted)
        first = (len(one.prompt) - one.cached) * machine.prompt_seconds
        both = found["auto"]
        self.whole["plain"] += first + both.plain
        self.whole["auto"] += first + both.seconds
        reused = both.accepted.total() / both.tokens if both.tokens else 0.0
        nothing = reused < NOTHING
        self.nothing += nothing
        for kind in ("nothing to copy",) if nothing else ("something to copy",):
            self._note(kind, first, both)

    def _note(self, kind: str, first: float, both: Drafted) -> None:
        values = {"first token": first, "whole answer": first + both.seconds}
        if both.tokens:
            values["between tokens"] = both.seconds / both.tokens
        for name, value in values.items():
            self.latencies.setdefault(f"{kind}: {name}", Values()).add(value)


def block_keys(tenant: str, tokens: Sequence[int]) -> list[int]:
    """Hashes of the full blocks of a text, each of which covers all before it, and the tenant."""
    data = np.asarray(tokens, np.int32).tobytes()
    step = 4 * BLOCK_SIZE
    running = hashlib.blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=8)
    keys = []
    for start in range(0, len(tokens) // BLOCK_SIZE * step, step):
        running.update(data[start : start + step])
        keys.append(int.from_bytes(running.digest(), "little"))
    return keys


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def plain_text(messages: Messages) -> str:
    """A conversation for a model that has no template for it."""
    return "".join(f"<|{message['role']}|>\n{message['content']}\n" for message in messages)


def mean(total: float, count: float) -> float | None:
    return total / count if count and math.isfinite(total) else None
