"""Admission, budget, preemption, choices, cancellation: one rule at a time."""

from __future__ import annotations

import pytest

from obole.cache.spec import CacheGroup, StateKind
from obole.config import SchedulerConfig
from obole.errors import InvalidRequest
from obole.types import FinishReason, Status
from tests.fakes.driver import FULL, VOCAB, Driver, make_seqs
from tests.fakes.fake_model import solo


def budget(rows: int, sequences: int = 256, *, prefix_cache: bool = True) -> SchedulerConfig:
    return SchedulerConfig(max_batch_tokens=rows, max_sequences=sequences, prefix_cache=prefix_cache)


# -- the door -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "params", "field", "message"),
    [
        (64, {}, None, ""),  # 4 blocks: the one token of output is never computed
        (65, {}, "prompt", "needs 5 blocks of KV cache, and the whole pool has 4"),
        (128, {}, "prompt", "needs 8 blocks"),
        (300, {}, "prompt", "context of 256"),
        (0, {}, "prompt", "no tokens"),
        (32, {"max_tokens": 33}, None, ""),
        (32, {"max_tokens": 34}, "max_tokens", "ask for at most 33"),
        (32, {"max_tokens": 2**62}, "max_tokens", "ask for at most 224"),
        (64, {"max_tokens": 0}, None, ""),
        (65, {"max_tokens": 0}, "prompt", "5 blocks"),
    ],
)
def test_what_can_never_fit_is_refused_and_what_can_is_served(prompt, params, field, message):
    driver = Driver(blocks=4, context=256)
    assert driver.scheduler.max_length == 65
    if field is None:
        [seq] = driver.add("a", range(prompt), **params)
        driver.run()
        assert (seq.output_ids, seq.finish_reason) == solo(seq, VOCAB)
    else:
        with pytest.raises(InvalidRequest, match=message) as caught:
            driver.add("a", range(prompt), **params)
        assert caught.value.field == field
        assert not driver.scheduler.has_work


def test_the_context_is_a_limit_of_its_own():
    driver = Driver(blocks=64, context=40)
    assert driver.scheduler.max_length == 40
    with pytest.raises(InvalidRequest, match="context of 40"):
        driver.add("a", range(40))
    with pytest.raises(InvalidRequest, match="ask for at most 10") as caught:
        driver.add("a", range(30), max_tokens=11)
    assert caught.value.field == "max_tokens"
    [seq] = driver.add("a", range(30))
    driver.add("b", range(40), max_tokens=0)
    driver.run()
    assert len(seq.output_ids) == 10
    assert seq.finish_reason is FinishReason.LENGTH


def test_one_refused_choice_refuses_all_and_an_id_is_taken_once():
    driver = Driver(blocks=4)
    with pytest.raises(InvalidRequest):
        driver.add("a", range(100), n=3)
    assert driver.scheduler.num_waiting == 0
    driver.add("a", range(10), max_tokens=1)
    with pytest.raises(InvalidRequest, match="already"):
        driver.add("a", range(10), max_tokens=1)
    driver.run()
    driver.add("a", range(10), max_tokens=1)


def test_a_small_request_behind_an_impossible_one_is_served():
    driver = Driver(blocks=4)
    with pytest.raises(InvalidRequest):
        driver.add("huge", range(100))
    [seq] = driver.add("small", range(10), max_tokens=5)
    driver.run(most=6)
    assert len(seq.output_ids) == 5


# -- the budget -----------------------------------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_of_the_budget():
    driver = Driver(config=budget(16))
    [seq] = driver.add("a", range(50), max_tokens=2)
    driver.run()
    assert [plan.rows for plan in driver.plans] == [[16], [16], [16], [2], [1]]
    assert [plan.samples for plan in driver.plans] == [[False]] * 3 + [[True]] * 2
    assert seq.tally.passes == 5


def test_a_long_prompt_never_stalls_those_who_decode():
    driver = Driver(blocks=100, config=budget(8))
    talkers = [driver.add(str(i), range(i, i + 2), max_tokens=100)[0] for i in range(4)]
    driver.step()
    driver.add("long", range(1000, 1200), max_tokens=1)
    for _ in range(50):
        before = [len(seq.tokens) for seq in talkers]
        driver.step()
        assert [len(seq.tokens) for seq in talkers] == [n + 1 for n in before]
        assert driver.plans[-1].total_rows == 8


def test_as_many_run_as_a_step_has_rows():
    driver = Driver(config=budget(3))
    seqs = [driver.add(str(i), [i], max_tokens=5)[0] for i in range(5)]
    driver.step()
    assert driver.scheduler.num_running == 3
    assert driver.scheduler.num_waiting == 2
    driver.run()
    assert all(len(seq.output_ids) == 5 for seq in seqs)


def test_first_come_first_served_even_if_a_later_one_would_fit():
    driver = Driver(blocks=8)
    driver.add("running", range(60), max_tokens=30)
    driver.step()
    [large] = driver.add("large", range(100, 180), max_tokens=1)
    [small] = driver.add("small", range(300, 310), max_tokens=1)
    driver.step()
    assert [large.status, small.status] == [Status.WAITING, Status.WAITING]
    driver.run()
    assert large.tally.first_scheduled <= small.tally.first_scheduled


# -- the prefix cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "hit"), [(15, 0), (16, 15), (17, 16), (31, 16), (32, 31), (33, 32)])
def test_a_prompt_asked_again_is_taken_from_the_cache(length, hit):
    driver = Driver()
    [first] = driver.add("first", range(length), max_tokens=20)
    driver.run()
    computed = driver.model.rows_computed
    [again] = driver.add("again", range(length), max_tokens=20)
    driver.run()
    assert [first.tally.cached, again.tally.cached] == [0, hit]
    assert driver.model.rows_computed - computed == length - hit + 19
    assert again.output_ids == first.output_ids


def test_a_conversation_finds_the_model_s_own_words():
    driver = Driver()
    [first] = driver.add("first", range(10), max_tokens=40)
    driver.run()
    [second] = driver.add("second", [*first.tokens, 1, 2, 3], max_tokens=5)
    driver.run()
    assert second.tally.cached == 48
    assert second.output_ids == solo(second, VOCAB)[0]


def test_two_prompts_wholly_cached_at_once_do_not_write_into_each_other():
    driver = Driver()
    driver.add("warm", range(32), max_tokens=1)
    driver.run()
    pair = [driver.add(str(i), range(32), max_tokens=30, seed=i)[0] for i in range(2)]
    driver.run()
    assert driver.plans[1].copies != []
    for seq in pair:
        assert seq.tally.cached == 31
        assert seq.output_ids == solo(seq, VOCAB)[0]


# -- preemption -----------------------------------------------------------------------------------------------------------


def test_two_that_cannot_both_finish_both_do():
    blocks = 10
    driver = Driver(blocks=blocks)
    length = 5 + 16 * (blocks // 2)
    pair = [driver.add(str(i), range(1000 * i, 1000 * i + 5), max_tokens=length)[0] for i in range(2)]
    driver.run()
    old, young = pair
    assert old.tally.preemptions == 0
    assert young.tally.preemptions >= 1
    for seq in pair:
        assert (seq.output_ids, seq.finish_reason) == solo(seq, VOCAB)


def test_one_that_is_preempted_three_times_counts_each_token_once():
    driver = Driver(blocks=10, config=budget(16, prefix_cache=False))
    [first] = driver.add("first", range(10), max_tokens=100)
    rest = [driver.add(str(i), range(1000 * i, 1000 * i + 10), max_tokens=100)[0] for i in range(1, 5)]
    told: dict[str, int] = {}
    for event in driver.run():
        told[event.sequence.request.id] = told.get(event.sequence.request.id, 0) + len(event.token_ids)
    assert first.tally.preemptions == 0
    assert max(seq.tally.preemptions for seq in rest) >= 3
    for seq in (first, *rest):
        assert (seq.output_ids, seq.finish_reason) == solo(seq, VOCAB)
        assert told[seq.request.id] == len(seq.output_ids)
    rows = sum(seq.prompt_len + len(seq.output_ids) - 1 + seq.tally.recomputed for seq in (first, *rest))
    assert driver.model.rows_computed == rows


def test_one_preempted_resumes_from_what_is_still_cached():
    driver = Driver(blocks=10)
    driver.add("old", range(10), max_tokens=90)
    driver.add("young", range(1000, 1010), max_tokens=140)
    driver.step()
    while driver.scheduler.num_waiting == 0:
        driver.step()
    [victim] = driver.scheduler._waiting
    before = len(victim.tokens) - 1
    driver.run()
    assert victim.tally.preemptions == 1
    assert 0 < victim.tally.recomputed < before
    assert victim.output_ids == solo(victim, VOCAB)[0]


def test_a_decoding_sequence_planned_already_makes_way_for_an_older_prompt(monkeypatch):
    driver = Driver(blocks=49, config=budget(24, prefix_cache=False))
    first, second = driver.add("old", range(712), max_tokens=1, n=2)  # the second computes the prompt again
    young = [driver.add(str(i), range(1000 * i, 1000 * i + 4), max_tokens=60)[0] for i in (1, 2)]
    planned: list[bool] = []
    preempt = driver.scheduler._preempt
    monkeypatch.setattr(
        driver.scheduler, "_preempt", lambda seq, plan: (planned.append(seq in plan.sequences), preempt(seq, plan))
    )
    driver.run()
    assert planned == [True]
    for seq in (first, second, *young):
        assert (seq.output_ids, seq.finish_reason) == solo(seq, VOCAB)


def test_nobody_is_let_in_who_would_be_thrown_out_at_once():
    driver = Driver(blocks=5)
    driver.add("a", range(30), max_tokens=50)  # will soon want a third block
    [seq] = driver.add("b", range(100, 140), max_tokens=8)  # wants three
    driver.run()
    assert seq.tally.preemptions == 0
    assert driver.model.rows_computed == 30 + 49 + 40 + 7  # nothing twice


def test_one_that_is_preempted_goes_back_before_those_who_came_later():
    driver = Driver(blocks=10, config=budget(64, sequences=2))
    [old] = driver.add("old", range(10), max_tokens=140)
    [victim] = driver.add("victim", range(1000, 1010), max_tokens=140)
    [late] = driver.add("late", range(2000, 2010), max_tokens=1)
    while not victim.tally.preemptions:
        driver.step()
    assert old.status is Status.RUNNING
    assert driver.scheduler._waiting == [victim, late]


# -- several choices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 16, 17, 32, 40])
@pytest.mark.parametrize("window", [None, 1, 8, 16, 17, 20])
def test_the_prompt_of_n_choices_is_computed_once(length, window):
    groups = FULL if window is None else (*FULL, CacheGroup(StateKind.SLIDING, window, (1,)))
    driver = Driver(groups=groups)
    seqs = driver.add("a", range(length), max_tokens=20, n=4)
    driver.run()
    assert driver.model.rows_computed == length + 3 + 4 * 19  # the last prompt token is computed by each
    assert [seq.tally.cached for seq in seqs] == [0] + [length - 1] * 3
    outputs = [seq.output_ids for seq in seqs]
    assert outputs == [solo(seq, VOCAB)[0] for seq in seqs]
    assert len({tuple(output) for output in outputs}) == 4


def test_others_go_on_while_choices_wait_for_their_prompt():
    driver = Driver(blocks=100, config=budget(16))
    first, second = driver.add("a", range(40), max_tokens=5, n=2)
    [other] = driver.add("b", range(100, 105), max_tokens=1)
    for _ in range(3):
        driver.step()
    assert first.num_computed == 40
    assert second.status is Status.WAITING
    assert other.finish_reason is FinishReason.LENGTH
    driver.run()
    assert second.output_ids == solo(second, VOCAB)[0]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_choices_whose_first_has_ended_compute_what_is_not_cached(max_tokens):
    driver = Driver()
    seqs = driver.add("a", range(40), max_tokens=max_tokens, n=3)
    driver.run()
    assert [seq.tally.cached for seq in seqs] == [0, 32, 32]
    assert [seq.output_ids for seq in seqs] == [solo(seq, VOCAB)[0] for seq in seqs]


def test_all_choices_have_the_prompt_s_logprobs():
    driver = Driver(config=budget(7))
    seqs = driver.add("a", range(20), max_tokens=3, n=2, prompt_logprobs=0)
    driver.run()
    assert [len(seq.prompt_logprobs) for seq in seqs] == [19, 19]
    assert seqs[0].prompt_logprobs == seqs[1].prompt_logprobs


# -- cancellation ---------------------------------------------------------------------------------------------------------


def cancel(driver: Driver, name: str) -> list[FinishReason | None]:
    events = driver.scheduler.cancel(name, driver.time)
    driver.scheduler.check()
    assert all(event.token_ids == () for event in events)
    return [event.finish_reason for event in events]


def test_cancelled_in_the_queue():
    driver = Driver()
    [seq] = driver.add("a", range(10))
    assert cancel(driver, "a") == [FinishReason.CANCELLED]
    assert not driver.scheduler.has_work
    assert driver.scheduler.plan(0.0) is None
    assert seq.output_ids == []


@pytest.mark.parametrize("steps", [1, 2, 4, 20])
def test_cancelled_between_steps_gives_back_its_blocks_at_once(steps):
    driver = Driver(config=budget(16))
    driver.add("a", range(40), max_tokens=100)
    for _ in range(steps):
        driver.step()
    assert cancel(driver, "a") == [FinishReason.CANCELLED]
    assert driver.scheduler.cache.usage().in_use == 0
    assert not driver.scheduler.has_work


def test_cancelled_during_a_step_gives_back_its_blocks_when_it_is_settled():
    driver = Driver()
    [seq] = driver.add("a", range(40), max_tokens=100)
    [other] = driver.add("b", range(10), max_tokens=3)
    plan = driver.scheduler.plan(0.0)
    assert cancel(driver, "a") == [FinishReason.CANCELLED]
    assert driver.scheduler.cache.usage().in_use == 4
    events = driver.scheduler.settle(plan, driver.model.run(plan), 0.0)
    assert [event.sequence for event in events] == [other]
    assert seq.output_ids == []
    assert driver.scheduler.cache.usage().in_use == 1
    driver.run()
    assert driver.scheduler.cache.match(make_seqs("c", range(40))[0]) == 0  # what was not settled is not known


def test_cancelled_while_preempted():
    driver = Driver(blocks=10)
    for i in range(2):
        driver.add(str(i), range(1000 * i, 1000 * i + 10), max_tokens=140)
    driver.step()
    while driver.scheduler.num_waiting == 0:
        driver.step()
    assert cancel(driver, "1") == [FinishReason.CANCELLED]
    assert driver.scheduler.num_waiting == 0
    driver.run()


def test_cancelled_while_choices_wait_for_their_prompt():
    driver = Driver(config=budget(16))
    driver.add("a", range(40), max_tokens=5, n=3)
    driver.step()
    assert cancel(driver, "a") == [FinishReason.CANCELLED] * 3
    assert driver.scheduler.cache.usage().in_use == 0


def test_cancelled_twice_or_after_the_end_or_never_there():
    driver = Driver()
    driver.add("a", range(10), max_tokens=1)
    driver.run()
    assert cancel(driver, "a") == []
    assert cancel(driver, "nobody") == []


def test_a_step_that_failed_ends_its_requests_and_no_others():
    driver = Driver(config=budget(16))
    seqs = driver.add("a", range(16), max_tokens=5, n=2)
    [other] = driver.add("b", range(100, 110), max_tokens=5)
    plan = driver.scheduler.plan(0.0)
    events = driver.scheduler.abandon(plan, 1.0)
    assert [event.sequence for event in events] == seqs
    driver.scheduler.check()
    driver.run()
    assert other.output_ids == solo(other, VOCAB)[0]


def test_a_step_is_settled_exactly_once():
    driver = Driver()
    driver.add("a", range(10), max_tokens=5)
    plan = driver.scheduler.plan(0.0)
    with pytest.raises(RuntimeError, match="must be settled"):
        driver.scheduler.plan(0.0)
    result = driver.model.run(plan)
    driver.scheduler.settle(plan, result, 0.0)
    with pytest.raises(RuntimeError, match="only once"):
        driver.scheduler.settle(plan, result, 0.0)
