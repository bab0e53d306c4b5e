"""Text that should stand in front: found, and worth what is said, by putting it there."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from obole.economics.audit import block_keys
from obole.economics.passages import SHINGLE, Sample, passages, runs, shared_prefixes, shingles
from obole.economics.stack import HitCurve, StackDistances

BLOCK = 16


def hits(prompts: list[list[int]]) -> int:
    """Tokens that a cache without bounds finds."""
    distances, curve = StackDistances(), HitCurve()
    for prompt in prompts:
        keys = block_keys("", prompt)
        curve.add(distances.request(keys), [BLOCK] * len(keys), len(prompt))
    return round(curve.hits(1e9))


@pytest.mark.parametrize("length", [48, 200, 1000])
def test_a_passage_behind_a_time_stamp_is_found_and_gains_what_is_said(length):
    rng = random.Random(length)
    passage = [rng.randrange(50_000) for _ in range(length)]
    ends = [[rng.randrange(50_000) for _ in range(rng.randrange(20, 90))] for _ in range(40)]
    stamps = [[7, 8, *(rng.randrange(50_000) for _ in range(5))] for _ in range(40)]
    before = [[*stamp, *passage, *end] for stamp, end in zip(stamps, ends, strict=True)]
    after = [[*passage, *stamp, *end] for stamp, end in zip(stamps, ends, strict=True)]
    [found] = passages([np.array(p, np.int32) for p in before], BLOCK)
    assert found.tokens.tolist() == passage
    assert (found.prompts, found.position) == (40, 7)
    assert found.gain == hits(after) - hits(before)
    assert found.before.tolist() in stamps


def test_what_stands_in_front_already_is_no_finding():
    rng = random.Random(0)
    front = [rng.randrange(50_000) for _ in range(200)]
    prompts = [np.array([*front, *(rng.randrange(50_000) for _ in range(60))], np.int32) for _ in range(20)]
    assert passages(prompts, BLOCK) == []
    assert passages([], BLOCK) == []
    assert passages([np.array([1, 2], np.int32)] * 3, BLOCK) == []


def test_a_passage_is_told_once_whatever_stands_before_and_behind():
    rng = random.Random(3)
    passage = [rng.randrange(50_000) for _ in range(150)]
    prompts = []
    for i in range(40):
        unique = [rng.randrange(50_000) for _ in range(20)]
        prompts.append(np.array([*unique, i % 4, *passage, i % 5, *unique[::-1]], np.int32))
    [found] = passages(prompts, BLOCK)
    assert found.tokens.tolist() == passage
    assert found.prompts == 40


def test_two_passages_are_told_apart():
    rng = random.Random(5)
    first, second = ([rng.randrange(50_000) for _ in range(100)] for _ in range(2))
    prompts = []
    for i in range(30):
        fill = [rng.randrange(50_000) for _ in range(9)]
        prompts.append(np.array([*fill, *first, *fill[::-1], *(second if i % 2 else [])], np.int32))
    found = passages(prompts, BLOCK)
    assert [one.tokens.tolist() for one in found] == [first, second]
    assert [one.prompts for one in found] == [30, 15]


tokens = st.lists(st.integers(0, 3), max_size=60)


@given(st.lists(tokens, max_size=6))
def test_shared_prefixes_against_all_pairs(prompts):
    def common(a, b):
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    expected = [max((common(p, q) for j, q in enumerate(prompts) if j != i), default=0) for i, p in enumerate(prompts)]
    assert shared_prefixes([np.array(p, np.int32) for p in prompts]) == expected


@settings(max_examples=50)
@given(st.lists(st.integers(0, 1), min_size=SHINGLE, max_size=150))
def test_shingles_are_equal_where_the_tokens_are(text):
    hashes = shingles(np.array(text, np.int32)).tolist()
    spelled = [tuple(text[i : i + SHINGLE]) for i in range(len(text) - SHINGLE + 1)]
    assert len(hashes) == len(spelled)
    assert len(set(hashes)) == len(set(spelled))
    assert len({*zip(hashes, spelled, strict=True)}) == len(set(spelled))


def test_runs():
    assert runs(np.array([1, 5, 5, 5, 9, 9, 2]), 3) == [(1, 4), (4, 6)]
    assert runs(np.array([], np.int64), 3) == []


def test_the_sample_is_even():
    sample = Sample(most=50, longest=3)
    for i in range(5000):
        sample.add([i, 0, 0, 0, 0])
    values = [int(p[0]) for p in sample.prompts]
    assert len(values) == 50
    assert all(len(p) == 3 for p in sample.prompts)
    assert 1500 < sum(values) / 50 < 3500
