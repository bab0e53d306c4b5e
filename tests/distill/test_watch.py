"""What counts as a training that goes wrong."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from obole.distill.watch import SETTLED, Diverged, Watch


def after(losses: list[float], watch: Watch = Watch()) -> Watch:  # noqa: B008  # frozen
    for loss in losses:
        watch = watch.after(loss, 1.0)
    return watch


@given(st.lists(st.floats(2.0, 4.0), min_size=1, max_size=400))
def test_noise_is_no_divergence(losses: list[float]) -> None:
    watch = after(losses)
    assert watch.is_well
    assert min(losses) - 1e-9 <= watch.level <= max(losses) + 1e-9


def test_a_training_that_gets_better_and_then_much_worse() -> None:
    watch = after([10.0] * 20 + [1.0] * 400)
    assert watch.level == pytest.approx(1.0, abs=0.01)
    worse = watch
    while worse.is_well:
        worse = worse.after(20.0, 1.0)
    with pytest.raises(Diverged, match=r"the loss of the last steps is .*, and was 1 at its best"):
        after([20.0] * 50, worse)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_numbers_that_are_none(loss: float, norm: float) -> None:
    with pytest.raises(Diverged, match="norm of the gradient"):
        Watch().after(loss, norm)


def test_the_beginning_is_not_judged() -> None:
    assert after([0.01] + [50.0] * (SETTLED - 2)).is_well
