"""Edges of sampling in a whole engine: one batch for all of them, beside a neighbour that must not notice."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random

import pytest

from exact.common import check_idle, fingerprints, random_prompt
from fakes.checkpoints import byte_vocabulary, puppet_config, puppet_weights, table_logits, write_byte_tokenizer, write_hf
from fakes.drafters import Automaton
from obole import Engine, SamplingParams
from obole.errors import InvalidRequest
from obole.speculate.controller import always

VOCAB = 128
LARGEST = float.fromhex("0x1.fffffep+127")  # float32

GRID = {
    "temperature": [0, 1e-45, 1e-6, 1e-4, 2, 1e9],
    "top_p": [0, 1e-9, 1],
    "top_k": [-1, 0, 1, VOCAB, VOCAB + 1],
    "min_p": [0, 1],
    "repetition_penalty": [1e-9, 1, 1e9],
}


@pytest.mark.parametrize("speculate", ["off", "auto"])
def test_the_whole_grid_in_shared_batches(tiny_engine, speculate):
    """Every combination yields finite numbers, and a plain neighbour in each batch is never disturbed."""
    engine = tiny_engine("llama", prefix_cache=False)
    engine._controller.lengths = always(4)
    prompt = random_prompt(random.Random(1), 10, VOCAB)
    plain = SamplingParams(max_tokens=6, temperature=0.9, seed=7, logprobs=3, ignore_eos=True, speculate=speculate)
    (expected,) = engine.generate(prompt, dataclasses.replace(plain, speculate="off"))
    (greedy,) = engine.generate(prompt, dataclasses.replace(plain, temperature=0.0))
    combinations = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]
    for i in range(0, len(combinations), 63):
        edges = [
            SamplingParams(max_tokens=4, seed=j, logprobs=1, ignore_eos=True, speculate=speculate, **values)
            for j, values in enumerate(combinations[i : i + 63])
        ]
        neighbour, *results = engine.generate([prompt] * (len(edges) + 1), [plain, *edges])
        assert fingerprints([neighbour]) == fingerprints([expected])
        for params, result in zip(edges, results, strict=True):
            assert len(result.token_ids) == 4
            assert all(0 <= token < VOCAB for token in result.token_ids)
            assert all(math.isfinite(entry.logprob) and entry.logprob <= 0 for entry in result.choices[0].logprobs)
            only_one = params.temperature < 1e-5 or params.top_k == 1 or params.top_p < 1e-6
            if params.repetition_penalty == 1 and only_one:
                assert result.token_ids == greedy.token_ids[:4]  # the limit of a cold softmax is its largest logit
    check_idle(engine)


def strict(document: object) -> object:
    """Through a JSON parser that knows no NaN and no Infinity."""

    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    return json.loads(json.dumps(document), parse_constant=refuse)


@pytest.mark.parametrize(
    "edge",
    [
        dict(temperature=1.0, top_k=1),
        dict(temperature=1.0, top_p=1e-9),
        dict(temperature=1.0, min_p=1.0),
        dict(logit_bias=dict.fromkeys(range(100), -100.0)),
        dict(temperature=1e9),
        dict(temperature=1.0, min_tokens=5, stop_token_ids=tuple(range(VOCAB))),
        dict(repetition_penalty=1e300),
    ],
)
def test_results_are_json_whatever_was_masked(tiny_engine, edge):
    engine = tiny_engine("qwen2")
    params = SamplingParams(max_tokens=5, logprobs=5, prompt_logprobs=5, seed=1, ignore_eos=True, **edge)
    (result,) = engine.generate([5, 6, 7], params)
    document = strict(result.to_json())
    entries = [*document["logprobs"], *document["prompt_logprobs"][1:]]
    assert len(entries) == 5 + 2
    for entry in entries:
        assert -LARGEST <= entry["logprob"] <= 0
        assert all(-LARGEST <= p["logprob"] <= 0 for p in entry["top"])
        assert sum(math.exp(p["logprob"]) for p in entry["top"]) <= 1 + 1e-6
    # they are the model's own, before masks and penalties: the same as those of scoring the same tokens
    whole = [5, 6, 7, *result.token_ids]
    scored = engine.score(whole)[0].logprobs
    assert [e["logprob"] for e in document["logprobs"]] == list(scored[3:])


def test_results_are_json_under_a_constraint(tiny_engine, monkeypatch):
    original = Engine._sequence

    def sequence(engine, *args):
        seq = original(engine, *args)
        seq.constraint = Automaton({0: {9: 1}, 1: {10: 0, 11: 2}, 2: {}}, VOCAB)
        return seq

    monkeypatch.setattr(Engine, "_sequence", sequence)
    (result,) = tiny_engine("llama").generate([5, 6, 7], SamplingParams(max_tokens=8, logprobs=5))
    document = strict(result.to_json())
    assert {entry["token_id"] for entry in document["logprobs"]} <= {9, 10, 11}
    assert len(document["logprobs"]) == len(result.token_ids)
    assert all(-LARGEST <= entry["logprob"] <= 0 for entry in document["logprobs"])


# -- ids that the embedding has and the tokenizer has not ------------------------------------------------------------------

KNOWN = len(byte_vocabulary())  # 260
PADDED = KNOWN + 12


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
    """A puppet with rows beyond its tokenizer's ids; after any token, the likeliest is one of these, then token + 1."""
    folder = tmp_path_factory.mktemp("padded") / "puppet"
    logits = table_logits([min(token + 1, PADDED - 1) for token in range(PADDED)], peak=20.0)
    logits[:, KNOWN + 5] = 30.0
    config = puppet_config(PADDED, bos_id=None, eos_ids=(257,))
    write_byte_tokenizer(folder)
    with Engine(write_hf(folder, config, puppet_weights(config, logits))) as engine:
        yield engine
        check_idle(engine)


@pytest.mark.parametrize("token", [KNOWN, KNOWN + 5, PADDED - 1, PADDED, 2**31 - 1])
def test_ids_that_mean_nothing_are_refused(padded, token):
    for field, value in (("logit_bias", {token: 5.0}), ("stop_token_ids", (token,)), ("prediction", (token,))):
        with pytest.raises(InvalidRequest, match=str(KNOWN - 1)) as error:
            padded.generate([65], SamplingParams(**{field: value}))
        assert error.value.field == field
    for prompt in ([token], [65, token], [[65], [token]]):
        with pytest.raises(InvalidRequest):
            padded.generate(prompt)
    with pytest.raises(InvalidRequest):
        padded.score([65, token])
    assert padded.generate([65], SamplingParams(max_tokens=2))[0].text == "BC"


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.01},
        {"temperature": 1.0, "top_k": 1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: -1.0}},
        {"min_tokens": 3},
    ],
)
def test_ids_that_mean_nothing_are_never_chosen(padded, params):
    for mode in ("off", "auto"):
        chosen = SamplingParams(max_tokens=5, logprobs=2, speculate=mode, seed=1, **params)
        (result,) = padded.generate([65], chosen)
        assert result.text == "BCDEF"
        assert result.token_ids == tuple(b"BCDEF")
        strict(result.to_json())


def test_a_refused_request_touches_nobody(tiny_engine):
    """In one call nothing runs; beside others, they go on as if it had never come."""
    engine = tiny_engine("llama")
    prompt = random_prompt(random.Random(2), 20, VOCAB)
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, logprobs=2, ignore_eos=True, speculate="off")
    (expected,) = engine.generate(prompt, params)
    bad = [
        ([5], SamplingParams(logit_bias={VOCAB: 5.0})),
        ([5], SamplingParams(stop_token_ids=(VOCAB,))),
        ([-1], SamplingParams()),
        ([VOCAB], SamplingParams()),
        ([2**63], SamplingParams()),
        ([True], SamplingParams()),
        ([5], SamplingParams(stop="text")),  # this model has no tokenizer
        ([5], SamplingParams(max_tokens=10**6)),
    ]
    stream = engine.stream(prompt, params)
    for refused, how in bad:
        next(stream)
        with pytest.raises(InvalidRequest):
            engine.generate([prompt, refused], [params, how])
        engine._scheduler.check()
    assert [d.finish_reason for d in stream][-1] is not None
    assert fingerprints([stream.result]) == fingerprints([expected])
    check_idle(engine)


def test_seeds_of_all_sizes_are_those_of_the_receipt(tiny_engine):
    """The seed that was drawn makes the same answer again; negative and huge seeds are seeds like any other."""
    engine = tiny_engine("llama")
    prompt = random_prompt(random.Random(3), 20, VOCAB)
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    for seed in (None, 0, -1, -(2**63), 2**63, 2**64 - 1):
        (first,) = engine.generate(prompt, dataclasses.replace(params, seed=seed))
        (again,) = engine.generate(prompt, dataclasses.replace(params, seed=first.receipt.seed))
        assert again.token_ids == first.token_ids
        assert again.receipt.seed == first.receipt.seed
    answers = [engine.generate(prompt, params)[0].token_ids for _ in range(4)]
    assert len(set(answers)) > 1
