"""The engine thread with tiers: nobody waits for somebody else's load, and what can wait is done when nothing else is."""

from __future__ import annotations

import asyncio
import random
import time

from exact.common import random_prompt
from exact.test_tiers import push_out, tiered  # noqa: F401
from obole import SamplingParams
from obole.engine.async_engine import AsyncEngine
from obole.types import FinishReason

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def test_others_are_served_while_one_waits_for_a_disk_that_hangs(tiered, monkeypatch):  # noqa: F811
    rng = random.Random(1)
    engine = tiered()
    prompt = random_prompt(rng, 150, engine.vocab_size)
    engine.generate(prompt, PARAMS)
    push_out(engine, rng)
    monkeypatch.setattr("obole.cache.tiers.load.StoreLoad.ready", property(lambda _: 0))
    monkeypatch.setattr("obole.cache.tiers.load.StoreLoad.over", property(lambda _: False))

    async def run():
        async with AsyncEngine(engine) as serving:
            stuck = await serving.submit(prompt, PARAMS)
            while not engine._scheduler.is_loading:
                await asyncio.sleep(0.001)
            began = time.monotonic()
            other = await serving.submit(random_prompt(rng, 10, engine.vocab_size), PARAMS)
            deltas = [delta async for delta in other]
            assert deltas[-1].finish_reason is FinishReason.LENGTH
            assert time.monotonic() - began < 5.0
            assert engine._scheduler.is_loading
            assert serving.snapshot().waiting == 1
            stuck.cancel()
            assert [delta.finish_reason async for delta in stuck] == [FinishReason.CANCELLED]
            assert not engine._scheduler.is_loading
        engine._scheduler.check()

    asyncio.run(run())


def test_an_idle_engine_writes_what_it_has_computed(tiered):  # noqa: F811
    engine = tiered()
    prompt = random_prompt(random.Random(2), 200, engine.vocab_size)

    async def run():
        async with AsyncEngine(engine) as serving:
            stream = await serving.submit(prompt, PARAMS)
            async for _ in stream:
                pass
            until = time.monotonic() + 10
            while serving.tier_stats().tiers["ssd"].blocks < 12:
                assert time.monotonic() < until
                await asyncio.sleep(0.01)

    asyncio.run(run())
