"""Invariant 1, for equality: alone = batched, whole = chunked, cold = cached, undisturbed = preempted."""

from __future__ import annotations

import dataclasses
import random

import pytest

from exact.common import check_idle, fingerprints, random_params, random_prompt
from obole import SamplingParams

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3"]
KERNELS = ["native", "reference"]


def requests(seed, count, vocab, *, longest=90, max_tokens=12):
    rng = random.Random(seed)
    prompts = [random_prompt(rng, rng.randint(1, longest), vocab) for _ in range(count)]
    return prompts, [random_params(rng, max_tokens) for _ in range(count)]


def alone(engine, prompts, params):
    return [engine.generate(p, q)[0] for p, q in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_alone_equals_batched_with_fifteen_others(tiny_engine, arch, kernels):
    engine = tiny_engine(arch, kernels=kernels, prefix_cache=False)
    count = 16 if kernels == "native" else 6
    prompts, params = requests(1, count, engine.vocab_size, longest=90 if kernels == "native" else 30)
    assert fingerprints(engine.generate(prompts, params)) == fingerprints(alone(engine, prompts, params))
    check_idle(engine)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("chunk", [7, 16, 64])
def test_whole_equals_chunked(tiny_engine, arch, chunk):
    whole = tiny_engine(arch, prefix_cache=False)
    chunked = tiny_engine(arch, prefix_cache=False, max_batch_tokens=chunk)
    prompts, params = requests(2, 8, whole.vocab_size, longest=150)
    expected = fingerprints(alone(whole, prompts, params))
    assert fingerprints(alone(chunked, prompts, params)) == expected
    assert fingerprints(chunked.generate(prompts, params)) == expected
    check_idle(chunked)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_cold_equals_cached_at_every_split(tiny_engine, arch):
    """The prompt's first k tokens are in the cache, followed there by something else, for every k."""
    engine = tiny_engine(arch)
    cold = tiny_engine(arch, prefix_cache=False)
    rng = random.Random(3)
    prompt = random_prompt(rng, 100, engine.vocab_size)
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=5, logprobs=5, ignore_eos=True)
    (expected,) = cold.generate(prompt, params)
    for k in range(len(prompt) + 1):
        tenant = f"split {k}"  # a cache of its own
        engine.generate([*prompt[:k], *random_prompt(rng, 5, engine.vocab_size)], SamplingParams(max_tokens=1), tenant=tenant)
        (result,) = engine.generate(prompt, params, tenant=tenant)
        assert result.receipt.cached_tokens == min(k // 16 * 16, len(prompt) - 1), k
        assert fingerprints([result]) == fingerprints([expected]), k
    check_idle(engine)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("length", [16, 31, 32, 33, 48, 96])
def test_a_prompt_wholly_in_the_cache(tiny_engine, arch, length):
    engine = tiny_engine(arch)
    prompt = random_prompt(random.Random(4), length, engine.vocab_size)
    params = SamplingParams(max_tokens=20, seed=1, temperature=0.8, logprobs=5, ignore_eos=True)
    first, second, third = (engine.generate(prompt, params)[0] for _ in range(3))
    assert first.receipt.cached_tokens == 0
    assert second.receipt.cached_tokens == min(length // 16 * 16, length - 1)
    assert fingerprints([second, third]) == fingerprints([first, first])


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_conversation_continues_from_the_cache(tiny_engine, arch):
    """Each turn appends the model's own answer; the cached run equals the cold one at every turn."""
    warm, cold = tiny_engine(arch), tiny_engine(arch, prefix_cache=False)
    rng = random.Random(6)
    history = random_prompt(rng, 20, warm.vocab_size)
    for turn in range(4):
        params = SamplingParams(max_tokens=25, temperature=1.0, seed=turn, logprobs=5, ignore_eos=True)
        (a,), (b,) = warm.generate(history, params), cold.generate(history, params)
        assert fingerprints([a]) == fingerprints([b])
        if turn:
            assert a.receipt.cached_tokens >= (len(history) - 11 - 16) // 16 * 16
        history = [*history, *a.token_ids, *random_prompt(rng, 11, warm.vocab_size)]
    check_idle(warm)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_preempted_equals_undisturbed(tiny_engine, arch):
    roomy = tiny_engine(arch, prefix_cache=False)
    prompts, params = requests(7, 8, roomy.vocab_size, longest=20, max_tokens=110)
    params = [dataclasses.replace(p, ignore_eos=True) for p in params]
    expected = fingerprints(alone(roomy, prompts, params))
    tight = tiny_engine(arch, blocks=18 if arch == "llama" else 60, max_batch_tokens=16)
    results = tight.generate(prompts, params)
    assert fingerprints(results) == expected
    assert sum(c.receipt.preemptions for r in results for c in r.choices) > 0
    check_idle(tight)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_choices_equal_their_own_seeds(tiny_engine, arch):
    """n answers share the prompt's computation and blocks; each equals what its seed gives alone."""
    from obole.engine.sampler import choice_seed

    engine = tiny_engine(arch)
    prompt = random_prompt(random.Random(8), 37, engine.vocab_size)
    common = dict(max_tokens=30, temperature=1.0, logprobs=5, ignore_eos=True)
    (many,) = engine.generate(prompt, SamplingParams(n=6, seed=9, **common))
    cold = tiny_engine(arch, prefix_cache=False)
    for i, choice in enumerate(many.choices):
        (one,) = cold.generate(prompt, SamplingParams(seed=choice_seed(9, i), **common))
        assert fingerprints([one])[0][0] == fingerprints([many])[0][i]
        expected = 0 if i == 0 else len(prompt) - 1
        assert choice.receipt.cached_tokens == expected
    assert len({c.token_ids for c in many.choices}) > 1
    check_idle(engine)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_does_not_matter(tiny_engine, threads):
    engine = tiny_engine("qwen3", threads=threads, prefix_cache=False)
    baseline = tiny_engine("qwen3", threads=1, prefix_cache=False)
    prompts, params = requests(10, 6, engine.vocab_size)
    assert fingerprints(engine.generate(prompts, params)) == fingerprints(alone(baseline, prompts, params))


def test_a_seeded_request_does_not_depend_on_unseeded_neighbours(tiny_engine):
    """B15: alone, with 1, 7 and 31 neighbours that have no seed, and again after a cache hit."""
    engine = tiny_engine("llama")
    rng = random.Random(11)
    prompt = random_prompt(rng, 30, engine.vocab_size)
    params = SamplingParams(max_tokens=32, temperature=0.8, seed=42, ignore_eos=True)
    (expected,) = engine.generate(prompt, params)
    for neighbours in (1, 7, 31):
        others = [random_prompt(rng, 20, engine.vocab_size) for _ in range(neighbours)]
        loose = SamplingParams(max_tokens=20, temperature=1.0)
        result = engine.generate([prompt, *others], [params, *[loose] * neighbours])[0]
        assert result.token_ids == expected.token_ids


def test_streaming_equals_not_streaming(tiny_engine):
    engine = tiny_engine("gemma3")
    prompt = random_prompt(random.Random(12), 40, engine.vocab_size)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, n=3, ignore_eos=True)
    (whole,) = engine.generate(prompt, params)
    deltas = list(engine.stream(prompt, params))
    for choice in whole.choices:
        mine = [d for d in deltas if d.index == choice.index]
        assert tuple(t for d in mine for t in d.token_ids) == choice.token_ids
        assert [d.finish_reason for d in mine if d.finish_reason] == [choice.finish_reason]
    assert deltas[-1].result is not None
    assert [d.result for d in deltas[:-1]] == [None] * (len(deltas) - 1)
