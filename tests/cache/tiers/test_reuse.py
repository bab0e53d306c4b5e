"""Estimates of reuse against exact counts."""

from __future__ import annotations

import random

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from obole.cache.tiers.reuse import BUCKETS, ReuseEstimator, bucket


def key(number: int) -> bytes:
    return blake3(b"%d" % number).digest() + b"\0\0"


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(0, 1e6), st.booleans()), max_size=200))
def test_exact_while_all_keys_fit(uses):
    estimator = ReuseEstimator(limit=21)
    now, last, gaps, ideal = 0.0, dict[int, float](), [0] * BUCKETS, 0
    for number, pause, hit in uses:
        now += pause
        if number in last:
            ideal += 1
            gap = now - last[number]
            place = next((i for i in range(BUCKETS) if gap < 2**i), BUCKETS - 1)
            gaps[place] += 1
        last[number] = now
        estimator.add(key(number), now, hit)
    value = estimator.value()
    assert (value.asked, value.hits, value.ideal_hits) == (len(uses), sum(hit for *_, hit in uses), ideal)
    assert value.gaps == tuple(gaps)
    assert (value.followed, value.rate) == (len(last), 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_close_where_they_do_not(seed):
    chance = random.Random(seed)
    numbers = [chance.randrange(10_000) if chance.random() < 0.7 else chance.randrange(10**9) for _ in range(60_000)]
    estimator = ReuseEstimator(limit=4096)
    seen: set[int] = set()
    exact = hits = 0
    for now, number in enumerate(numbers):
        hit = number in seen and number % 3 != 0
        exact += number in seen
        hits += hit
        seen.add(number)
        estimator.add(key(number), now, hit)
    value = estimator.value()
    assert value.followed <= 4096
    assert value.rate < 0.25
    assert value.hits == hits
    assert value.ideal_hits == pytest.approx(exact, rel=0.05)
    assert value.share_of_ideal == pytest.approx(hits / exact, rel=0.05)
    assert sum(value.gaps) == pytest.approx(value.ideal_hits)


def test_the_share_of_the_ideal():
    estimator = ReuseEstimator()
    assert estimator.value().share_of_ideal is None
    prompt = [key(n) for n in range(4)]
    estimator.prompt(prompt, 0.0, 0)
    estimator.prompt(prompt, 3.0, 3)
    assert estimator.value().share_of_ideal == 0.75
    assert estimator.value().gaps[bucket(3.0)] == 4


@pytest.mark.parametrize(("seconds", "place"), [(0, 0), (0.99, 0), (1, 1), (1.99, 1), (2, 2), (3600, 12), (1e12, BUCKETS - 1)])
def test_buckets(seconds, place):
    assert bucket(seconds) == place
