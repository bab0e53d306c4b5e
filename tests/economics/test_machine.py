"""What steps cost, measured: all that they take, and what the controller hears; the engine itself learns nothing of it."""

from __future__ import annotations

import copy

import pytest

from obole.economics import machine
from obole.economics.machine import DRAFTED, IN_CONTEXT, fitted, measure, stepping, timed_step
from obole.types import SamplingParams

COST = ("rows", "seconds", "context_seconds", "read_seconds", "pace")


def test_costs_are_found_again_in_the_times_of_steps():
    def seconds(rows: int, context: int) -> float:
        return 0.01 + 0.001 * rows + context * (2e-6 * rows + 3e-6)

    times = {
        (context, count): seconds(1 + count, context)
        for context, counts in ((32, DRAFTED), (512, IN_CONTEXT))
        for count in counts
    }
    cost = fitted(times, 32, 512)
    assert cost.rows == [1 + count for count in DRAFTED]
    assert cost.seconds == pytest.approx([0.01 + 0.001 * rows for rows in cost.rows])
    assert (cost.context_seconds, cost.read_seconds) == pytest.approx((2e-6, 3e-6))


def test_a_measured_engine_knows_what_it_knew_before(tiny_engine, monkeypatch):
    monkeypatch.setattr(machine, "LONG", 96)
    engine = tiny_engine("llama", blocks=64)
    [before] = engine.generate([[5, 6, 7] * 9], SamplingParams(max_tokens=40, ignore_eos=True))
    controller = engine._controller
    cost, acceptance, lengths = copy.deepcopy(controller.cost), copy.deepcopy(controller.acceptance), controller.lengths
    found = measure(engine, rounds=1)
    assert [getattr(controller.cost, name) for name in COST] == [getattr(cost, name) for name in COST]
    assert controller.acceptance == acceptance
    assert controller.lengths is lengths
    assert all(0 < told < whole for told, whole in zip(found.told.seconds, found.cost.seconds, strict=True))
    [after] = engine.generate([[5, 6, 7] * 9], SamplingParams(max_tokens=40, ignore_eos=True), tenant="another")
    assert after.token_ids == before.token_ids


def test_a_timed_step_has_the_rows_that_were_asked_for(tiny_engine):
    engine = tiny_engine("llama", blocks=64)
    run, rows = engine._run, []

    def noted(plan):
        rows.append(plan.total_rows)
        return run(plan)

    engine._run = noted
    with stepping(engine, 20) as stream:
        rows.clear()
        for count in (0, 3, 0, 7):
            timed = timed_step(engine, stream, count)
            assert 0 < timed.told < timed.whole
    assert rows == [1, 4, 1, 8]
