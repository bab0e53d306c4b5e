"""Lengths of drafts: against brute force over all of them, and where the answer is known."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from obole.speculate.lengths import GAIN, best_alone, best_lengths


def rate(survival, lengths, decoding, seconds, extra):
    drafted = sum(lengths)
    expected = decoding + sum(sum(chances[:n]) for chances, n in zip(survival, lengths, strict=True))
    return expected / (seconds[drafted] + extra * drafted)


@st.composite
def survivals(draw: st.DrawFn) -> list[list[float]]:
    curves = []
    for _ in range(draw(st.integers(1, 3))):
        chances = draw(st.lists(st.floats(0, 1), max_size=4))
        curves.append(list(itertools.accumulate(chances, lambda a, b: a * b)))
    return curves


@settings(max_examples=300, deadline=None)
@given(survivals(), st.integers(0, 3), st.lists(st.floats(0.01, 1), min_size=14, max_size=14), st.floats(0, 0.5))
def test_no_other_lengths_promise_more(survival, more, increments, extra):
    decoding = len(survival) + more
    seconds = 1 + np.cumsum([0.0, *increments])
    lengths = best_lengths(survival, decoding, seconds, extra)
    got = rate(survival, lengths, decoding, seconds, extra)
    plain = decoding / seconds[0]
    best = max(
        rate(survival, other, decoding, seconds, extra)
        for other in itertools.product(*(range(len(chances) + 1) for chances in survival))
    )
    if any(lengths):
        assert got > GAIN * plain
        assert got >= best * (1 - 1e-12)
    else:
        assert best <= GAIN * plain * (1 + 1e-12)


def test_drafts_shrink_as_the_batch_grows_and_vanish_when_it_is_saturated():
    chances = [0.9**j for j in range(1, 17)]

    def seconds(rows: int) -> np.ndarray:
        at = np.arange(rows, rows + 2000)
        return np.maximum(1.0, at / 16)  # memory up to 16 rows, arithmetic beyond

    drafted = [sum(best_lengths([chances] * n, n, seconds(n))) / n for n in (1, 4, 8, 16, 64)]
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] == 15
    assert drafted[-1] == 0


def test_alone_and_together_agree():
    chances = [0.8, 0.6, 0.3, 0.1]
    seconds = np.array([1.0, 1.1, 1.2, 1.4, 1.6])
    length, promised = best_alone(chances, 1, seconds, 0.0)
    assert best_lengths([chances], 1, seconds) == [length] == [2]
    assert promised == (1 + 0.8 + 0.6) / 1.2
