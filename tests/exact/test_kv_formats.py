"""Invariants 1 and 2 within each format of 8-bit keys and values: whatever the company, the bits are the same."""

from __future__ import annotations

import dataclasses
import random

import pytest

from exact.common import check_idle, fingerprints, random_params, random_prompt
from fakes.drafters import inject, oracle
from fakes.engines import pool_bytes
from obole import ConfigError, Engine, SamplingParams
from obole.speculate.controller import always

FORMATS = ["int8", "fp8"]
ARCHITECTURES = ["llama", "qwen3", "gemma3"]
both = pytest.mark.parametrize("kv_dtype", FORMATS)
each = pytest.mark.parametrize("arch", ARCHITECTURES)


def requests(seed, count, vocab, *, longest=90, max_tokens=12):
    rng = random.Random(seed)
    prompts = [random_prompt(rng, rng.randint(1, longest), vocab) for _ in range(count)]
    return prompts, [random_params(rng, max_tokens) for _ in range(count)]


def alone(engine, prompts, params):
    return [engine.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)]


@both
@pytest.mark.parametrize(("arch", "kernels"), [*((arch, "native") for arch in ARCHITECTURES), ("llama", "reference")])
def test_alone_equals_batched(tiny_engine, arch, kernels, kv_dtype):
    engine = tiny_engine(arch, kernels=kernels, prefix_cache=False, kv_dtype=kv_dtype)
    native = kernels == "native"
    prompts, params = requests(1, 16 if native else 4, engine.vocab_size, longest=90 if native else 30)
    assert fingerprints(engine.generate(prompts, params)) == fingerprints(alone(engine, prompts, params))
    check_idle(engine)


@both
@each
def test_whole_equals_chunked_by_any_number_of_threads(tiny_engine, arch, kv_dtype):
    whole = tiny_engine(arch, prefix_cache=False, kv_dtype=kv_dtype)
    prompts, params = requests(2, 6, whole.vocab_size, longest=150)
    expected = fingerprints(alone(whole, prompts, params))
    for chunk, threads in ((7, 1), (16, 2), (64, 3)):
        chunked = tiny_engine(arch, prefix_cache=False, kv_dtype=kv_dtype, max_batch_tokens=chunk, threads=threads)
        assert fingerprints(alone(chunked, prompts, params)) == expected
        assert fingerprints(chunked.generate(prompts, params)) == expected


@both
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_cold_equals_cached(tiny_engine, arch, kv_dtype):
    """Splits at, before and after every block's end; a prompt wholly in the cache has its last block copied."""
    engine = tiny_engine(arch, kv_dtype=kv_dtype)
    cold = tiny_engine(arch, prefix_cache=False, kv_dtype=kv_dtype)
    rng = random.Random(3)
    prompt = random_prompt(rng, 96, engine.vocab_size)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, logprobs=5, ignore_eos=True)
    (expected,) = cold.generate(prompt, params)
    for k in (0, 15, 16, 17, 47, 48, 80, 95, 96):
        tenant = f"split {k}"
        engine.generate([*prompt[:k], *random_prompt(rng, 5, engine.vocab_size)], SamplingParams(max_tokens=1), tenant=tenant)
        (result,) = engine.generate(prompt, params, tenant=tenant)
        assert result.receipt.cached_tokens == min(k // 16 * 16, len(prompt) - 1)
        assert fingerprints([result]) == fingerprints([expected])
    check_idle(engine)


@both
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_preempted_equals_undisturbed(tiny_engine, tiny_folders, arch, kv_dtype):
    roomy = tiny_engine(arch, prefix_cache=False, kv_dtype=kv_dtype)
    prompts, params = requests(7, 8, roomy.vocab_size, longest=20, max_tokens=110)
    params = [dataclasses.replace(p, ignore_eos=True) for p in params]
    expected = fingerprints(alone(roomy, prompts, params))
    room = pool_bytes(tiny_folders(arch), 18 if arch == "llama" else 60, kv_dtype)
    tight = tiny_engine(arch, kv_device=room, kv_dtype=kv_dtype, max_batch_tokens=16)
    results = tight.generate(prompts, params)
    assert fingerprints(results) == expected
    assert sum(c.receipt.preemptions for r in results for c in r.choices) > 0
    check_idle(tight)


@both
def test_choices_that_share_a_prompt(tiny_engine, kv_dtype):
    from obole.engine.sampler import choice_seed

    engine = tiny_engine("llama", kv_dtype=kv_dtype)
    cold = tiny_engine("llama", prefix_cache=False, kv_dtype=kv_dtype)
    prompt = random_prompt(random.Random(8), 37, engine.vocab_size)
    common = dict(max_tokens=30, temperature=1.0, logprobs=5, ignore_eos=True)
    (many,) = engine.generate(prompt, SamplingParams(n=6, seed=9, **common))
    for i in range(6):
        (one,) = cold.generate(prompt, SamplingParams(seed=choice_seed(9, i), **common))
        assert fingerprints([one])[0][0] == fingerprints([many])[0][i]
    assert len({c.token_ids for c in many.choices}) > 1
    check_idle(engine)


@both
@each
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_nothing(tiny_engine, arch, kv_dtype, temperature):
    engine = tiny_engine(arch, prefix_cache=False, kv_dtype=kv_dtype)
    rng = random.Random(1)
    prompts = [*(random_prompt(rng, rng.randint(1, 40), engine.vocab_size) for _ in range(3)), [9, 8] * 15]
    common = SamplingParams(max_tokens=25, logprobs=5, ignore_eos=True, temperature=temperature)
    params = [dataclasses.replace(common, seed=i) for i in range(4)]
    expected = engine.generate(prompts, [dataclasses.replace(p, speculate="off") for p in params])
    engine._controller.lengths = always(8)
    assert fingerprints(engine.generate(prompts, params)) == fingerprints(expected)  # the engine's own
    answers = {r.prompt_ids: r.token_ids for r in expected}
    for every, length in ((0, 8), (3, 64), (1, 3)):  # right, now and then wrong, always wrong
        inject(engine, oracle(answers, lambda i, token, n=every: token ^ 1 if n and i % n == n - 1 else token), length)
        results = engine.generate(prompts, params)
        assert fingerprints(results) == fingerprints(expected)
        assert sum(sum(c.receipt.drafted.values()) for r in results for c in r.choices) > 50
    check_idle(engine)


def test_the_format_is_another_cache_and_costs_what_it_says(tiny_engine):
    engines = {name: tiny_engine("llama", kv_dtype=name, blocks=64) for name in ("float32", "bfloat16", *FORMATS)}
    assert len({engine._scheduler.cache.identity for engine in engines.values()}) == 4
    for name, engine in engines.items():
        info = engine.info
        assert info.kv_dtype == name
        assert info.kv_bytes == info.kv_tokens * info.kv_bytes_per_token
    per_token = {name: engine.info.kv_bytes_per_token for name, engine in engines.items()}
    scales = per_token["int8"] - per_token["float32"] // 4
    assert per_token["int8"] == per_token["fp8"]
    assert per_token["bfloat16"] == per_token["float32"] // 2
    assert scales > 0
    prompt = random_prompt(random.Random(1), 50, 128)
    read = {
        name: engine.generate(prompt, SamplingParams(max_tokens=1, speculate="off"))[0].receipt.kv_bytes
        for name, engine in engines.items()
    }
    assert read == {name: 50 * size for name, size in per_token.items()}


def test_an_unknown_format_is_refused(tiny_folders):
    with pytest.raises(ConfigError, match="kv_dtype must be one of auto, float32, bfloat16, int8, fp8, not 'int4'"):
        Engine(tiny_folders("llama"), kv_dtype="int4")
