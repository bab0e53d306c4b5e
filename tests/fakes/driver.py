"""A scheduler and a fake model put together, with a clock that counts steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from obole.cache.managers import KVCacheManager
from obole.cache.spec import CacheGroup, StateKind
from obole.config import SchedulerConfig
from obole.scheduler.scheduler import Scheduler
from obole.types import Event, Request, SamplingParams, Sequence, StepPlan, TextTracker
from tests.fakes.fake_model import FakeModel

FULL = (CacheGroup(StateKind.FULL, None, (0,)),)
VOCAB = 50


def make_seqs(
    name: str,
    prompt: range | list[int],
    *,
    limit: int = 200,
    seed: int = 0,
    tenant: str = "",
    eos: tuple[int, ...] = (),
    text: TextTracker | None = None,
    arrival: float = 0.0,
    **params: object,
) -> list[Sequence]:
    """The n answers to one request; `limit` is what the scheduler can hold, as an engine would ask it."""
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    request = Request(
        id=name, prompt_ids=tuple(prompt), params=sampling, seed=seed, eos_ids=frozenset(eos), tenant=tenant, arrival=arrival
    )
    max_len = limit if sampling.max_tokens is None else min(limit, len(prompt) + sampling.max_tokens)
    return [Sequence(request, i, seed + i, max_len, text) for i in range(sampling.n)]


@dataclass
class Driver:
    """`step` plans, runs and settles, checking the books; `time` is the number of steps so far."""

    blocks: int = 64
    config: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(max_batch_tokens=64))
    groups: tuple[CacheGroup, ...] = FULL
    context: int = 2000
    time: float = 0.0

    def __post_init__(self) -> None:
        cache = KVCacheManager(
            self.groups, self.blocks, {}, prefix_cache=self.config.prefix_cache, chunk=self.config.max_batch_tokens
        )
        self.scheduler = Scheduler(self.config, cache, self.context)
        self.model = FakeModel(self.groups, self.blocks, self.config.max_batch_tokens, VOCAB)
        self.plans: list[StepPlan] = []

    def add(self, name: str, prompt: range | list[int], **options: object) -> list[Sequence]:
        seqs = make_seqs(name, prompt, limit=self.scheduler.max_length, arrival=self.time, **options)  # type: ignore[arg-type]
        self.scheduler.add(seqs)
        return seqs

    def step(self) -> list[Event]:
        plan = self.scheduler.plan(self.time)
        self.scheduler.check()
        assert plan is not None
        self.plans.append(plan)
        events = self.scheduler.settle(plan, self.model.run(plan), self.time + 0.5)
        self.scheduler.check()
        self.time += 1
        return events

    def run(self, most: int = 5000) -> list[Event]:
        events: list[Event] = []
        while self.scheduler.has_work:
            events += self.step()
            assert len(self.plans) < most, "no end in sight"
        assert self.scheduler.cache.usage().in_use == 0
        return events
