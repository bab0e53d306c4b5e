"""A smaller model of the same vocabulary that drafts for a larger one.

It follows each sequence with a shadow: the same tokens in a KV cache of its own, and behind them whatever it drafted that was
then turned down. Its tokens are chosen by the sequence's own parameters, seed and noise ("coupled" drafts: where both models
nearly agree on the distribution, the same noise picks the same token), so they are right far more often than independent draws.
Or else they are drawn by noise of their own, and say what from, so that the larger model can accept them by chance.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from obole.cache.managers import KVCacheManager
from obole.engine.runner import Runner
from obole.engine.sampler import DRAFTING, derived_seed
from obole.speculate.proposal import Proposal
from obole.types import Distribution, Sequence, Source, StepPlan

GAIN = 0.2  # share of the newest measurement in the price of a token
OUTLIER = 4.0  # times the price so far: what a measurement counts as at most
FRESH_ROWS = 2  # of a step that is about one new token: a draft that was wholly right leaves its last token and the next one


class Shadow(Sequence):
    """The draft model's own record of a sequence. `known` of its tokens are the sequence's, the others were drafted."""

    __slots__ = ("known",)

    def __init__(self, seq: Sequence, seed: int, max_len: int) -> None:
        params = dataclasses.replace(seq.request.params, logprobs=None, prompt_logprobs=None, n=1)
        super().__init__(dataclasses.replace(seq.request, params=params), seq.index, seed, max_len)
        self.tokens = []
        self.known = 0

    def follow(self, tokens: list[int]) -> None:
        """Take over the sequence's tokens; what was drafted and came true stays computed."""
        own, same = self.tokens, self.known
        while same < min(len(own), len(tokens)) and own[same] == tokens[same]:
            same += 1
        own[same:] = tokens[same:]
        self.known = len(tokens)
        self.num_computed = min(self.num_computed, same, len(tokens) - 1)


@dataclass(slots=True)
class _Job:
    """Drafting for one sequence until it has `end` tokens."""

    seq: Sequence
    shadow: Shadow
    end: int
    distributions: list[Distribution] = field(default_factory=list)

    @property
    def proposal(self) -> Proposal | None:
        tokens = self.shadow.tokens[self.shadow.known :]
        return Proposal(Source.DRAFT, 1, 1.0, tokens, self.distributions or None) if tokens else None


@dataclass(slots=True)
class DraftModel:
    """Drafts for the sequences of one engine. Owns the shadows and their blocks until `forget` or `reset`.

    `chunk`: most rows of a step; `max_tokens`: of one sequence; `seconds_per_token`: a first guess, then what was measured.
    """

    runner: Runner
    cache: KVCacheManager
    chunk: int
    max_tokens: int
    seconds_per_token: float
    clock: Callable[[], float] = time.perf_counter
    _shadows: OrderedDict[Sequence, Shadow] = field(default_factory=OrderedDict)  # least recently used first

    def propose(self, seqs: list[Sequence], lengths: list[int]) -> list[Proposal | None]:
        """At most `lengths[i]` tokens for each sequence; None for one that the cache has no room for."""
        jobs = [self._job(seq, length) for seq, length in zip(seqs, lengths, strict=True)]
        seconds, written = 0.0, 0
        while planned := self._plan(plan := StepPlan([], [], [], [], []), jobs):
            began = self.clock()
            result = self.runner.run(plan)
            if all(plan.samples) and max(plan.rows) <= FRESH_ROWS:  # what others wrote is read but once, and has no price
                seconds += self.clock() - began
                written += len(planned)
            for i, job in enumerate(planned):
                shadow = job.shadow
                shadow.tokens += result.tokens[i]
                shadow.num_computed = plan.starts[i] + plan.rows[i]
                if shadow.num_computed <= shadow.known:
                    self.cache.commit(shadow)
                if result.distributions:
                    job.distributions += result.distributions[i]
        if written:
            price = min(seconds / written, OUTLIER * self.seconds_per_token)
            self.seconds_per_token += GAIN * (price - self.seconds_per_token)
        return [job.proposal for job in jobs]

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended: its shadow's blocks are free."""
        shadow = self._shadows.pop(seq, None)
        if shadow is not None:
            self.cache.release(shadow)

    def forget_tenant(self, tenant: str) -> None:
        for shadow in self._shadows.values():
            shadow.private |= shadow.request.tenant == tenant
        self.cache.forget(tenant)

    def reset(self) -> None:
        """Forget everything, for after an exception: nobody knows what it cut short, and shadows can be computed again."""
        self._shadows.clear()
        self.cache.reset()

    def _job(self, seq: Sequence, length: int) -> _Job:
        """A shadow that has the tokens of the sequence."""
        shadow = self._shadows.get(seq)
        if shadow is None:
            seed = derived_seed(seq.seed, DRAFTING) if self.runner.keeps_distributions else seq.seed
            shadow = self._shadows[seq] = Shadow(seq, seed, self.max_tokens + 1)
        self._shadows.move_to_end(seq)
        shadow.follow(seq.tokens)
        return _Job(seq, shadow, min(len(seq.tokens) + length, self.max_tokens))

    def _plan(self, plan: StepPlan, jobs: list[_Job]) -> list[_Job]:
        """Fill a plan with the shadows that lack tokens and have room for them; returns their jobs."""
        planned = []
        for job in jobs:
            shadow = job.shadow
            length = len(shadow.tokens)
            if length >= job.end or plan.total_rows == self.chunk:
                continue
            if not shadow.tables:
                self.cache.attach(shadow, self.cache.match(shadow))
            start = shadow.num_computed
            rows = min(length - start, self.chunk - plan.total_rows)
            copies = self._room(job, start + rows, jobs)
            if copies is None:
                continue
            plan.copies += copies
            plan.sequences.append(shadow)
            plan.starts.append(start)
            plan.rows.append(rows)
            plan.samples.append(start + rows == length)
            plan.total_rows += rows
            planned.append(job)
        return planned

    def _room(self, job: _Job, upto: int, jobs: list[_Job]) -> list[tuple[int, int]] | None:
        """Blocks for a shadow, if need be at the cost of others."""
        while (copies := self.cache.allocate(job.shadow, upto)) is None:
            victim = self._victim(job, jobs)
            if victim is None:
                return None
            self.forget(victim)
        return copies

    def _victim(self, job: _Job, jobs: list[_Job]) -> Sequence | None:
        """Whose blocks a job may have: of those not drafted for now the least recently used, then of the jobs behind it."""
        busy = {other.seq for other in jobs}
        for seq in self._shadows:
            if seq not in busy:
                return seq
        for other in reversed(jobs):
            if other is job:
                return None
            if other.seq in self._shadows:
                other.end = 0
                return other.seq
        return None
