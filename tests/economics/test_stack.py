"""Stack distances and the curve against a cache that is really simulated."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from obole.economics.formats import _mixed
from obole.economics.stack import HitCurve, StackDistances

requests = st.lists(st.tuples(st.lists(st.integers(0, 12), max_size=6), st.lists(st.integers(0, 12), max_size=3)), max_size=30)


class Cache:
    """LRU over blocks; a request is looked up as a whole, then its blocks are used from last to first."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def request(self, keys: list[int], used: list[int]) -> list[bool]:
        hits = [key in self.blocks for key in keys]
        for key in reversed([*keys, *used]):
            self.blocks[key] = None
            self.blocks.move_to_end(key)
        while len(self.blocks) > self.room:
            self.blocks.popitem(last=False)
        return hits


@given(requests, st.integers(1, 14))
def test_a_block_is_found_if_and_only_if_its_distance_fits(asked, room):
    distances, cache = StackDistances(), Cache(room)
    for keys, used in asked:
        found = distances.request(keys, used)
        hits = cache.request(keys, used)
        assert found.places.tolist() == list(range(len(keys)))
        # blocks of one request that the cache cannot hold together are dropped in the simulation only as they are used
        assert [bool(d <= room) for d in found.distances] == hits


@given(requests, st.integers(1, 20))
def test_the_curve_is_the_simulation_at_every_size(asked, room):
    distances, curve, cache, hits = StackDistances(), HitCurve(), Cache(room), 0
    for keys, used in asked:
        curve.add(distances.request(keys, used), [16] * len(keys), 16 * len(keys) + 3)
        hits += 16 * sum(cache.request(keys, used))
    assert curve.hits(room) == hits
    total = sum(16 * len(keys) + 3 for keys, _ in asked)
    assert curve.ratio(room) == (hits / total if total else 0.0)
    ratios = [ratio for _, ratio in curve.points()]
    assert ratios == sorted(ratios)


def test_blocks_before_others_are_never_dropped_first():
    distances = StackDistances()
    distances.request([1, 2, 3, 4])
    assert distances.request([1, 2, 3, 4]).distances.tolist() == [1, 2, 3, 4]
    assert distances.request([1, 2, 9]).distances.tolist() == [1, 2, np.inf]
    assert distances.request([1, 2, 3, 4, 9]).distances.tolist() == [1, 2, 4, 5, 3]


def test_the_order_survives_compaction():
    distances, seen = StackDistances(), []
    for i in range(30_000):
        keys = [_mixed(i % 700), _mixed(i % 11)]
        found = distances.request(keys)
        seen.append(found.distances.tolist())
    assert seen[-1] == [700, 22]  # the large cycle, which has the small one in it; 11 requests of two blocks each


def test_a_sample_estimates_the_curve():
    rng = np.random.default_rng(1)
    exact, sampled = StackDistances(), StackDistances(most=2000)
    curves = HitCurve(), HitCurve()
    for _ in range(4000):
        start = int(rng.zipf(1.3)) % 6000
        keys = [_mixed(start * 64 + i) for i in range(8)]
        for one, curve in zip((exact, sampled), curves, strict=True):
            curve.add(one.request(keys), [16] * 8, 128)
    assert exact.rate == 1
    assert sampled.rate < 0.5
    for size in (500, 2000, 8000, 30_000):
        assert curves[1].ratio(size) == pytest.approx(curves[0].ratio(size), abs=0.05)
