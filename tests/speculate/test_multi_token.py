"""What a model predicts several tokens ahead: how sure that is, how many masks, what rows are worth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from obole.config import MultiToken
from obole.speculate.acceptance import Acceptance
from obole.speculate.multi_token import LATER, LEAST_CHANCE, MASKS, Calibration, Foresight, expected, foresight, unverified
from obole.types import Ahead, Request, SamplingParams, Sequence, Source

MODEL = MultiToken(99, 16)


def sequence(output: int, **params) -> Sequence:
    request = Request(id="r", prompt_ids=(1, 2, 3), params=SamplingParams(**params), seed=0)
    seq = Sequence(request, 0, 0, 100)
    seq.tokens += [7] * output
    return seq


def test_chances_begin_at_the_confidence_and_become_what_was_seen():
    known = Calibration()
    assert known.chance(0.93) == pytest.approx(0.93)
    for _ in range(200):
        known.observe([Ahead(5, 0.93)], 0, 1)
    assert known.chance(0.93) < 0.05
    assert known.chance(0.999) == pytest.approx(0.999)
    assert known.survival([Ahead(5, 0.93)], LEAST_CHANCE) == []


def test_only_what_was_put_to_the_test_is_learnt_from():
    known = Calibration()
    known.observe([Ahead(1, 0.2), Ahead(2, 0.6), Ahead(3, 0.97)], 1, 2)
    assert known.chance(0.2) > 0.2
    assert known.chance(0.6) < 0.6
    assert known.chance(0.97) == pytest.approx(0.97)


@given(st.lists(st.floats(0.0, 1.0), max_size=15))
def test_survival_never_increases_and_ends_where_it_is_worth_little(confidences):
    curve = Calibration().survival([Ahead(0, c) for c in confidences], LEAST_CHANCE)
    assert curve == sorted(curve, reverse=True)
    assert len(curve) <= len(confidences)
    assert all(chance >= LEAST_CHANCE for chance in curve)


@given(st.lists(st.integers(0, 15), max_size=40), st.integers(2, 64))
def test_masks_stay_in_their_bounds_and_follow_what_is_taken(counts, most):
    ahead = foresight(MultiToken(99, most), SamplingParams(mtp="confadapt", mtp_tokens=64))
    for count in counts:
        masks = ahead.masks()
        assert 1 <= masks <= most - 1
        ahead.took(min(count, masks), masks)
    for _ in range(60):
        ahead.took(ahead.masks(), ahead.masks())
    assert ahead.masks() == most - 1
    for _ in range(60):
        ahead.took(0, ahead.masks())
    assert ahead.masks() == min(2, most - 1)


@pytest.mark.parametrize(
    ("params", "most", "threshold", "fixed"),
    [
        ({"mtp": "static", "mtp_tokens": 4}, 3, 0.0, True),
        ({"mtp": "static", "mtp_tokens": 64}, 15, 0.0, True),
        ({"mtp": "confadapt", "tau": 0.7}, 15, 0.7, False),
        ({"mtp": "verify"}, 15, None, False),
        ({}, 15, None, False),
    ],
)
def test_what_a_request_asks_for(params, most, threshold, fixed):
    ahead = foresight(MODEL, SamplingParams(**params))
    assert (ahead.most, ahead.threshold, ahead.fixed) == (most, threshold, fixed)


def test_the_first_token_of_an_answer_comes_alone():
    ahead = foresight(MODEL, SamplingParams(mtp="static"))
    assert unverified(sequence(0), ahead, 50) is None
    draft = unverified(sequence(1), ahead, 50)
    assert draft is not None
    assert (draft.tokens, draft.sources, draft.masks, draft.threshold) == ([99] * 15, [], 15, 0.0)
    assert unverified(sequence(1), ahead, 4).masks == 4
    assert unverified(sequence(1), ahead, 0) is None


def test_masks_stand_behind_predictions_and_are_cut_first():
    ahead = Foresight(99, 3, ahead=[Ahead(5, 0.9), Ahead(6, 0.8)])
    proposal = ahead.proposal(50)
    assert (proposal.tokens, proposal.masks) == ([5, 6, 99, 99, 99], 3)
    whole, part = proposal.draft(5), proposal.draft(3)
    assert (whole.proposed, whole.masks, whole.sources) == (2, 3, [Source.MTP] * 2)
    assert (part.tokens, part.proposed, part.masks) == ([5, 6, 99], 2, 1)
    assert proposal.draft(1).masks == 0
    assert proposal.draft(64) == whole
    assert ahead.proposal(0) is None
    worths = expected(proposal, [0.9, 0.72], Acceptance(), {})
    first = LATER * 0.72 * Acceptance().first(MASKS, {})
    assert worths[:3] == pytest.approx([0.9, 0.72, first])
    assert worths == sorted(worths, reverse=True)
