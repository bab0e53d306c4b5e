"""The proof of exactness: it proves what is so, and finds what is not."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from fakes.checkpoints import random_weights, tiny_config, write_hf
from obole import SamplingParams
from obole.bench import inside, verification
from obole.bench.verification import FULL, OFF, SHORTEST, WITH_GRAMMAR, Extent, Way, describe, difference, verify, with_slips
from obole.config import MultiToken
from obole.engine import runner
from obole.engine.engine import Engine
from obole.errors import InvalidRequest

SMALL = Extent(2, 60, 12)


def switches(outcomes):
    return [(o.way.sampled, o.way.batched, o.way.chunked, o.way.cached) for o in outcomes]


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_every_way_is_proved(tiny_engine, arch):
    engine, stages = tiny_engine(arch), []
    proof = verify(engine, SMALL, lambda *at: stages.append(at[1:]))
    assert proof.proved
    assert proof.first_failure is None
    assert proof.prompt_tokens == {"random 1": SHORTEST, "random 2": 60}
    names = ["off", "auto", "lookup", "memory", "prediction"]
    assert [o.way.drafting.name for o in proof.outcomes] == [name for name in names for _ in range(16)]
    assert switches(proof.outcomes) == list(itertools.product((False, True), repeat=4)) * 5
    assert stages == [(i, 80) for i in range(80)]
    for outcome in proof.outcomes:
        assert (outcome.drafted > 0) == (outcome.way.drafting is not OFF)
        assert 0 <= outcome.accepted <= outcome.drafted
        if outcome.way.drafting.remembered or outcome.way.drafting.predicted:
            assert outcome.accepted > 0


def test_the_draft_model(tiny_engine, tiny_folders):
    proof = verify(tiny_engine("llama", draft=str(tiny_folders("llama"))), SMALL)
    found = [o for o in proof.outcomes if o.way.drafting.name == "draft"]
    assert proof.proved
    assert len(found) == 16
    assert all(o.accepted for o in found)


def test_predictions_of_several_tokens(tmp_path):
    config = tiny_config("llama", multi_token=MultiToken(120, 16))
    write_hf(tmp_path / "model", config, random_weights(config))
    with Engine(tmp_path / "model") as engine:
        proof = verify(engine, SMALL)
    found = [o for o in proof.outcomes if o.way.drafting.name == "mtp"]
    assert proof.proved
    assert len(found) == 16
    assert all(o.drafted for o in found)


def test_grammars(default_model_path, monkeypatch):
    monkeypatch.setattr(verification, "applicable", lambda _: [WITH_GRAMMAR[0]])
    with Engine(default_model_path, kv_device=64 << 20) as engine:
        proof = verify(engine, Extent(1, 24, 8))
    assert proof.proved
    assert list(proof.prompt_tokens) == ["sentence"]
    assert all(o.accepted == o.drafted > 0 for o in proof.outcomes)


def test_drafts_that_are_believed_are_found(tiny_engine, monkeypatch):
    monkeypatch.setattr(runner, "may_follow", lambda _sequence, chosen, offset: offset < 1 or len(chosen) == offset)
    proof = verify(tiny_engine("llama"), SMALL)
    assert not proof.proved
    assert proof.first_failure.way.drafting.name == "auto"
    found = proof.first_failure.difference
    assert 0 < found.position < 12
    assert found.prompt in proof.prompt_tokens
    assert found.expected.token_id is not None
    assert math.isfinite(found.expected.logprob)
    assert len(found.expected.alternatives) == 2


def test_a_memory_without_room_proves_nothing(tiny_engine):
    proof = verify(tiny_engine("llama", draft_memory=0), SMALL)
    assert not proof.proved
    assert proof.first_failure.way.drafting.name == "memory"
    assert proof.first_failure.difference is None
    assert proof.first_failure.fault == "nothing was drafted"


def test_prompts_that_were_cached_by_accident_prove_nothing(tiny_engine, monkeypatch):
    monkeypatch.setattr(inside, "new_tenant", lambda: "always the same")
    proof = verify(tiny_engine("llama"), Extent(1, 30, 8))
    assert "were in the cache" in proof.first_failure.fault


@pytest.mark.parametrize("fails", [False, True])
def test_the_engine_is_left_as_it_was(tiny_engine, monkeypatch, fails):
    engine = tiny_engine("llama")
    before = engine._controller.lengths, engine._scheduler.config
    if fails:
        monkeypatch.setattr(verification, "choices", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            verify(engine, SMALL)
    else:
        verify(engine, Extent(1, 30, 4))
    with inside.small_steps(engine, 3):
        assert engine._scheduler.config.max_batch_tokens == 3
    assert (engine._controller.lengths, engine._scheduler.config) == before


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"prefix_cache": False}, "prefix_cache"),
        ({"max_context": 40}, "max_context"),
        ({"max_batch_tokens": 8}, "max_batch_tokens"),
    ],
)
def test_refusals(tiny_engine, settings, field):
    with pytest.raises(InvalidRequest) as refusal:
        verify(tiny_engine("llama", **settings), FULL)
    assert refusal.value.field == field


def test_prompts_are_cut_to_what_there_is_room_for(tiny_engine):
    assert max(verify(tiny_engine("llama", max_batch_tokens=32), Extent(2, 60, 4)).prompt_tokens.values()) == 32


def test_differences_are_found_to_the_last_bit(tiny_engine):
    engine = tiny_engine("llama")
    params = SamplingParams(max_tokens=5, logprobs=2, ignore_eos=True)
    [choice] = engine.generate([3, 4, 5], params)[0].choices
    assert difference(engine, "p", choice, choice) is None
    entry = choice.logprobs[2]
    (first, second), rest = entry.top, choice.logprobs[3:]
    nudged = dataclasses.replace(entry, top=(first, (second[0], math.nextafter(second[1], 0.0))))
    other = dataclasses.replace(choice, logprobs=(*choice.logprobs[:2], nudged, *rest))
    assert difference(engine, "p", choice, other).position == 2
    shorter = dataclasses.replace(choice, token_ids=choice.token_ids[:4], logprobs=choice.logprobs[:4])
    found = difference(engine, "p", choice, shorter)
    assert (found.position, found.got.token_id, found.got.ended) == (4, None, "length")
    assert found.expected.token_id == choice.token_ids[4]


def test_words_for_a_way():
    assert describe(Way(OFF, False, False, False, False)) == "off, greedy, alone, whole, cold"
    assert describe(Way(OFF, True, True, True, True)) == "off, sampled, batched, chunked, cached"


def test_slips():
    assert with_slips(range(15), 14) == [0, 1, 2, 3, 4, 5, 7, 7, 8, 9, 10, 11, 12, 0, 14]
