"""Drafts accepted by chance: answers are distributed as without drafts, and a seed still repeats them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from exact.common import bits, check_idle, fingerprints, random_prompt
from fakes.checkpoints import random_weights, tiny_config, write_hf, write_puppet
from fakes.drafters import Automaton
from obole import Engine, SamplingParams
from obole.cli.receipts import drafts
from obole.engine.draft_model import DraftModel
from obole.engine.sampler import (
    DRAFTING,
    accept_or_resample,
    candidates,
    derived_seed,
    draw,
    normalised,
    probability,
    uniform,
)
from obole.kernels.dispatch import load_ops
from obole.speculate.controller import always
from obole.types import Distribution, Draft, Sequence, Source

OPS = load_ops("native", 1)
VOCAB = 128


def noise(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    return OPS.gumbel(seed, position, torch.from_numpy(ids)).numpy()


def surprise(counts: Counter, expected: dict) -> float:
    """By how many standard deviations Pearson's chi-squared is above its mean (Wilson and Hilferty's approximation).

    Outcomes of less than five expected observations count as one.
    """
    assert set(counts) <= set(expected)
    total = sum(counts.values())
    pairs = [(counts[outcome], total * p) for outcome, p in expected.items()]
    rare = [pair for pair in pairs if pair[1] < 5]
    pairs = [pair for pair in pairs if pair[1] >= 5]
    if sum(e for _, e in rare) > 0:
        pairs.append((sum(o for o, _ in rare), sum(e for _, e in rare)))
    freedom = len(pairs) - 1
    if freedom == 0:
        return 0.0
    statistic = sum((o - e) ** 2 / e for o, e in pairs)
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def distribution(*weights: float) -> Distribution:
    ids = np.flatnonzero(weights)
    values = np.array(weights, dtype=np.float64)[ids]
    return Distribution(ids, values / values.sum())


def as_dict(p: Distribution) -> dict[int, float]:
    return dict(zip(p.ids.tolist(), p.probabilities.tolist(), strict=True))


PAIRS = {
    "near": (distribution(4, 3, 2, 1), distribution(3, 4, 1, 2)),
    "far": (distribution(1, 1, 1, 97), distribution(60, 30, 9, 1)),
    "equal": (distribution(1, 2, 3, 4), distribution(1, 2, 3, 4)),
    "apart": (distribution(1, 2, 0, 0), distribution(0, 0, 2, 1)),
    "wanted is missing some": (distribution(0, 2, 0, 1), distribution(1, 2, 3, 4)),
    "proposed is missing some": (distribution(1, 2, 3, 4), distribution(0, 2, 0, 1)),
    "overlap": (distribution(1, 2, 3, 0, 0), distribution(0, 0, 1, 2, 3)),
    "proposed is certain": (distribution(1, 2, 3, 4), distribution(0, 0, 1)),
    "wanted is certain": (distribution(0, 1), distribution(1, 2, 3, 4)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_one_token(name):
    position = len(name)
    wanted, proposed = PAIRS[name]
    counts, accepted, trials = Counter(), 0, 2000
    for seed in range(trials):
        drafted = draw(proposed.ids, np.log(proposed.probabilities), derived_seed(seed, DRAFTING), position, noise)
        token = accept_or_resample(drafted, proposed, wanted, seed, position, noise)
        assert token == accept_or_resample(drafted, proposed, wanted, seed, position, noise)
        assert probability(wanted, token) > 0
        counts[token] += 1
        accepted += token == drafted
    assert surprise(counts, as_dict(wanted)) < 3
    both = {*as_dict(wanted), *as_dict(proposed)}
    overlap = sum(min(probability(wanted, t), probability(proposed, t)) for t in both)
    assert abs(accepted / trials - overlap) <= 4 * math.sqrt(overlap * (1 - overlap) / trials) + 1e-9


def test_rounding_never_brings_up_what_may_not_come():
    """A draft that may not come is drawn anew even where nothing is left of what is wanted but rounding."""
    wanted = Distribution(np.array([1, 2]), np.array([0.5, 0.5]))
    proposed = Distribution(np.array([0, 1, 2]), np.array([1e-20, 0.5, 0.5]))
    tokens = {accept_or_resample(0, proposed, wanted, seed, 0, noise) for seed in range(50)}
    assert tokens == {1, 2}


def test_noise_of_its_own():
    values = [uniform(seed, position, noise) for seed in range(60) for position in range(60)]
    assert 0 < min(values) < 0.01
    assert 0.99 < max(values) < 1
    assert abs(sum(values) / len(values) - 0.5) < 0.02
    derived = {derived_seed(seed, purpose) for seed in (0, 1, 2**64 - 1) for purpose in (0, DRAFTING)}
    assert len(derived) == 6


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"temperature": 1.0},
        dict(temperature=0.6, top_k=9, top_p=0.9, min_p=0.05, presence_penalty=1.0),
        dict(temperature=1.0, logit_bias={3: -100.0}),
        dict(temperature=1.0, top_k=1),
    ],
)
def test_a_distribution_is_what_tokens_are_drawn_from(chosen):
    logits = np.random.default_rng(1).normal(0, 2, 30).astype(np.float32)
    params = SamplingParams(**chosen)
    ids, scaled = candidates(logits, params, [1, 2, 3], 1, frozenset({5}))
    p = normalised(ids, scaled)
    assert p.ids.dtype == np.int64
    assert p.probabilities.dtype == np.float64
    assert (np.diff(p.ids) > 0).all()
    assert abs(p.probabilities.sum() - 1) < 1e-12
    counts = Counter(draw(ids, scaled, seed, 4, noise) for seed in range(2000))
    assert surprise(counts, as_dict(p)) < 3


def test_nothing_left_to_choose_from_is_one_token():
    logits = np.array([1, 3, 2], dtype=np.float32)
    ids, scaled = candidates(logits, SamplingParams(temperature=1.0), [], 0, frozenset({0, 1, 2}))
    assert as_dict(normalised(ids, scaled)) == {1: 1.0}


def test_a_shortened_draft_keeps_what_its_tokens_were_drawn_from():
    p, q = distribution(1, 2), distribution(2, 1)
    draft = Draft([0, 1], [Source.DRAFT] * 2, [p, q])
    assert draft.first(1) == Draft([0], [Source.DRAFT], [p])
    assert Draft([0, 1], [Source.LOOKUP] * 2).first(1).distributions is None


# -- engines ---------------------------------------------------------------------------------------------------------------


TOKENS = 5


def puppets(folder: Path, wanted: np.ndarray, proposed: np.ndarray) -> Engine:
    """An engine whose models choose by the last token alone: the target by one table of logits, the draft by another."""
    target, draft = (write_puppet(folder / name, table) for name, table in (("target", wanted), ("draft", proposed)))
    engine = Engine(target, draft=str(draft), draft_acceptance="resample", speculate="draft", kv_device=1 << 26)
    engine._controller.lengths = always(2)
    return engine


FILTERS = {
    "plain": {"temperature": 1.0},
    "filtered": dict(temperature=0.8, top_k=4, top_p=0.93, frequency_penalty=0.4, logit_bias={2: 0.5}),
}


@pytest.mark.parametrize("name", FILTERS)
def test_several_tokens_are_distributed_as_without_drafts(tmp_path, name):
    """Answers of five tokens, of which drafts were two each time: those after an acceptance, a rejection and a whole draft."""
    rng = np.random.default_rng(3)
    wanted = rng.normal(0, 1, (TOKENS, TOKENS)).astype(np.float32)
    proposed = wanted + rng.normal(0, 0.7, (TOKENS, TOKENS)).astype(np.float32)
    proposed[1] = wanted[1]
    params = SamplingParams(max_tokens=5, n=100, ignore_eos=True, **FILTERS[name])
    counts, drafted, right = Counter(), 0, 0
    with puppets(tmp_path, wanted, proposed) as engine:
        for seed in range(20):
            (result,) = engine.generate([0], dataclasses.replace(params, seed=seed * 1000))
            for choice in result.choices:
                counts[choice.token_ids] += 1
                drafted += choice.receipt.drafted["draft"]
                right += choice.receipt.sources.get("draft", 0)
                assert choice.receipt.acceptance == "distribution"
        check_idle(engine)
    expected = {(): 1.0}
    for _ in range(5):
        expected = {
            (*tokens, token): before * chance
            for tokens, before in expected.items()
            for token, chance in next_tokens(wanted, params, tokens).items()
        }
    assert 0.3 < right / drafted < 0.9
    assert surprise(counts, expected) < 3
    for first, second in itertools.combinations(range(5), 2):
        assert surprise(marginal(counts, first, second), marginal(expected, first, second)) < 3.5


def next_tokens(logits: np.ndarray, params: SamplingParams, output: tuple[int, ...]) -> dict[int, float]:
    history = [0, *output]
    return as_dict(normalised(*candidates(logits[history[-1]], params, history, 1, frozenset())))


def marginal(table, first: int, second: int) -> Counter:
    result = Counter()
    for tokens, weight in table.items():
        result[tokens[first], tokens[second]] += weight
    return result


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("resampling")
    config = tiny_config("llama")
    weights = random_weights(config, seed=1, scale=0.25)
    rng = np.random.default_rng(4)
    nearly = {name: w + rng.normal(0, 0.01, w.shape).astype(np.float32) for name, w in weights.items()}
    return {"same": write_hf(root / "same", config, weights), "nearly": write_hf(root / "nearly", config, nearly)}


def opened(models: dict[str, Path], draft: str, **settings: object) -> Engine:
    settings = {"speculate": "draft", **settings}
    engine = Engine(models["same"], draft=str(models[draft]), draft_acceptance="resample", **settings)
    engine._controller.lengths = always(5)
    return engine


def off(params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, speculate="off")


def test_the_same_distribution_is_always_accepted(models):
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=1, ignore_eos=True, n=2, top_p=0.9, repetition_penalty=1.2)
    with opened(models, "same") as engine:
        (result,) = engine.generate([5, 6, 7], params)
        (expected,) = engine.generate([5, 6, 7], off(params))
    for choice in result.choices:
        assert choice.receipt.rejected == {"draft": 0}
        assert choice.receipt.sources["draft"] == 59 - -(-59 // 6)
    assert result.token_ids != expected.token_ids  # by noise of its own


def test_greedy_answers_and_other_drafts_are_exact(models):
    prompt = [5, 6, 7, 8] * 6
    with opened(models, "nearly", speculate="auto") as engine:
        for chosen in ({}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "speculate": "lookup"}):
            params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True, logprobs=3, **chosen)
            results = engine.generate(prompt, params)
            assert fingerprints(results) == fingerprints(engine.generate(prompt, off(params)))
            assert results[0].receipt.acceptance == "exact"
            assert results[0].receipt.drafted
        params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True, temperature=1.0, speculate="draft")
        receipt = engine.generate(prompt, params)[0].receipt
    assert receipt.acceptance == "distribution"
    assert "right in distribution only" in drafts(receipt)


def test_a_seed_repeats_an_answer_and_scores_are_the_models(models):
    """Alone, beside others and after a hit, as long as the drafts are of the same lengths."""
    rng = random.Random(2)
    prompts = [random_prompt(rng, length, VOCAB) for length in (1, 20, 50)]
    params = [SamplingParams(max_tokens=40, temperature=1.0, seed=i, ignore_eos=True, logprobs=2) for i in range(3)]
    with opened(models, "nearly") as engine:
        alone = [engine.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)]
        assert fingerprints(engine.generate(prompts, params)) == fingerprints(alone)
        (score,) = engine.score([*prompts[2], *alone[2].token_ids])
    for result in alone:
        assert 0 < result.receipt.rejected["draft"] < result.receipt.drafted["draft"]
    expected = [bits(p) for p in score.logprobs[len(prompts[2]) :]]
    assert [bits(entry.logprob) for entry in alone[2].choices[0].logprobs] == expected


def test_a_constraint_is_kept(models, monkeypatch):
    """What is drawn anew is drawn from what may come: one of eight tokens, by turns even and odd."""
    moves = {0: dict.fromkeys(range(10, 26, 2), 1), 1: dict.fromkeys(range(11, 27, 2), 0)}
    make = Engine._sequence

    def constrained(self: Engine, *args: object) -> Sequence:
        seq = make(self, *args)
        seq.constraint = Automaton(moves, VOCAB)
        return seq

    monkeypatch.setattr(Engine, "_sequence", constrained)
    params = SamplingParams(max_tokens=40, temperature=3.0, seed=2, ignore_eos=True, n=4)
    with opened(models, "same") as engine:
        (result,) = engine.generate([5, 6, 7], params)
    for choice in result.choices:
        assert all(token in moves[i % 2] for i, token in enumerate(choice.token_ids))
    assert sum(c.receipt.sources.get("draft", 0) for c in result.choices) > 0


def test_what_was_not_tried_teaches_nothing(models):
    """Of a draft cut short, what was not put to the test says nothing of how often such tokens are accepted."""
    with opened(models, "same") as engine:
        controller = engine._controller
        longer = always(6)
        controller.lengths = lambda step: [min(1, length) for length in longer(step)]
        params = SamplingParams(max_tokens=30, temperature=1.0, seed=2, ignore_eos=True)
        engine.generate([5, 6, 7], params)
        known = controller.acceptance.counts
    assert known
    assert all(counts.right == counts.trials for counts in known.values())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_without_a_meaning_are_not_drafted(models, monkeypatch, temperature):
    """A draft model may have rows beyond the vocabulary. To leave these out afterwards would change the distribution."""
    with opened(models, "same") as engine:
        model = engine._controller.draft_model
        model.runner = dataclasses.replace(model.runner, vocab_size=64)
        drafted, propose = [], DraftModel.propose

        def recorded(*args: object):
            proposals = propose(*args)
            drafted.extend(proposals)
            return proposals

        monkeypatch.setattr(DraftModel, "propose", recorded)
        engine.generate([5, 6, 7], SamplingParams(max_tokens=40, temperature=temperature, seed=1, ignore_eos=True))
    tokens = [token for proposal in drafted for token in proposal.tokens]
    assert len(tokens) > 40
    assert max(tokens) < 64
    for proposal in drafted if temperature else ():
        assert len(proposal.distributions) == len(proposal.tokens)
        assert all(p.ids.max() < 64 and abs(p.probabilities.sum() - 1) < 1e-12 for p in proposal.distributions)
