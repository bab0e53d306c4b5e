"""What is learnt of proposals: the chance that their tokens are right, of each kind and place."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from obole.speculate.acceptance import MOST_TRIALS, Acceptance, Counts, Kind, bucket_of, kind_of
from obole.speculate.proposal import LONGEST_DRAFT, Proposal
from obole.types import Source

SOURCES = [s for s in Source if s is not Source.MODEL]
KINDS = st.builds(Kind, st.sampled_from(SOURCES), st.booleans(), st.integers(0, 6))


def test_buckets_of_match_lengths():
    expected = {1: 0, 2: 1, 3: 2, 4: 2, 5: 3, 8: 3, 9: 4, 16: 4, 17: 5, 32: 5, 33: 6, 10**12: 6, 0: 0, -5: 0}
    assert {length: bucket_of(length) for length in expected} == expected


def test_kinds():
    assert kind_of(Proposal(Source.MEMORY, 7, 0.95, [1])) == (Source.MEMORY, False, 3)
    assert kind_of(Proposal(Source.LOOKUP, 2, 0.5, [1])) == (Source.LOOKUP, True, 1)


def test_a_longer_and_a_clearer_match_promise_more_before_anything_is_known():
    known = Acceptance()
    chances = [known.first(Kind(Source.LOOKUP, False, bucket), {}) for bucket in range(7)]
    assert chances == sorted(chances)
    assert all(known.first(Kind(Source.LOOKUP, True, b), {}) < chances[b] for b in range(7))


def test_what_is_forced_is_certain():
    assert Acceptance().survival(Kind(Source.FORCED, False, 6), {}, 64, 5) == [1.0] * 5


def observations(known: Acceptance, kind: Kind, chance: float, count: int, rng: random.Random, own=None, tokens: int = 8):
    for _ in range(count):
        right = 0
        while right < tokens and rng.random() < chance:
            right += 1
        known.observe(kind, {} if own is None else own, right, min(right + 1, tokens))


@pytest.mark.parametrize("chance", [0.05, 0.5, 0.9, 0.99])
def test_the_truth_is_learnt(chance):
    known, kind = Acceptance(), Kind(Source.LOOKUP, False, 3)
    observations(known, kind, chance, 400, random.Random(1))
    assert known.first(kind, {}) == pytest.approx(chance, abs=0.08)
    curve = known.survival(kind, {}, 6, 8)
    for place in (0, 1, 3, 7):
        assert curve[place] == pytest.approx(chance ** (place + 1), abs=0.12)


def test_a_change_is_followed():
    known, kind = Acceptance(), Kind(Source.MEMORY, False, 2)
    observations(known, kind, 0.95, 300, random.Random(1))
    observations(known, kind, 0.05, 300, random.Random(2))
    assert known.first(kind, {}) < 0.3
    observations(known, kind, 0.95, 300, random.Random(3))
    assert known.first(kind, {}) > 0.7


def test_one_sequence_may_differ_from_the_others():
    known, kind = Acceptance(), Kind(Source.LOOKUP, False, 3)
    own: dict[Kind, Counts] = {}
    observations(known, kind, 0.9, 300, random.Random(1))
    observations(known, kind, 0.02, 30, random.Random(2), own)
    assert known.first(kind, own) < 0.35
    assert known.first(kind, {}) > 0.7
    assert known.survival(kind, own, 6, 4)[3] < 0.05


def test_places_seldom_reached_borrow_from_longer_matches():
    known = Acceptance()
    short, long = Kind(Source.LOOKUP, False, 1), Kind(Source.LOOKUP, False, 4)
    for _ in range(200):
        known.observe(short, {}, 1, 1)  # only ever the first place was seen
        known.observe(long, {}, 0, 1)
    curve = known.survival(short, {}, 2, 16)
    assert curve[0] > 0.9
    later = known.survival(short, {}, 2, 16)[15] / known.survival(short, {}, 2, 16)[14]
    assert later == pytest.approx(known.first(long, {}), rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(KINDS, st.integers(1, LONGEST_DRAFT), st.integers(0, LONGEST_DRAFT), st.booleans()), max_size=40),
    KINDS,
    st.integers(1, 100),
    st.integers(0, LONGEST_DRAFT),
)
def test_chances_are_chances_and_never_rise_along_a_draft(observed, kind, length, tokens):
    known, own = Acceptance(), {}
    for seen, tested, wrong, fade in observed:
        known.observe(seen, own, tested if wrong >= tested else tested - 1, tested)
        if fade:
            known.fade(seen, own)
    assert 0 <= known.first(kind, own) <= 1
    curve = known.survival(kind, own, length, tokens)
    assert len(curve) == tokens
    assert all(0 <= chance <= 1 for chance in curve)
    assert curve == sorted(curve, reverse=True)
    assert all(c.right <= c.trials <= MOST_TRIALS + 1e-9 for c in (*known.counts.values(), *own.values()))
    if tokens and kind.source is not Source.FORCED:
        assert curve[0] == pytest.approx(known.first(kind, own))


@given(KINDS, st.integers(1, LONGEST_DRAFT), st.booleans())
def test_an_observation_moves_the_first_chance_its_way(kind, tested, wrong):
    known = Acceptance()
    before = known.first(kind, {})
    known.observe(kind, {}, tested - wrong, tested)
    first_was_right = tested > 1 or not wrong
    assert (known.first(kind, {}) > before) is first_was_right
