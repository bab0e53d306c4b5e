"""Random traffic through pools that are too small for it: every answer equals the same request run alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from obole.cache.managers import KVCacheManager
from obole.cache.spec import CacheGroup, StateKind
from obole.config import SchedulerConfig
from obole.costmodel import StepCost
from obole.errors import InvalidRequest
from obole.scheduler.receipt import receipt
from obole.scheduler.scheduler import Scheduler
from obole.types import Draft, FinishReason, Request, SamplingParams, Sequence, Source, Status
from tests.fakes.fake_model import WEIGHT_BYTES, FakeModel, next_token, score, solo

FULL = CacheGroup(StateKind.FULL, None, (0,))
LAYOUTS = ((FULL,), (FULL, CacheGroup(StateKind.SLIDING, 20, (1,))), (CacheGroup(StateKind.SLIDING, 33, (0,)),))
VOCAB = 50
CONTEXT = 200


@dataclass(frozen=True)
class Job:
    """A request, and what happens to it: `start` and `cancel` count steps; a cancel falls before or during its step."""

    request: Request
    start: int
    cancel: int | None
    during: bool


@st.composite
def jobs(draw: st.DrawFn, number: int) -> Job:
    length = draw(st.sampled_from([1, 2, 15, 16, 17, 31, 32, 33, 50, 64, 80]))
    branch = draw(st.sampled_from([0, 16, 20, 48, 80]))
    scoring = draw(st.integers(0, 9)) == 0
    max_tokens = 0 if scoring else draw(st.none() | st.integers(1, 60))
    most = CONTEXT if max_tokens is None else max_tokens
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(most, draw(st.sampled_from([0, 0, 3]))),
        n=1 if scoring else draw(st.sampled_from([1, 1, 1, 2, 4])),
        stop_token_ids=(7,) if draw(st.booleans()) or max_tokens is None else (),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 1])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
    )
    request = Request(
        id=f"job {number}",
        prompt_ids=tuple(p if p < branch else p + 1000 * number for p in range(length)),
        params=params,
        seed=draw(st.integers(0, 3)),
        eos_ids=frozenset({1}),
        tenant=draw(st.sampled_from(["", "", "other"])),
        arrival=float(draw(st.integers(0, 30))),
    )
    cancel = draw(st.none() | st.none() | st.integers(0, 60))
    return Job(request, int(request.arrival), cancel, draw(st.booleans()))


@st.composite
def workloads(draw: st.DrawFn) -> list[Job]:
    return [draw(jobs(i)) for i in range(draw(st.integers(1, 8)))]


@st.composite
def configs(draw: st.DrawFn) -> SchedulerConfig:
    return SchedulerConfig(
        max_batch_tokens=draw(st.sampled_from([1, 3, 7, 16, 40, 128])),
        max_sequences=draw(st.sampled_from([1, 2, 5, 16])),
        step_stretch=draw(st.sampled_from([1.0, 2.0, 6.0])),
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
    )


COST = StepCost([1, 2, 4, 8, 16], [1.0, 1.1, 1.3, 2.0, 3.5], context_seconds=0.001, read_seconds=0.001)


class Run:
    """Drives a scheduler and a fake model to the end, checking the books at every turn."""

    def __init__(
        self,
        layout: tuple[CacheGroup, ...],
        blocks: int,
        config: SchedulerConfig,
        drafts: int = 0,
        cost: StepCost | None = None,
    ) -> None:
        cache = KVCacheManager(layout, blocks, {}, prefix_cache=config.prefix_cache, chunk=config.max_batch_tokens)
        self.scheduler = Scheduler(config, cache, CONTEXT, cost)
        self.model = FakeModel(layout, blocks, config.max_batch_tokens, VOCAB)
        self.config = config
        self.sequences: list[Sequence] = []
        self.refused: set[str] = set()
        self.streams: dict[Sequence, list[int]] = {}
        self.endings: dict[Sequence, FinishReason] = {}
        self.weight_bytes = 0
        self.drafting = random.Random(drafts)
        self.most_drafted = drafts

    def hang_drafts(self) -> None:
        """On some of the decoding sequences, drafts that are right, right up to somewhere, or wrong from the start."""
        for seq in self.scheduler.decoding():
            length = self.drafting.randint(0, self.most_drafted)
            right = self.drafting.choice([0, length, self.drafting.randint(0, length)])
            tokens = list(seq.tokens)
            for i in range(length):
                tokens.append(next_token(tokens, seq.seed, VOCAB) if i < right else self.drafting.randrange(VOCAB))
            if length:
                seq.draft = Draft(tokens[len(seq.tokens) :], [Source.LOOKUP] * length)

    def submit(self, job: Job) -> None:
        params = job.request.params
        limit = self.scheduler.max_length
        max_len = limit if params.max_tokens is None else min(limit, len(job.request.prompt_ids) + params.max_tokens)
        seqs = [Sequence(job.request, i, job.request.seed * 100 + i, max_len) for i in range(params.n)]
        try:
            self.scheduler.add(seqs)
        except InvalidRequest:
            self.refused.add(job.request.id)
        else:
            self.sequences += seqs
            self.streams |= {seq: [] for seq in seqs}

    def hear(self, events: list) -> None:
        for event in events:
            assert event.sequence not in self.endings, "news after the end"
            self.streams[event.sequence] += event.token_ids
            if event.finish_reason is not None:
                self.endings[event.sequence] = event.finish_reason

    def play(self, workload: list[Job]) -> None:
        step = 0
        while step <= 60 or self.scheduler.has_work:
            for job in workload:
                if job.start == step:
                    self.submit(job)
            self.cancel(workload, step, during=False)
            self.scheduler.check()
            self.hang_drafts()
            plan = self.scheduler.plan(float(step))
            self.scheduler.check()
            assert (plan is None) == (not self.scheduler.has_work)
            if plan is not None:
                assert len(plan.sequences) <= self.config.max_sequences
                self.weight_bytes += WEIGHT_BYTES
                self.cancel(workload, step, during=True)
                self.scheduler.check()
                self.hear(self.scheduler.settle(plan, self.model.run(plan), step + 0.5))
                self.scheduler.check()
            step += 1
            assert step < 20_000, "no end in sight"

    def cancel(self, workload: list[Job], step: int, *, during: bool) -> None:
        for job in workload:
            if job.cancel == step and job.during == during:
                self.hear(self.scheduler.cancel(job.request.id, step + 0.25))
                self.hear(self.scheduler.cancel(job.request.id, step + 0.25))


def check_answers(run: Run, workload: list[Job]) -> None:
    cancelled = {job.request.id for job in workload if job.cancel is not None}
    for seq in run.sequences:
        answer, reason = solo(seq, VOCAB)
        output = seq.output_ids
        assert run.streams[seq] == output
        assert run.endings[seq] is seq.finish_reason
        assert seq.status is Status.FINISHED
        if seq.finish_reason is FinishReason.CANCELLED:
            assert seq.request.id in cancelled
            assert output == answer[: len(output)]
        else:
            assert (output, seq.finish_reason) == (answer, reason)
        check_logprobs(seq)
        check_receipt(seq)
    assert sum(seq.tally.weight_bytes for seq in run.sequences) == run.weight_bytes
    usage = run.scheduler.cache.usage()
    assert usage.in_use == 0
    assert usage.free + usage.cached == usage.total
    assert run.config.prefix_cache or usage.cached == 0


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(LAYOUTS),
    st.integers(4, 24),
    configs(),
    workloads(),
    st.sampled_from([0, 3, 40]),
    st.sampled_from([None, COST]),
)
def test_every_answer_equals_the_request_run_alone(layout, blocks, config, workload, drafts, cost):
    run = Run(layout, blocks, config, drafts, cost)
    run.play(workload)
    check_answers(run, workload)


@st.composite
def greedy_jobs(draw: st.DrawFn, number: int) -> Job:
    """Short prompts with long answers, which outgrow the pool, between long prompts whose first choice ends at once."""
    long_prompt = draw(st.booleans())
    params = SamplingParams(
        max_tokens=1 if long_prompt else draw(st.integers(50, 100)),
        n=draw(st.integers(1, 3)),
        ignore_eos=True,
        prompt_logprobs=draw(st.sampled_from([None, 0])),
    )
    length = draw(st.integers(40, 90) if long_prompt else st.integers(1, 20))
    prompt = tuple(range(1000 * number, 1000 * number + length))
    request = Request(id=f"job {number}", prompt_ids=prompt, params=params, seed=number, arrival=float(number // 3))
    return Job(request, number // 3, None, during=False)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(LAYOUTS), st.sampled_from([7, 16, 40]), st.booleans())
def test_nobody_is_lost_or_starved_under_pressure(data, layout, rows, prefix_cache):
    workload = [data.draw(greedy_jobs(i)) for i in range(data.draw(st.integers(3, 8)))]
    config = SchedulerConfig(max_batch_tokens=rows, max_sequences=16, prefix_cache=prefix_cache)
    run = Run(layout, data.draw(st.integers(9, 16)) * len(layout), config)
    run.play(workload)
    assert not run.refused
    check_answers(run, workload)


def check_logprobs(seq: Sequence) -> None:
    params, tokens = seq.request.params, seq.tokens
    if params.logprobs is None:
        assert seq.logprobs == []
    else:
        assert seq.logprobs == [score(tokens, p) for p in range(seq.prompt_len, len(tokens))]
    scores = [] if params.prompt_logprobs is None else [score(tokens, p) for p in range(1, seq.prompt_len)]
    if seq.finish_reason is FinishReason.CANCELLED:
        scores = scores[: len(seq.prompt_logprobs)]
    assert seq.prompt_logprobs == scores


def check_receipt(seq: Sequence) -> None:
    bill = receipt(seq)
    assert bill.cached_tokens + bill.computed_tokens + bill.unread_tokens == bill.prompt_tokens == len(seq.request.prompt_ids)
    assert 0 <= bill.cached_tokens < bill.prompt_tokens
    assert sum(bill.sources.values()) == bill.output_tokens == len(seq.output_ids)
    assert bill.queued_seconds + bill.prefill_seconds + bill.decode_seconds == bill.total_seconds
    assert min(bill.queued_seconds, bill.prefill_seconds, bill.decode_seconds) >= 0
    assert bill.forward_passes >= bill.sources.get("model", 0)
    for source, drafted in bill.drafted.items():
        assert drafted == bill.sources.get(source, 0) + bill.rejected[source]
    assert bill.preemptions > 0 or bill.recomputed_tokens == 0
