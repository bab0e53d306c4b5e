"""What is kept for how long, in every tier: texts and blocks of another day, held prompts, deleted tenants."""

from __future__ import annotations

import asyncio
import random
import threading

import numpy as np
import pytest

from exact.common import check_idle, fingerprints, random_prompt
from exact.test_tiers import PARAMS, push_out, settle, tiered  # noqa: F401
from obole import SamplingParams
from obole.cache.prefix import owner_tag
from obole.cache.tiers.store import TierStore
from obole.engine.async_engine import AsyncEngine
from obole.errors import InvalidRequest

SHORT = SamplingParams(max_tokens=1)
GREEDY = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=2)


def files_hold(folder, needle: bytes) -> bool:
    return any(needle in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_texts_of_another_day_draft(tiered):  # noqa: F811
    """A follow-up is answered from SSD, with drafts from what was said before, and with the same bits."""
    rng = random.Random(1)
    first = tiered()
    prompt = random_prompt(rng, 100, first.vocab_size)
    (said,) = first.generate(prompt, GREEDY, tenant="a")
    first.close()
    second = tiered()
    second._tiering.recall.wait(10)
    (other,) = second.generate(prompt, GREEDY, tenant="b")
    assert "memory" not in other.receipt.drafted
    assert other.receipt.cached_tokens == 0
    (again,) = second.generate(
        prompt, SamplingParams(max_tokens=60, ignore_eos=True, logprobs=2, speculate="memory"), tenant="a"
    )
    assert again.receipt.cached_by_tier["ssd"] >= 80
    assert fingerprints([again]) == fingerprints([said])
    assert second._controller.memory.generations("a")
    assert again.receipt.drafted.get("memory", 0) > 0


def test_old_texts_are_not_brought_back(tiered):  # noqa: F811
    first = tiered()
    prompt = random_prompt(random.Random(2), 100, first.vocab_size)
    first.generate(prompt, GREEDY, tenant="a")
    first.close()
    second = tiered(draft_memory_seconds=0)
    second._tiering.recall.wait(10)
    second.generate(prompt[:5], SHORT, tenant="a")
    assert not second._controller.memory.generations("a")


def test_forgetting_does_not_wait_for_texts_that_a_slow_disk_is_still_reading(tiered, monkeypatch):  # noqa: F811
    first = tiered()
    prompt = random_prompt(random.Random(8), 100, first.vocab_size)
    for tenant in ("a", "b"):
        first.generate(prompt, GREEDY, tenant=tenant)
    first.close()
    documents, answers = TierStore.documents, threading.Event()

    def slow(self):
        for text in documents(self):
            assert answers.wait(30)
            yield text

    monkeypatch.setattr(TierStore, "documents", slow)
    second = tiered()
    second._forget("a")
    second.generate(prompt[:5], SHORT, tenant="a")
    answers.set()
    second._tiering.recall.wait(10)
    for tenant in ("a", "b"):
        second.generate(prompt[:5], SHORT, tenant=tenant)
    assert not any(name.startswith("recalled") for g in second._controller.memory.generations("a") for name in g.documents)
    assert any(name.startswith("recalled") for g in second._controller.memory.generations("b") for name in g.documents)


def test_a_tenant_is_forgotten_in_every_tier(tiered, tmp_path):  # noqa: F811
    rng = random.Random(3)
    engine = tiered(ram=200 * 8192)
    prompt = random_prompt(rng, 180, engine.vocab_size)
    (mine,) = engine.generate(prompt, GREEDY, tenant="me")
    (theirs,) = engine.generate(prompt, GREEDY, tenant="them")
    settle(engine)
    secret = np.asarray(prompt[:40], dtype="<i4").tobytes()
    assert files_hold(tmp_path / "ssd", owner_tag("me"))
    assert files_hold(tmp_path / "ssd", secret)
    stream = engine.stream(prompt + random_prompt(rng, 20, engine.vocab_size), PARAMS, tenant="me")
    next(stream)
    gone = engine.forget("me")
    assert gone.device_blocks >= 11
    assert gone.tier_blocks >= 11
    for _ in stream:
        pass
    check_idle(engine)
    assert not engine._controller.memory.generations("me")
    (again,) = engine.generate(prompt, GREEDY, tenant="me")
    assert again.receipt.cached_tokens == 0
    assert fingerprints([again]) == fingerprints([mine])
    (kept,) = engine.generate(prompt, GREEDY, tenant="them")
    assert kept.receipt.cached_tokens == 176
    engine.forget("me")
    engine.forget("them")
    assert not files_hold(tmp_path / "ssd", secret)
    assert engine.tier_stats.documents == 0
    assert engine.tier_stats.tiers["ssd"].blocks == engine.tier_stats.tiers["ram"].blocks == 0
    engine.close()
    (later,) = tiered(ram=200 * 8192).generate(prompt, GREEDY, tenant="them")
    assert later.receipt.cached_tokens == 0
    assert fingerprints([later]) == fingerprints([theirs])


def test_forgetting_without_tiers(tiny_engine):
    engine = tiny_engine("llama")
    prompt = random_prompt(random.Random(4), 100, engine.vocab_size)
    engine.generate(prompt, SHORT, tenant="me")
    assert engine.forget("me").device_blocks == 6
    assert engine.forget("me").device_blocks == 0
    assert engine.generate(prompt, SHORT, tenant="me")[0].receipt.cached_tokens == 0


def test_forgotten_while_others_wait_for_it(tiered):  # noqa: F811
    async def run(engine):
        async with AsyncEngine(engine) as serving:
            prompt = random_prompt(random.Random(5), 100, engine.vocab_size)
            stream = await serving.submit(prompt, GREEDY, tenant="me")
            gone = await serving.forget("me")
            async for _ in stream:
                pass
            assert (await serving.forget("me")) == type(gone)(0, 0)

    asyncio.run(run(tiered()))


@pytest.mark.parametrize("ram", [None, 40 * 8192])
def test_a_held_prompt_outlives_others(tiny_engine, tiered, ram):  # noqa: F811
    rng = random.Random(6)
    engine = tiered(ram=ram, ssd=None) if ram else tiny_engine("llama", blocks=64)
    prompt, other = (random_prompt(rng, 200, engine.vocab_size) for _ in range(2))
    held = SamplingParams(max_tokens=1, hold_seconds=60.0)
    assert engine.generate(prompt, held)[0].receipt.held_tokens == 192
    engine.generate(other, SHORT)
    for _ in range(10):
        engine.generate(random_prompt(rng, 230, engine.vocab_size), SHORT)
    assert engine.generate(prompt, SHORT)[0].receipt.cached_by_tier["device"] == 192
    if not ram:
        assert engine.generate(other, SHORT)[0].receipt.cached_tokens == 0
    clock = engine._clock
    engine._clock = lambda: clock() + 61
    for _ in range(10):
        engine.generate(random_prompt(rng, 230, engine.vocab_size), SHORT)
    assert engine.generate(prompt, SHORT)[0].receipt.cached_by_tier["device"] == 0
    check_idle(engine)


def test_at_most_half_of_the_pool_is_held(tiny_engine):
    rng = random.Random(7)
    engine = tiny_engine("llama", blocks=64)
    held = SamplingParams(max_tokens=1, hold_seconds=60.0)
    counts = [engine.generate(random_prompt(rng, 200, engine.vocab_size), held)[0].receipt.held_tokens for _ in range(4)]
    assert counts == [192, 192, 128, 0]
    with pytest.raises(InvalidRequest, match="hold_seconds"):
        SamplingParams(hold_seconds=-1.0)
