"""A smaller model of the same vocabulary that drafts for a larger one.

It follows each sequence with a shadow: the same tokens in a KV cache of its own, and behind them whatever it drafted that was
then turned down. Its tokens are chosen by the sequence's own parameters, seed and noise ("coupled" drafts: where both models
nearly agree on the distribution, the same noise picks the same token), so they are right far more often than independent draws.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from obole.cache.managers import KVCacheManager
from obole.engine.runner import Runner
from obole.types import Sequence, StepPlan

GAIN = 0.2  # share of the newest measurement in the price of a token


@dataclass(slots=True)
class DraftModel:
    """Drafts for the sequences of one engine. Owns the shadows and their blocks until `forget`.

    `chunk`: most rows of a step; `max_tokens`: of one sequence; `seconds_per_token`: a first guess, then what was measured.
    """

    runner: Runner
    cache: KVCacheManager
    chunk: int
    max_tokens: int
    seconds_per_token: float
    _shadows: OrderedDict[Sequence, Sequence] = field(default_factory=OrderedDict)  # least recently used first

    def propose(self, seqs: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """At most `lengths[i]` tokens for each sequence; none for one that the cache has no room for."""
        shadows = [self._follow(seq) for seq in seqs]
        ends = [min(len(seq.tokens) + length, self.max_tokens) for seq, length in zip(seqs, lengths, strict=True)]
        began = time.perf_counter()
        catching_up = 0.0  # seconds; what was written by others is read but once
        while plan := self._plan(shadows, ends):
            results = self.runner.run(plan).tokens
            if not catching_up:
                catching_up = (time.perf_counter() - began) * (1 - len(shadows) / plan.total_rows)
            for shadow, start, rows, tokens in zip(plan.sequences, plan.starts, plan.rows, results, strict=True):
                shadow.tokens += tokens
                shadow.num_computed = start + rows
        drafts = [shadow.tokens[len(seq.tokens) : end] for seq, shadow, end in zip(seqs, shadows, ends, strict=True)]
        if written := sum(map(len, drafts)):
            price = (time.perf_counter() - began - catching_up) / written
            self.seconds_per_token += GAIN * (price - self.seconds_per_token)
        return drafts

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended: its shadow's blocks are free."""
        shadow = self._shadows.pop(seq, None)
        if shadow is not None:
            self.cache.release(shadow)

    def _follow(self, seq: Sequence) -> Sequence:
        """The shadow of a sequence, with its tokens, and as many of them computed as it has in common with what it computed."""
        shadow = self._shadows.get(seq)
        if shadow is None:
            params = dataclasses.replace(seq.request.params, logprobs=None, prompt_logprobs=None, n=1)
            request = dataclasses.replace(seq.request, params=params)
            shadow = self._shadows[seq] = Sequence(request, seq.index, seq.seed, self.max_tokens + 1)
        self._shadows.move_to_end(seq)
        old, new = shadow.tokens, seq.tokens
        same = min(len(old), len(new))
        if old[:same] != new[:same]:
            # only drafts can differ, and those are at the end
            same = next(i for i in range(max(0, same - self.chunk), same) if old[i] != new[i])
        shadow.tokens = list(new)
        shadow.num_computed = min(shadow.num_computed, same, len(new) - 1)
        return shadow

    def _plan(self, shadows: list[Sequence], ends: list[int]) -> StepPlan | None:
        """A step for all shadows that lack tokens; None when there is none, or none has room."""
        plan = StepPlan([], [], [], [], [])
        for shadow, end in zip(shadows, ends, strict=True):
            length = len(shadow.tokens)
            rows = min(length - shadow.num_computed, self.chunk - plan.total_rows)
            if length >= end or rows <= 0:
                continue
            copies = self._room(shadow, shadow.num_computed + rows, shadows)
            if copies is None:
                continue
            plan.copies += copies
            plan.sequences.append(shadow)
            plan.starts.append(shadow.num_computed)
            plan.rows.append(rows)
            plan.samples.append(shadow.num_computed + rows == length)
            plan.total_rows += rows
        return plan if plan.sequences else None

    def _room(self, shadow: Sequence, upto: int, busy: list[Sequence]) -> list[tuple[int, int]] | None:
        """Blocks for a shadow, if need be from sequences that were not drafted for lately."""
        copies = self.cache.allocate(shadow, upto)
        for seq, other in list(self._shadows.items()) if copies is None else ():
            if other not in busy:
                self.forget(seq)
                copies = self.cache.allocate(shadow, upto)
                if copies is not None:
                    break
        return copies
