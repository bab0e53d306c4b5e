"""Blocks from lower tiers: random traffic over a faulty disk, and what waiting for it may cost."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from obole.cache.managers import KVCacheManager
from obole.cache.spec import CacheGroup, StateKind
from obole.cache.tiers.interface import BlockName
from obole.config import SchedulerConfig
from obole.scheduler.loading import RETRY_SECONDS, SLACK, Loader
from obole.scheduler.receipt import receipt
from obole.scheduler.scheduler import Scheduler
from obole.types import FinishReason, Request, SamplingParams, Status, StepPlan, StepResult, Tier
from tests.fakes.driver import make_seqs
from tests.fakes.fake_model import FakeModel
from tests.fakes.tiers import FakeTiers
from tests.scheduler.test_random import LAYOUTS, VOCAB, Job, Run, check_answers, configs, workloads

FULL = (CacheGroup(StateKind.FULL, None, (0,)),)
TOKEN_SECONDS = 0.01  # to compute a token, on the clock of these tests


def recompute(start: int, end: int) -> float:
    return max(0, end - start) * TOKEN_SECONDS


@dataclass(frozen=True)
class Disk:
    ram_blocks: int
    ssd_blocks: int
    latency: float
    seconds_per_block: float
    expected: float | None
    failure_rate: float


@st.composite
def disks(draw: st.DrawFn) -> Disk:
    return Disk(
        ram_blocks=draw(st.sampled_from([20, 1000, 3, 0])),
        ssd_blocks=draw(st.sampled_from([1000, 1000, 5, 0])),
        latency=draw(st.sampled_from([0.002, 0.0, 0.03])),
        seconds_per_block=draw(st.sampled_from([0.02, 0.05, 0.0, 0.2, float("inf")])),
        expected=draw(st.sampled_from([0.0, 0.0, 0.0, None, 10.0])),
        failure_rate=draw(st.sampled_from([0.1, 0.0, 0.9])),
    )


@st.composite
def repeats(draw: st.DrawFn) -> list[Job]:
    """Prompts that begin as earlier ones did, one after the other for the most part, so that blocks go down between them."""
    jobs = []
    for number in range(draw(st.integers(8, 14))):
        stem, shared = draw(st.integers(0, 3)), draw(st.sampled_from([100, 112, 80, 48]))
        tail = draw(st.integers(0, 20))
        params = SamplingParams(max_tokens=draw(st.integers(1, 20)), n=draw(st.sampled_from([1, 1, 1, 2])), ignore_eos=True)
        prompt = (*range(1000 * stem, 1000 * stem + shared), *range(50_000 + 100 * number, 50_000 + 100 * number + tail))
        start = 6 * number + draw(st.integers(0, 6))
        request = Request(id=f"job {number}", prompt_ids=prompt, params=params, seed=number, arrival=float(start))
        cancel = draw(st.none() | st.none() | st.integers(start, start + 8))
        jobs.append(Job(request, start, cancel, draw(st.booleans())))
    return jobs


class TieredRun(Run):
    """As `Run`, with tiers below, and steps that fail."""

    def __init__(self, layout, blocks: int, config: SchedulerConfig, disk: Disk, seed: int, failures: float) -> None:
        super().__init__(layout, blocks, config, seed % 5)
        self.now = 0.0
        self.rng = random.Random(seed)
        self.failures = failures
        self.failed: set[str] = set()
        self.tiers = FakeTiers(
            lambda: self.now,
            disk.ram_blocks,
            disk.ssd_blocks,
            disk.latency,
            disk.seconds_per_block,
            disk.expected,
            disk.failure_rate,
            seed=seed,
        )
        self.scheduler.loader = Loader(self.scheduler.cache, self.tiers, 32 << 20, recompute)

    def play(self, workload: list[Job]) -> None:
        step = 0
        while step <= 90 or self.scheduler.has_work:
            self.now = step * 0.02
            for job in workload:
                if job.start == step:
                    self.submit(job)
            self.cancel(workload, step, during=False)
            self.scheduler.check()
            self.hang_drafts()
            plan = self.scheduler.plan(float(step))
            self.scheduler.check()
            assert plan is not None or self.scheduler.is_loading or not self.scheduler.has_work
            if plan is not None:
                assert len(plan.sequences) <= self.config.max_sequences
                self.cancel(workload, step, during=True)
                self.scheduler.check()
                if self.rng.random() < self.failures:
                    self.fail(plan, step)
                else:
                    self.carry_out(plan, step)
                self.scheduler.check()
            step += 1
            assert step < 20_000, "no end in sight"

    def carry_out(self, plan: StepPlan, step: float) -> None:
        self.go_down(plan)
        result = StepResult([], [], [])
        if plan.sequences:
            self.weight_bytes += 1_000_003
            result = self.model.run(plan)
        else:
            self.model.lay(plan)
        self.hear(self.scheduler.settle(plan, result, step + 0.5))
        ledger = self.scheduler.cache.ledger
        named = [n for n in ledger.take_named() if ledger.key_of[n.block] == n.key and self.tiers.wants(n.key)]
        if named and self.rng.random() < 0.5:
            names = [BlockName(n.key, n.owner) for n in named]
            self.tiers.persist(names, self.model.gather([n.block for n in named]))

    def go_down(self, plan: StepPlan) -> None:
        if plan.demotions:
            names = [BlockName(n.key, n.owner) for n in plan.demotions]
            self.tiers.demote(names, self.model.gather([n.block for n in plan.demotions]))

    def fail(self, plan: StepPlan, step: float) -> None:
        """The step raises before it is run, or in the middle of it."""
        if self.rng.random() < 0.5:
            self.go_down(plan)
            for block, _ in plan.promotions[: self.rng.randint(0, len(plan.promotions))]:
                self.model.slots[block] = [None] * 16
        self.failed |= {seq.request.id for seq in plan.sequences}
        self.hear(self.scheduler.abandon(plan, step + 0.5))


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.integers(4, 24),
    configs(),
    workloads(),
    disks(),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.0, 0.1]),
)
def test_every_answer_equals_the_request_run_alone(layout, blocks, config, workload, disk, seed, failures):
    play_and_check(layout, blocks, config, workload, disk, seed, failures)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.integers(10, 16),
    st.sampled_from([7, 40, 128]),
    repeats(),
    disks(),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.0, 0.1]),
)
def test_prompts_that_begin_as_earlier_ones_did(layout, blocks, rows, workload, disk, seed, failures):
    config = SchedulerConfig(max_batch_tokens=rows, max_sequences=5)
    play_and_check(layout, blocks * len(layout), config, workload, disk, seed, failures)


def play_and_check(layout, blocks, config, workload, disk, seed, failures):
    run = TieredRun(layout, blocks, config, disk, seed, failures)
    run.play(workload)
    if not failures:
        check_answers(run, workload)
    for seq in run.sequences:
        if seq.finish_reason is FinishReason.CANCELLED:
            assert failures or seq.request.id in {job.request.id for job in workload if job.cancel is not None}
        bill = receipt(seq)
        assert bill.cached_tokens + bill.computed_tokens + bill.unread_tokens == bill.prompt_tokens
        assert sum(bill.cached_by_tier.values()) == bill.cached_tokens
        assert min(bill.cached_by_tier.values()) >= 0
        assert bill.load_seconds >= 0
    assert run.scheduler.cache.usage().in_use == 0
    assert all(load.closed for load in run.tiers.loads)


class Bench:
    """One scheduler over one pool, with tiers; `step` lasts as long as its rows would take."""

    def __init__(self, groups=FULL, blocks: int = 64, rows: int = 64, **disk) -> None:
        self.now = 0.0
        self.tiers = FakeTiers(lambda: self.now, **disk)
        config = SchedulerConfig(max_batch_tokens=rows)
        cache = KVCacheManager(groups, blocks, {}, chunk=rows)
        self.scheduler = Scheduler(config, cache, 2000)
        self.scheduler.loader = Loader(cache, self.tiers, 1, recompute)
        self.model = FakeModel(groups, blocks, rows, VOCAB)
        self.numbers = iter(range(1000))

    def add(self, prompt, **params):
        seqs = make_seqs(f"r{next(self.numbers)}", prompt, limit=self.scheduler.max_length, arrival=self.now, **params)
        self.scheduler.add(seqs)
        return seqs[0]

    def step(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        self.scheduler.check()
        if plan is None:
            self.now += 0.001
            return None
        if plan.demotions:
            names = [BlockName(n.key, n.owner) for n in plan.demotions]
            self.tiers.demote(names, self.model.gather([n.block for n in plan.demotions]))
        self.now += plan.total_rows * TOKEN_SECONDS
        if plan.sequences:
            result = self.model.run(plan)
        else:
            self.model.lay(plan)
            result = StepResult([], [], [])
        self.scheduler.settle(plan, result, self.now)
        self.scheduler.check()
        return plan

    def run(self, prompt, **params):
        seq = self.add(prompt, **{"max_tokens": 1, "ignore_eos": True, **params})
        while self.scheduler.has_work:
            self.step()
            assert self.now < 1000
        return receipt(seq)

    def push_out(self, tier: Tier) -> None:
        """Everything in the pool goes down; to the SSD, RAM is emptied too."""
        for _ in range(2):
            first = 10_000 * (1 + next(self.numbers))
            self.run(range(first, first + 16 * 60))
        if tier is Tier.SSD:
            ram = self.tiers.blocks[Tier.RAM]
            self.tiers.blocks[Tier.SSD] |= ram
            ram.clear()


PROMPT = range(16 * 30)


@pytest.mark.parametrize("tier", [Tier.RAM, Tier.SSD])
def test_a_hit_comes_up(tier):
    bench = Bench(seconds_per_block=0.001)
    cold = bench.run(PROMPT)
    bench.push_out(tier)
    began = bench.now
    bill = bench.run(PROMPT)
    assert cold.cached_tokens == 0
    assert bill.cached_by_tier[tier] == bill.cached_tokens == 16 * 30 - 1
    assert bill.computed_tokens == 1
    if tier is Tier.RAM:
        assert bill.load_seconds == 0  # it entered in the step in which it was admitted
    else:
        assert bill.load_seconds == pytest.approx(bill.queued_seconds) == pytest.approx(0.030, abs=0.003)
    assert bench.now - began < 0.05 * cold.total_seconds
    again = bench.run(PROMPT)
    assert again.cached_by_tier["device"] == again.cached_tokens == 16 * 30 - 1


def test_a_hit_is_split_by_tier():
    bench = Bench(seconds_per_block=0.001)
    bench.run(PROMPT)
    bench.push_out(Tier.RAM)
    ram = bench.tiers.blocks[Tier.RAM]
    bench.run(range(16 * 5 + 1))
    keys = bench.add(PROMPT)
    bench.scheduler.cache.match(keys)
    bench.scheduler.cancel(keys.request.id, bench.now)
    for key in [k + b"\0\0" for k in keys.keys[20:]]:
        bench.tiers.blocks[Tier.SSD][key] = ram.pop(key)
    bill = bench.run(PROMPT)
    assert bill.cached_by_tier == {"device": 80, "ram": 240, "ssd": 159}


@pytest.mark.parametrize("fault", ["hangs", "slow", "fails late", "slows down"])
def test_a_bad_disk_costs_at_most_five_percent(fault):
    """It is believed to be quick, so the load is begun."""
    bench = Bench(seconds_per_block=0.02, expected=0.0)
    cold = bench.run(PROMPT).total_seconds
    bench.push_out(Tier.SSD)
    if fault == "hangs":
        bench.tiers.seconds_per_block = float("inf")
    elif fault == "slow":
        bench.tiers.seconds_per_block = 16 * TOKEN_SECONDS * 1.01
    elif fault == "fails late":
        bench.tiers.damaged = set(list(bench.tiers.blocks[Tier.SSD])[:1])
        bench.tiers.seconds_per_block = 0.03
    seq = bench.add(PROMPT, max_tokens=1)
    while bench.scheduler.has_work:
        bench.step()
        if fault == "slows down" and bench.now - seq.request.arrival > 0.2:
            bench.tiers.seconds_per_block = 5.0
    bill = receipt(seq)
    assert bill.load_seconds > 0
    assert bill.total_seconds <= (1 + SLACK) * cold + 0.002
    if fault == "slows down":
        assert 100 < bill.cached_by_tier["ssd"] < 300


def test_what_does_not_pay_is_not_begun_but_tried_again_now_and_then():
    bench = Bench(seconds_per_block=0.001, expected=1.0)
    bench.scheduler.loader._retry = float("inf")
    bench.run(PROMPT)
    bench.push_out(Tier.SSD)
    assert bench.run(PROMPT).cached_tokens == 0
    assert bench.tiers.loads == []
    bench.push_out(Tier.SSD)
    bench.scheduler.loader._retry = bench.now
    assert bench.run(PROMPT).cached_by_tier["ssd"] == 479
    bench.push_out(Tier.SSD)
    assert bench.run(PROMPT).cached_tokens == 0
    bench.now += RETRY_SECONDS
    bench.push_out(Tier.SSD)
    assert bench.run(PROMPT).cached_by_tier["ssd"] == 479


def test_a_short_load_is_not_worth_a_long_step_of_others():
    bench = Bench(blocks=128, seconds_per_block=0.001)
    bench.scheduler.loader._retry = float("inf")
    short = range(48)
    bench.run(short)
    for _ in range(3):
        bench.push_out(Tier.SSD)
    assert bench.run(short).cached_by_tier["ssd"] == 47
    for _ in range(3):
        bench.push_out(Tier.SSD)
    bench.add(range(70_000, 71_000), max_tokens=200, ignore_eos=True)  # steps of 64 rows
    for _ in range(3):
        bench.step()
    seq = bench.add(short, max_tokens=1, ignore_eos=True)
    while bench.scheduler.has_work:
        bench.step()
    assert receipt(seq).cached_tokens == 0
    assert receipt(seq).load_seconds == 0


def test_others_go_on_while_one_waits():
    bench = Bench(blocks=128, seconds_per_block=0.05)
    bench.run(PROMPT)
    bench.push_out(Tier.SSD)
    bench.push_out(Tier.SSD)
    writer = bench.add(range(5000, 5010), max_tokens=200, ignore_eos=True)
    bench.step()
    loader = bench.add(PROMPT, max_tokens=1, ignore_eos=True)
    bench.step()
    assert loader.status is Status.LOADING
    before = len(writer.tokens)
    while loader.status is Status.LOADING:
        plan = bench.step()
        assert plan is not None
        assert plan.sequences == [writer] or loader in plan.sequences
    assert len(writer.tokens) - before > 50
    while bench.scheduler.has_work:
        bench.step()
    assert receipt(loader).cached_by_tier["ssd"] == 479


def test_cancelled_while_it_loads():
    bench = Bench(seconds_per_block=0.05)
    bench.run(PROMPT)
    bench.push_out(Tier.SSD)
    free = bench.scheduler.cache.available
    seq = bench.add(PROMPT, max_tokens=1)
    while bench.tiers.loads == [] or bench.tiers.loads[-1].ready < 5:
        bench.step()
    (event,) = bench.scheduler.cancel(seq.request.id, bench.now)
    assert event.finish_reason is FinishReason.CANCELLED
    assert bench.scheduler.cache.available == free
    assert bench.tiers.loads[-1].closed
    bill = receipt(seq)
    assert (bill.cached_tokens, bill.computed_tokens, bill.unread_tokens) == (0, 0, 480)
    bench.scheduler.check()
    assert not bench.scheduler.has_work
