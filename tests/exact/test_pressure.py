"""A hundred random requests through a cache that is too small for them, with cancellations: each as if alone."""

from __future__ import annotations

import random

import pytest

from exact.common import check_idle, fingerprint, random_params, random_prompt
from obole import SamplingParams
from obole.types import FinishReason


@pytest.mark.parametrize(("arch", "blocks"), [("llama", 24), ("gemma3", 36)])
def test_a_hundred_random_requests(tiny_engine, arch, blocks):
    rng = random.Random(20)
    calm = tiny_engine(arch, prefix_cache=False)
    engine = tiny_engine(arch, blocks=blocks, max_batch_tokens=24, max_sequences=12)
    shared = [random_prompt(rng, 40, engine.vocab_size) for _ in range(3)]
    waiting = []
    for _ in range(100):
        prompt = random_prompt(rng, rng.randint(1, 60), engine.vocab_size)
        if rng.random() < 0.5:
            prompt = rng.choice(shared)[: rng.randint(1, 40)] + prompt[:20]
        params = random_params(rng, rng.randint(1, 100))
        give_up_after = rng.randint(0, 12) if rng.random() < 0.2 else None
        waiting.append((prompt, params, give_up_after))
    running, done = [], []
    while waiting or running:
        while waiting and rng.random() < 0.5:
            prompt, params, give_up_after = waiting.pop()
            running.append((engine.stream(prompt, params), prompt, params, give_up_after, []))
        for entry in list(running):
            stream, _, _, give_up_after, deltas = entry
            if give_up_after is not None and len(deltas) >= give_up_after:
                stream.close()
            else:
                delta = next(stream, None)
                if delta is not None:
                    deltas.append(delta)
                    continue
            running.remove(entry)
            done.append(entry)
    check_idle(engine)
    assert len(done) == 100
    preemptions = 0
    for stream, prompt, params, give_up_after, _ in done:
        (expected,) = calm.generate(prompt, params)
        choice = stream.result.choices[0]
        preemptions += choice.receipt.preemptions
        bill = choice.receipt
        assert bill.cached_tokens + bill.computed_tokens + bill.unread_tokens == bill.prompt_tokens == len(prompt)
        assert bill.unread_tokens == 0 or choice.finish_reason is FinishReason.CANCELLED
        if choice.finish_reason is FinishReason.CANCELLED:
            assert give_up_after is not None
            assert choice.token_ids == expected.token_ids[: len(choice.token_ids)]
        else:
            assert fingerprint(choice) == fingerprint(expected.choices[0])
    assert preemptions > 0


def test_pass_phrases_do_not_leak_between_requests(tiny_engine):
    """B32: many prompts in flight; every answer equals its solo run, in the order of the requests, call after call."""
    engine = tiny_engine("qwen2")
    rng = random.Random(21)
    prompts = [random_prompt(rng, rng.randint(3, 120), engine.vocab_size) for _ in range(32)]
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    solo = [engine.generate(p, params)[0].token_ids for p in prompts]
    for _ in range(3):
        order = list(range(32))
        rng.shuffle(order)
        results = engine.generate([prompts[i] for i in order], params)
        assert [r.token_ids for r in results] == [solo[i] for i in order]
        assert [list(r.prompt_ids) for r in results] == [prompts[i] for i in order]
    assert engine.generate([], params) == []
    check_idle(engine)


def test_two_requests_that_need_more_than_half_of_the_pool_each(tiny_engine):
    """B26: neither may wait for what the other holds."""
    engine = tiny_engine("llama", blocks=10)
    prompts = [random_prompt(random.Random(s), 60, engine.vocab_size) for s in (1, 2)]
    results = engine.generate(prompts, SamplingParams(max_tokens=36, ignore_eos=True))
    assert [len(r.token_ids) for r in results] == [36, 36]
    check_idle(engine)
