"""`choose` at its edges: a pure function with a defined answer for every input (B15, B17, B18)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from obole.engine.sampler import choice_seed, choose, keep, token_logprob
from obole.errors import InvalidRequest
from obole.kernels.dispatch import load_ops
from obole.types import SamplingParams

OPS = load_ops("reference", 1)


def noise(seed, position, ids):
    return OPS.gumbel(seed, position, torch.from_numpy(np.ascontiguousarray(ids))).numpy()


def pick(logits, params=None, *, seed=1, position=5, history=(0,), prompt_len=1, banned=frozenset()):
    logits = np.asarray(logits, dtype=np.float32)
    before = logits.copy()
    token = choose(
        logits,
        params or SamplingParams(),
        seed,
        position,
        history=list(history),
        prompt_len=prompt_len,
        banned=banned,
        noise=noise,
    )
    np.testing.assert_array_equal(logits, before)
    return token


LOGITS = [0.5, 3.0, 2.9, -1.0, 3.0]


@pytest.mark.parametrize("temperature", [0.0, 1e-45, 1e-6, 9.9e-6])
def test_tiny_temperatures_are_greedy_and_ties_go_to_the_lowest_id(temperature):
    assert pick(LOGITS, SamplingParams(temperature=temperature)) == 1


@pytest.mark.parametrize("params", [dict(top_k=1), dict(top_p=0.0), dict(min_p=1.0, top_k=1), dict(top_p=1e-9)])
def test_filters_that_leave_one_token_choose_it(params):
    assert {pick(LOGITS, SamplingParams(temperature=2.0, **params), seed=s) for s in range(20)} == {1}


def test_min_p_one_keeps_exactly_the_best_tokens():
    assert {pick(LOGITS, SamplingParams(temperature=1.0, min_p=1.0), seed=s) for s in range(40)} == {1, 4}


@pytest.mark.parametrize("top_k", [0, -1, 5, 6, 10**9])
def test_top_k_off_or_larger_than_the_vocabulary_changes_nothing(top_k):
    plain = [pick(LOGITS, SamplingParams(temperature=1.5), seed=s) for s in range(30)]
    assert [pick(LOGITS, SamplingParams(temperature=1.5, top_k=top_k), seed=s) for s in range(30)] == plain


def test_top_k_breaks_ties_at_its_edge_by_lowest_id():
    assert keep(np.array([1.0, 2.0, 2.0, 2.0, 0.0]), SamplingParams(top_k=2)).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.5, [0]), (0.51, [0, 1]), (0.75, [0, 1]), (0.76, [0, 1, 2]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p, kept):
    probabilities = np.log(np.array([0.5, 0.25, 0.125, 0.125]))
    assert keep(probabilities, SamplingParams(top_p=top_p)).tolist() == kept


def test_everything_masked_voids_the_ban():
    assert pick([1.0, 2.0, 0.0], banned=frozenset({0, 1, 2})) == 1
    assert pick([-math.inf] * 3) == 0
    assert pick([math.nan] * 3) == 0


def test_nan_and_infinity_do_not_poison_a_row():
    assert pick([math.nan, 1.0, math.nan]) == 1
    assert pick([1.0, math.inf, 2.0], SamplingParams(temperature=1.0)) == 1
    assert pick([math.nan, 1.0, -math.inf], SamplingParams(temperature=1.0)) == 1


def test_bans_hold_and_bias_steers():
    assert pick(LOGITS, banned=frozenset({1, 4})) == 2
    assert pick(LOGITS, SamplingParams(logit_bias={3: 100.0})) == 3
    assert pick(LOGITS, SamplingParams(logit_bias={1: -100.0, 4: -100.0})) == 2


def test_penalties_see_what_they_should():
    repeat = SamplingParams(repetition_penalty=2.0)
    assert pick([1.0, 1.5, -1.0], repeat, history=[1], prompt_len=1) == 0  # prompt tokens count
    presence = SamplingParams(presence_penalty=1.0)
    assert pick([1.0, 1.5], presence, history=[1], prompt_len=1) == 1  # but not for presence and frequency
    assert pick([1.0, 1.5], presence, history=[0, 1], prompt_len=1) == 0
    frequency = SamplingParams(frequency_penalty=0.2)
    assert pick([1.0, 1.5], frequency, history=[0, 1, 1], prompt_len=1) == 1
    assert pick([1.0, 1.5], frequency, history=[0, 1, 1, 1], prompt_len=1) == 0
    assert pick([-1.0, -1.5], repeat, history=[0], prompt_len=1) == 1  # a penalty never helps a negative logit


def test_a_penalty_beyond_float32_leaves_zero_logits_alone():
    params = SamplingParams(repetition_penalty=1e39)
    assert pick([0.0, 0.0, 0.0, 1.0], params, history=[1, 2], prompt_len=1) == 3
    assert pick([0.0, -1.0, 0.5], SamplingParams(repetition_penalty=1e-46), history=[1, 2], prompt_len=1) == 2


@pytest.mark.parametrize("penalty", [1e-300, 1e-46, 1e-9, 1e9, 1e39, 1e300])
def test_extreme_repetition_penalties_stay_finite(penalty):
    params = SamplingParams(repetition_penalty=penalty, temperature=1.0)
    assert 0 <= pick([1e38, -1e38, 1.0], params, history=[0, 1], prompt_len=1) < 3


GRID = {
    "temperature": [0, 1e-45, 1e-6, 1e-4, 2, 1e9],
    "top_p": [0, 1e-9, 1],
    "top_k": [-1, 0, 1, 5, 6],
    "min_p": [0, 1],
    "repetition_penalty": [1e-9, 1, 1e9],
}


@pytest.mark.parametrize("values", list(itertools.product(*GRID.values())))
def test_the_whole_grid_of_valid_edges_yields_a_token(values):
    assert 0 <= pick(LOGITS, SamplingParams(**dict(zip(GRID, values, strict=True)))) < 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -1),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("logit_bias", {-1: 5}),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 101}),
        ("logit_bias", [1]),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", None),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", None),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [True]),
        ("n", 0),
        ("n", True),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("logprobs", -1),
        ("logprobs", 1000),
        ("seed", 2**64),
        ("seed", 0.5),
        ("ignore_eos", 1),
    ],
)
def test_out_of_domain_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest) as error:
        SamplingParams(**{name: value})
    assert error.value.field == name
    assert name in str(error.value)


def test_the_choice_depends_on_seed_and_position_only():
    params = SamplingParams(temperature=1.0)
    logits = np.zeros(1000, dtype=np.float32)
    draws = {(s, p): pick(logits, params, seed=s, position=p) for s in range(5) for p in range(5)}
    assert len(set(draws.values())) > 20
    assert draws == {(s, p): pick(logits, params, seed=s, position=p) for s in range(5) for p in range(5)}


def test_samples_follow_the_softmax():
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(probabilities).astype(np.float32) * 2  # temperature 2 undoes the factor
    draws = [pick(logits, SamplingParams(temperature=2.0), seed=7, position=p) for p in range(4000)]
    counts = np.bincount(draws, minlength=4)
    chi_square = ((counts - 4000 * probabilities) ** 2 / (4000 * probabilities)).sum()
    assert chi_square < 16.27  # 0.1 % level for 3 degrees of freedom; the draw is fixed by the seed


def test_dropping_hopeless_tokens_before_the_noise_changes_nothing():
    rng = np.random.default_rng(0)
    for position in range(50):
        logits = rng.normal(0, 20, 300).astype(np.float32)
        token = pick(logits, SamplingParams(temperature=1.0), position=position)
        full = logits.astype(np.float64) + noise(1, position, np.arange(300))
        assert token == int(full.argmax())


QUARTERS = st.integers(-200, 200).map(lambda n: n / 4)
PERCENT = st.integers(1, 100).map(lambda n: n / 100)


@given(st.lists(QUARTERS, min_size=1, max_size=40), st.integers(0, 40), PERCENT, PERCENT)
@settings(max_examples=200, deadline=None)
def test_filters_agree_with_a_plain_implementation(logits, top_k, top_p, min_p):
    scaled = np.asarray(logits, dtype=np.float64)
    ranked = sorted(range(len(logits)), key=lambda i: (-scaled[i], i))
    if top_k:
        ranked = ranked[:top_k]
    weights = np.exp(scaled[ranked] - scaled[ranked].max())
    if top_p < 1:
        reached, kept = 0.0, []
        for i, w in zip(ranked, weights, strict=True):
            if kept and reached >= top_p * weights.sum() * (1 + 1e-9):
                break
            kept.append(i)
            reached += w
    else:
        kept = ranked
    kept = [i for i in kept if math.exp(scaled[i] - scaled[ranked[0]]) >= min_p]
    got = keep(scaled, SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)).tolist()
    # the two may differ by rounding exactly at the edge of the nucleus: then by one token
    assert got == sorted(kept) or abs(len(got) - len(kept)) == 1


def test_logprobs_are_the_models_own_finite_and_normalised():
    entry = token_logprob(np.array([1.0, 2.0, 3.0, -np.inf], dtype=np.float32), 3, 4)
    assert math.isfinite(entry.logprob)
    assert [t for t, _ in entry.top] == [2, 1, 0, 3]
    assert sum(math.exp(p) for _, p in entry.top) == pytest.approx(1.0)
    assert token_logprob(np.array([np.nan, np.nan], dtype=np.float32), 0, 2).logprob < -1e30
    ties = token_logprob(np.array([1.0, 1.0, 1.0], dtype=np.float32), 0, 2)
    assert [t for t, _ in ties.top] == [0, 1]
    assert ties.logprob == pytest.approx(-math.log(3))


def test_seeds_of_choices_differ_and_the_first_is_the_requests_own():
    assert choice_seed(-1, 0) == 2**64 - 1
    assert len({choice_seed(42, i) for i in range(128)}) == 128
