"""An exception at any boundary of a step ends requests, and never leaves a wrong block or a stuck engine behind."""

from __future__ import annotations

import random

import pytest

from exact.common import check_idle, fingerprints, random_prompt
from obole import SamplingParams
from obole.cache.managers import KVCacheManager
from obole.engine.engine import Engine
from obole.engine.runner import Runner
from obole.scheduler.scheduler import Scheduler
from obole.types import FinishReason

PARAMS = SamplingParams(max_tokens=30, temperature=1.0, seed=4, logprobs=3, ignore_eos=True, n=2)

BOUNDARIES = [
    (KVCacheManager, "match"),
    (KVCacheManager, "attach"),
    (KVCacheManager, "allocate"),
    (KVCacheManager, "commit"),
    (KVCacheManager, "release"),
    (Scheduler, "plan"),
    (Scheduler, "_admit"),
    (Runner, "run"),
    (Scheduler, "settle"),
    (Engine, "_deliver"),
]


def failing(function, call, after, error):
    """The function, which raises at its nth call, before or after it has done its work."""
    calls = 0

    def fail(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call and not after:
            raise error
        result = function(*args, **kwargs)
        if calls == call:
            raise error
        return result

    return fail


@pytest.mark.parametrize(("owner", "name"), BOUNDARIES)
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interrupted_anywhere(tiny_engine, monkeypatch, owner, name, after, error):
    engine = tiny_engine("llama", blocks=40)
    prompt = random_prompt(random.Random(1), 32, engine.vocab_size)
    (expected,) = tiny_engine("llama", prefix_cache=False).generate(prompt, PARAMS)
    engine.generate(prompt, SamplingParams(max_tokens=1))  # the prompt is wholly cached: its last block will be copied
    function = getattr(owner, name)
    for call in (1, 2, 5, 9):
        stream = engine.stream(prompt, PARAMS)
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failing(function, call, after, error))
            try:
                for _ in stream:
                    pass
            except error:
                assert [d.finish_reason for d in stream][-1:] in ([FinishReason.CANCELLED], [FinishReason.LENGTH], [])
        assert stream.result is not None or not stream._live.unfinished
        for _ in range(2):  # cold or warm: the answer is the right one, and nothing is stuck
            assert fingerprints(engine.generate(prompt, PARAMS)) == fingerprints([expected])
        check_idle(engine)


def test_a_stream_collected_in_the_middle_of_a_plan(tiny_engine, monkeypatch):
    engine = tiny_engine("llama")
    prompt = random_prompt(random.Random(2), 20, engine.vocab_size)
    doomed = [engine.stream(prompt, PARAMS)]
    other = engine.stream(prompt[:10], PARAMS)
    chunks = Scheduler._plan_chunks

    def collect(*args):
        doomed.clear()
        return chunks(*args)

    monkeypatch.setattr(Scheduler, "_plan_chunks", collect)
    assert {d.finish_reason for d in other} == {None, FinishReason.LENGTH}
    engine.generate(prompt, SamplingParams(max_tokens=1))
    check_idle(engine)


@pytest.mark.parametrize(("first", "second", "hit"), [("a", "a", True), ("a", "b", False), ("", "a", False), ("a", "", False)])
def test_tenants_do_not_share_a_cache(tiny_engine, first, second, hit):  # B22
    engine = tiny_engine("gemma3")
    prompt = random_prompt(random.Random(3), 50, engine.vocab_size)
    params = SamplingParams(max_tokens=4, logprobs=2)
    (a,) = engine.generate(prompt, params, tenant=first)
    (b,) = engine.generate(prompt, params, tenant=second)
    assert (b.receipt.cached_tokens > 0) is hit
    assert fingerprints([a]) == fingerprints([b])


def test_scoring_fills_the_whole_pool(tiny_engine):
    engine = tiny_engine("llama", blocks=8)
    ids = random_prompt(random.Random(4), engine.max_scored, engine.vocab_size)
    assert len(engine.score(ids)[0].logprobs) == engine.max_scored == 128
