"""How many rows of prompts a step takes beside those who wait for a token."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from obole.config import SchedulerConfig
from obole.costmodel import StepCost
from obole.errors import ConfigError
from obole.scheduler.budget import LEAST_ROWS, StepBudget, step_budget
from tests.fakes.driver import Driver

ROWS = [1, 2, 4, 8, 16, 32, 64]
SECONDS = [1.0, 1.1, 1.2, 1.6, 2.4, 4.8, 9.6]


def cost(**more: float) -> StepCost:
    return StepCost(list(ROWS), list(SECONDS), **more)


def config(stretch: float = 3.0, rows: int = 512) -> SchedulerConfig:
    return SchedulerConfig(max_batch_tokens=rows, step_stretch=stretch)


def test_all_rows_where_nobody_waits_for_a_token_or_nothing_is_known_of_the_cost():
    assert step_budget(config(), 0, 0, cost()).room(0) == 512
    assert step_budget(config(), 5, 100, None).room(0) == 507


def test_no_more_than_keep_the_step_within_its_stretch():
    # 1 row takes 1.0 s, 3 times that is between 20 rows (3.0 s) and 24: rows are computed in fours, one is the decoding one
    assert step_budget(config(3.0), 1, 0, cost()).room(0) == 19
    assert step_budget(config(9.6), 1, 0, cost()).room(0) == 63
    assert step_budget(config(9.6, rows=40), 1, 0, cost()).room(0) == 39
    # 8 rows take 1.6 s, so 4.8 s: 32 rows
    assert step_budget(config(3.0), 8, 0, cost()).room(0) == 24


def test_drafts_take_of_the_time_but_not_of_the_rows():
    assert step_budget(config(9.6), 1, 0, cost(), drafted=20).room(0) == 43
    assert step_budget(config(3.0), 1, 0, cost(), drafted=60).room(0) == LEAST_ROWS
    assert step_budget(config(9.6, rows=40), 1, 0, cost(), drafted=10).room(0) == 39


def test_context_counts_on_both_sides():
    model = cost(context_seconds=0.001, read_seconds=0.002)
    # one sequence with 1,000 tokens: 1.0 + 1.0 + 2.0 = 4.0 s, so 8.0 s at a stretch of 2, of which 3.0 s are its own context
    budget = step_budget(config(2.0), 1, 1000, model)
    assert budget.room(0) == 27  # 28 rows take 4.2 s and their own context 0.4 s; 32 take 4.8 s and 0.5 s
    assert step_budget(config(2.0), 1, 1000, cost()).room(0) == LEAST_ROWS
    budget.take(27, 0)
    assert budget.room(0) == 0


@given(
    st.floats(1, 20),
    st.integers(1, 300),
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 5000)), max_size=5),
    st.floats(0, 1e-4),
)
def test_a_step_keeps_within_its_stretch_or_has_the_least_rows(stretch, decoding, prompts, context_seconds):
    model = cost(context_seconds=context_seconds, read_seconds=context_seconds)
    budget = step_budget(config(stretch), decoding, 100 * decoding, model)
    plain = model.of(decoding, 100 * decoding, 100 * decoding)
    total, prompt_rows, context = decoding, 0, 0.0
    for wanted, start in prompts:
        rows = min(budget.room(start), wanted)
        budget.take(rows, start)
        total += rows
        prompt_rows += rows
        context += model.context_of(rows, start) if rows else 0.0
    assert total <= max(512, decoding)
    if prompt_rows > LEAST_ROWS:
        seconds = model.of(total, 100 * decoding, 100 * decoding) + context
        assert seconds <= stretch * plain * (1 + 1e-9)


@given(st.floats(0.1, 50), st.integers(0, 100), st.integers(0, 3000), st.integers(1, 300), st.floats(0.5, 2))
def test_rows_within_is_the_most_that_fit(seconds, rows, start, most, pace):
    model = cost(context_seconds=1e-5, read_seconds=1e-5)
    model.pace = pace

    def taken(added: int) -> float:
        return model.of(rows + added, 0, 0) + model.context_of(added, start)

    found = model.rows_within(seconds, rows, start, most)
    assert 0 <= found <= most
    assert found == 0 or taken(found) <= seconds * (1 + 1e-9)
    assert found == most or taken(found + 1) >= seconds * (1 - 1e-9)


def test_a_long_prompt_goes_in_pieces_while_others_decode_and_whole_when_they_have_ended():
    driver = Driver(blocks=200, context=2000, config=config())
    driver.scheduler.cost = cost()
    driver.add("a", range(3), max_tokens=6)
    driver.step()
    assert driver.plans[0].rows == [3]
    driver.add("b", range(600), max_tokens=2)
    rows = []
    while driver.scheduler.has_work:
        driver.step()
        plan = driver.plans[-1]
        rows.append(dict(zip([s.request.id for s in plan.sequences], plan.rows, strict=True)))
    assert rows[:5] == [{"a": 1, "b": 19}] * 5
    assert rows[5] == {"b": 505}


def test_those_who_come_later_do_not_overtake_a_prompt_for_which_there_is_no_room():
    budget = StepBudget(64, 1, seconds=math.inf, cost=cost())
    budget.take(63, 0)
    assert budget.room(0) == 0


@pytest.mark.parametrize("stretch", [0.5, -1, True, "3", math.nan, 1e9])
def test_a_stretch_that_means_nothing_is_refused(stretch):
    with pytest.raises(ConfigError, match="step_stretch must be a number from 1"):
        SchedulerConfig(step_stretch=stretch)


def test_only_prompts_that_can_enter_are_rows_of_the_next_step():
    driver = Driver(config=SchedulerConfig(max_batch_tokens=64, max_sequences=2))
    scheduler = driver.scheduler
    assert scheduler.other_rows() == 0
    for name in "ab":
        driver.add(name, range(10), max_tokens=4)
    assert scheduler.other_rows() == 20
    driver.step()
    driver.add("c", range(30), max_tokens=4)
    assert scheduler.other_rows() == 0  # there is no place for it yet
    while scheduler.num_running == 2:
        driver.step()
    assert scheduler.other_rows() == 30
