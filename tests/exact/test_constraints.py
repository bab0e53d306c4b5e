"""Answers held to a constraint: drafts, legal or not, forced or guessed, leave it and the answer in step."""

from __future__ import annotations

import dataclasses
import json
import random

import jsonschema
import pytest

from exact.common import check_idle, fingerprints, random_prompt
from fakes.checkpoints import byte_vocabulary, random_weights, tiny_config, write_byte_tokenizer, write_hf
from fakes.drafters import Automaton, inject, oracle
from obole import Engine, SamplingParams
from obole.speculate.controller import always
from obole.types import FinishReason, Grammar

VOCAB = 128
# 10 11 12, then items: one of 20 to 29, then 50 51; after each 60 for another one, or 61, after which nothing may come
ITEMS = {
    0: {10: 1},
    1: {11: 2},
    2: {12: 3},
    3: dict.fromkeys(range(20, 30), 4),
    4: {50: 5},
    5: {51: 6},
    6: {60: 3, 61: 7},
    7: {},
}
ALMOST = [10, 11, 12, 99, 50, 51, 60, 25, 51, 50, 60, 26, 50, 51, 61, 61, 61]  # what a prompt full of bad examples has


@pytest.fixture
def held(monkeypatch):
    """Give every sequence to come a constraint; returns all of them by request id and choice."""
    constraints: dict[tuple[str, int], Automaton] = {}
    original = Engine._sequence

    def hold(moves):
        def sequence(engine, *args):
            seq = original(engine, *args)
            seq.constraint = constraints[seq.request.id, seq.index] = Automaton(moves, VOCAB)
            return seq

        monkeypatch.setattr(Engine, "_sequence", sequence)
        return constraints

    return hold


def off(params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, speculate="off")


def check_legal(results, constraints, moves) -> None:
    for result in results:
        for choice in result.choices:
            constraint = constraints[result.id, choice.index]
            assert constraint.taken == list(choice.token_ids)  # each token once, none that was turned down
            state = 0
            for token in choice.token_ids:
                state = moves[state][token]
            assert constraint.state == state
            assert (choice.finish_reason is FinishReason.STOP) is (not moves[state])


PARAMS = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "penalised": {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "biased": {"logit_bias": {61: -100.0, 25: 5.0}},
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("length", range(1, 9))
def test_with_drafts_of_every_length(tiny_engine, held, name, length):
    constraints = held(ITEMS)
    engine = tiny_engine("llama", prefix_cache=False)
    engine._controller.lengths = always(length)
    prompts = [ALMOST * 3, random_prompt(random.Random(1), 30, VOCAB)]
    params = [SamplingParams(max_tokens=25, seed=i, logprobs=3, ignore_eos=True, **PARAMS[name]) for i in range(2)]
    expected = engine.generate(prompts, [off(p) for p in params])
    results = engine.generate(prompts, params)
    assert fingerprints(results) == fingerprints(expected)
    check_legal([*expected, *results], constraints, ITEMS)
    sources = [dict(r.receipt.sources) for r in results]
    assert all(s.get("forced", 0) > 0 for s in sources)
    answers = {r.prompt_ids: r.token_ids for r in expected}
    for every in (1, 2, 0):  # illegal tokens in legal company
        inject(engine, oracle(answers, lambda place, token, n=every: token ^ 1 if n and place % n == n - 1 else token), length)
        results = engine.generate(prompts, params)
        assert fingerprints(results) == fingerprints(expected)
        check_legal(results, constraints, ITEMS)
    check_idle(engine)


def test_lookup_proposes_what_is_illegal_and_it_is_turned_down(tiny_engine, held):
    constraints = held(ITEMS)
    engine = tiny_engine("llama", prefix_cache=False, speculate="lookup", draft_memory=0)
    params = SamplingParams(max_tokens=40, seed=1, temperature=1.0, logprobs=3)
    (expected,) = engine.generate(ALMOST * 3, off(params))
    rejected = 0
    for length in range(1, 9):
        engine._controller.lengths = always(length)
        (result,) = engine.generate(ALMOST * 3, params)
        assert fingerprints([result]) == fingerprints([expected])
        check_legal([result], constraints, ITEMS)
        assert set(result.receipt.drafted) == {"lookup"}
        rejected += result.receipt.rejected["lookup"]
    assert rejected > 20


def test_tokens_after_the_end_are_dropped_not_errors(tiny_engine, held):
    """The draft knows better and goes on after the end."""
    constraints = held(ITEMS)
    engine = tiny_engine("llama")
    prompt = random_prompt(random.Random(2), 20, VOCAB)
    params = SamplingParams(max_tokens=60, logit_bias={61: 100.0}, logprobs=1)
    (expected,) = engine.generate(prompt, off(params))
    assert expected.finish_reason is FinishReason.STOP
    assert len(expected.token_ids) == 7
    for length in range(1, 12):
        inject(engine, oracle({expected.prompt_ids: (*expected.token_ids, 61, 2, 99, 60, 20, 50)}, lambda _, t: t), length)
        (result,) = engine.generate(prompt, params)
        assert fingerprints([result]) == fingerprints([expected])
        assert result.usage["completion_tokens"] == len(result.choices[0].logprobs) == 7
        check_legal([result], constraints, ITEMS)
    check_idle(engine)


@pytest.mark.parametrize("limit", range(1, 12))
def test_the_length_limit_within_a_forced_run(tiny_engine, held, limit):
    moves = {i: {10 + i: i + 1} for i in range(9)} | {9: {}}
    constraints = held(moves)
    engine = tiny_engine("llama", speculate="forced")
    engine._controller.lengths = always(8)
    prompt = random_prompt(random.Random(3), 20, VOCAB)
    params = SamplingParams(max_tokens=limit, logprobs=1)
    (expected,), (result,) = engine.generate(prompt, off(params)), engine.generate(prompt, params)
    assert fingerprints([result]) == fingerprints([expected])
    assert result.token_ids == tuple(range(10, 10 + min(limit, 9)))
    assert result.finish_reason is (FinishReason.LENGTH if limit < 9 else FinishReason.STOP)
    check_legal([result, expected], constraints, moves)
    assert set(result.receipt.sources) <= {"model", "forced"}
    assert result.receipt.forward_passes == (1 if limit == 1 else 2)
    assert expected.receipt.forward_passes == min(limit, 9)


def test_a_stop_token_inside_a_forced_run(tiny_engine, held):
    moves = {i: {10 + i: i + 1} for i in range(9)} | {9: {}}
    held(moves)
    engine = tiny_engine("llama", speculate="forced")
    engine._controller.lengths = always(8)
    prompt = random_prompt(random.Random(4), 20, VOCAB)
    for stop in range(9):
        params = SamplingParams(stop_token_ids=(10 + stop,), max_tokens=20, logprobs=1)
        (expected,), (result,) = engine.generate(prompt, off(params)), engine.generate(prompt, params)
        assert fingerprints([result]) == fingerprints([expected])
        assert result.token_ids == tuple(range(10, 11 + stop))
        assert result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("every", [0, 2])
def test_preemption_keeps_the_state(tiny_engine, held, every):
    constraints = held(ITEMS)
    roomy = tiny_engine("llama", prefix_cache=False)
    prompts = [random_prompt(random.Random(s), 15 + s, VOCAB) for s in range(6)]
    params = [
        SamplingParams(max_tokens=70, temperature=1.0, seed=s, ignore_eos=True, logprobs=2, logit_bias={61: -3.0})
        for s in range(6)
    ]
    expected = roomy.generate(prompts, [off(p) for p in params])
    tight = tiny_engine("llama", blocks=9, max_batch_tokens=16)
    answers = {r.prompt_ids: r.token_ids for r in expected}
    inject(tight, oracle(answers, lambda place, token: token ^ 1 if every and place % every else token), 5)
    for engine_params in (params, [off(p) for p in params]):
        results = tight.generate(prompts, engine_params)
        assert fingerprints(results) == fingerprints(expected)
        assert sum(r.receipt.preemptions for r in results) > 0
        check_legal(results, constraints, ITEMS)
    check_idle(tight)


def test_choices_have_constraints_of_their_own(tiny_engine, held):
    constraints = held(ITEMS)
    engine = tiny_engine("qwen3")
    engine._controller.lengths = always(4)
    prompt = ALMOST * 2
    params = SamplingParams(n=4, seed=3, temperature=1.0, max_tokens=50, logprobs=1)
    (expected,), (result,) = engine.generate(prompt, off(params)), engine.generate(prompt, params)
    assert fingerprints([result]) == fingerprints([expected])
    check_legal([result, expected], constraints, ITEMS)
    assert len({c.token_ids for c in result.choices}) > 1


def test_a_constraint_without_a_way_on_ends_the_request_with_an_error(tiny_engine, held):
    """A constraint that allows nothing, yet is not over, is a fault of the constraint: nobody else is harmed by it."""

    class Stuck(dict):
        def __bool__(self) -> bool:
            return True

    held({0: {10: 1}, 1: Stuck()})
    engine = tiny_engine("llama")
    with pytest.raises(ValueError, match="allows no token"):
        engine.generate([5, 6], SamplingParams(max_tokens=5))
    check_idle(engine)


# -- grammars --------------------------------------------------------------------------------------------------------------

SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "name": {"enum": ["Ada", "Alan", "Grace"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
            "active": {"type": "boolean"},
        },
        "required": ["name", "age", "tags", "active"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"a_rather_long_property_name": {"const": "a value that leaves no choice"}, "b": {"type": "null"}},
        "required": ["a_rather_long_property_name", "b"],
        "additionalProperties": False,
    },
]
# fences, keys in the wrong order, trailing commas, single quotes: what lookup will propose
NEARLY = """```json
{"age": 31, "name": "Ada", "tags": ["red",], "active": True,}
{"name": 'Alan', "age": 200, "tags": ["red", "red", "red", "red"], "active": true}}}
{"b": null, "a_rather_long_property_name": "a value that leaves a choice",}
```
"""


@pytest.fixture(scope="module")
def bytes_engine(tmp_path_factory):
    """A random model of bytes, whose answers depend on all that came before."""
    folder = tmp_path_factory.mktemp("bytes") / "model"
    config = tiny_config("llama", vocab_size=len(byte_vocabulary()), max_position=1024, bos_id=None, eos_ids=(257,))
    write_byte_tokenizer(folder)
    with Engine(write_hf(folder, config, random_weights(config, seed=1, scale=0.25)), prefix_cache=False) as engine:
        yield engine
        check_idle(engine)


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("chosen", [{}, {"temperature": 1.0, "seed": 1}])
def test_json_by_schema_with_drafts_of_every_length(bytes_engine, schema, chosen):
    grammar = Grammar("json_schema", json.dumps(schema))
    params = SamplingParams(max_tokens=300, logprobs=2, grammar=grammar, **chosen)
    prompt = NEARLY * 2
    (expected,) = bytes_engine.generate(prompt, off(params))
    assert expected.finish_reason is FinishReason.STOP
    assert expected.text.endswith("}")
    jsonschema.validate(json.loads(expected.text), schema)
    rejected = forced = 0
    for length in range(1, 9):
        bytes_engine._controller.lengths = always(length)
        for mode in ("auto", "lookup"):
            prediction = json.dumps(json.loads(expected.text), indent=1) if length % 2 else None
            how = dataclasses.replace(params, speculate=mode, prediction=prediction)
            (result,) = bytes_engine.generate(prompt, how, tenant=f"{length} {mode}")
            assert fingerprints([result]) == fingerprints([expected])
            rejected += sum(result.receipt.rejected.values())
            forced += result.receipt.sources.get("forced", 0)
    assert rejected > 10
    assert forced > 10


def test_json_that_is_cut_off_is_cut_off_at_the_same_token(bytes_engine):
    grammar = Grammar("json_schema", json.dumps(SCHEMAS[1]))
    bytes_engine._controller.lengths = always(8)
    for limit in (1, 2, 9, 10, 17, 30):
        params = SamplingParams(max_tokens=limit, grammar=grammar, logprobs=0)
        (expected,), (result,) = bytes_engine.generate(NEARLY, off(params)), bytes_engine.generate(NEARLY, params)
        assert fingerprints([result]) == fingerprints([expected])
        assert result.finish_reason is FinishReason.LENGTH
        assert len(result.token_ids) == limit


def test_what_a_grammar_forces_comes_in_one_pass(bytes_engine):
    bytes_engine._controller.lengths = always(64)
    params = SamplingParams(max_tokens=300, grammar=Grammar("json_schema", json.dumps(SCHEMAS[1])), speculate="forced")
    (result,) = bytes_engine.generate(NEARLY, params)
    assert len(result.token_ids) == len(result.text) == 75
    assert result.receipt.sources == {"model": 2, "forced": 73}  # the first one, and the one after 64 forced ones
    assert result.receipt.rejected == {"forced": 0}
    assert result.receipt.forward_passes == 3
