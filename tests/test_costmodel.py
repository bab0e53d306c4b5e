"""What a step reads and how long it takes: counts by hand, and a curve that follows the machine."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from obole.costmodel import StepCost, kv_bytes_read, visible_tokens, weight_bytes_read


@given(st.integers(0, 60), st.integers(1, 20), st.none() | st.integers(1, 30))
def test_visible_tokens_are_those_that_some_row_sees(start, rows, window):
    seen = {
        position
        for row in range(start, start + rows)
        for position in range(row + 1)
        if window is None or position > row - window
    }
    assert visible_tokens(start, rows, window) == len(seen)


def test_bytes():
    assert kv_bytes_read(100, 4, ((None, 10), (16, 3))) == 104 * 10 + 19 * 3
    assert weight_bytes_read(5, 2, 1000, 300, 7) == 1000 + 2 * 300 + 5 * 7


ROWS = [1, 2, 4, 8, 16]


def cost(**more: float) -> StepCost:
    return StepCost(list(ROWS), [1.0, 1.1, 1.2, 1.6, 3.2], **more)


def test_the_curve_goes_through_what_was_measured_and_then_by_rows():
    curve = cost().curve(64)
    assert [curve[r] for r in ROWS] == [1.0, 1.1, 1.2, 1.6, 3.2]
    assert curve[3] == curve[4]  # products pad their rows
    assert curve[9] == curve[12] == pytest.approx(2.4)
    assert curve[0] == 1.0
    assert curve[64] == pytest.approx(3.2 * 4)
    assert (np.diff(curve) >= 0).all()


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=5), st.integers(0, 100))
def test_more_rows_never_take_less_time(seconds, most):
    model = StepCost(ROWS[: len(seconds)], list(seconds))
    curve = model.curve(most)
    assert curve.shape == (most + 1,)
    assert (np.diff(curve) >= 0).all()
    assert (model.curve(most // 2) == curve[: most // 2 + 1]).all()


def test_context_costs_what_it_costs():
    model = cost(context_seconds=0.001, read_seconds=0.01)
    assert model.of(4, 400, 100) == pytest.approx(1.2 + 0.4 + 1.0)
    model.pace = 2.0
    assert model.of(4, 400, 100) == pytest.approx(2 * 2.6)


@pytest.mark.parametrize("factor", [0.3, 0.5, 2.0, 5.0])
def test_a_machine_that_changes_its_pace_is_followed_within_seconds(factor):
    model, truth = cost(), cost()
    shape = model.of(8, 0, 0) / model.of(1, 0, 0)
    for step in range(40):
        rows = ROWS[step % 3]
        model.observe(rows, 0, 0, factor * truth.of(rows, 0, 0))
    for rows in ROWS:
        assert model.of(rows, 0, 0) == pytest.approx(factor * truth.of(rows, 0, 0), rel=0.15)
    assert model.of(8, 0, 0) / model.of(1, 0, 0) == pytest.approx(shape, rel=0.25)  # decisions rest on this


def test_a_wrong_shape_is_unlearnt():
    """Eight rows take twice as long as was measured, one row as long."""
    model = cost()
    errors = []
    for _ in range(300):
        model.observe(1, 0, 0, 1.0)
        model.observe(8, 0, 0, 3.2)
        errors.append(abs(math.log(model.of(8, 0, 0) / model.of(1, 0, 0) / 3.2)))
    assert errors[0] > 0.6
    assert errors[60] < 0.2
    assert errors[-1] < 0.01
    assert model.of(1, 0, 0) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize(("rows", "point"), [(2, 1), (3, 2), (4, 2), (5, 3), (7, 3), (14, 4)])
def test_a_step_corrects_the_point_that_its_cost_came_from(rows, point):
    model = cost()
    before = list(model.seconds)
    model.observe(rows, 0, 0, 1.5 * model.of(rows, 0, 0))
    assert [i for i in range(5) if model.seconds[i] != before[i]] == [point]
    assert model.seconds[point] > before[point]


def test_one_outlier_changes_little():
    model = cost()
    model.observe(8, 0, 0, 1000.0)
    assert model.of(8, 0, 0) < 1.6 * 1.5
    model.observe(8, 0, 0, 0.0)
    assert 0.9 < model.of(8, 0, 0) / 1.6 < 1.2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 64), st.integers(0, 10_000), st.floats(0, 1e6)), max_size=60))
def test_whatever_is_observed_costs_stay_finite_and_in_order(steps):
    model = cost(context_seconds=1e-6, read_seconds=1e-5)
    for rows, context, seconds in steps:
        model.observe(rows, rows * context, context, seconds)
    curve = model.curve(100)
    assert np.isfinite(curve).all()
    assert (np.diff(curve) >= 0).all()
    assert curve[0] > 0
    assert 0 < model.pace < math.inf


@settings(max_examples=60, deadline=None)
@given(st.floats(0.2, 5), st.integers(1, 16), st.integers(0, 1000))
def test_every_observation_moves_towards_the_truth(factor, rows, context):
    model = cost(context_seconds=1e-5, read_seconds=1e-5)
    before = model.of(rows, rows * context, context)
    seconds = before * factor
    model.observe(rows, rows * context, context, seconds)
    after = model.of(rows, rows * context, context)
    assert min(before, seconds) * (1 - 1e-9) <= after <= max(before, seconds) * (1 + 1e-9)
    assert abs(math.log(after / seconds)) <= abs(math.log(before / seconds)) + 1e-9


def test_reading_a_prompt_costs_its_steps_and_its_context():
    cost = StepCost([1, 2, 64], [0.010, 0.010, 0.072], context_seconds=1e-6, read_seconds=1e-6, pace=2.0)
    assert cost.prefill(100, 100, 64) == 0.0
    assert cost.prefill(0, 64, 64) == pytest.approx(2.0 * (0.072 + 1e-6 * 64 * 32 + 1e-6 * 32))
    whole, parts = cost.prefill(0, 160, 64), 2.0 * (2 * 0.072 + float(cost.curve(32)[32]))
    assert whole == pytest.approx(parts + 2.0 * (1e-6 * 160 * 80 + 1e-6 * 3 * 80))
    assert cost.prefill(64, 160, 64) < whole
    assert cost.prefill(1000, 1160, 64) > whole
