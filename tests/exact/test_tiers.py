"""What comes back from RAM or SSD is what was computed, to the bit; and whatever a disk does, no answer changes."""

from __future__ import annotations

import errno
import random
import shutil
import time

import pytest

from exact.common import check_idle, fingerprints, random_prompt
from exact.test_recovery import failing
from fakes.checkpoints import random_weights, tiny_config, write_hf
from obole import Engine, SamplingParams
from obole.cache.managers import KVCacheManager
from obole.cache.pool import KVPool
from obole.cache.tiers.io import OsDisk
from obole.cache.tiers.store import TierStore
from obole.config import RopeConfig
from obole.engine.tiering import Tiering
from obole.scheduler.loading import Loader
from obole.types import FinishReason

PARAMS = SamplingParams(max_tokens=6, temperature=1.0, seed=4, logprobs=3, ignore_eos=True)
SSD = 1 << 30


@pytest.fixture
def tiered(tiny_engine, tmp_path):
    """Opens engines with tiers, over a disk that always seems worth waiting for: tiny models compute as fast as disks read."""

    def open_engine(arch="llama", *, ram=None, ssd="ssd", blocks=64, **settings):
        kv_ssd = None if ssd is None else f"{tmp_path / ssd}:{SSD}"
        engine = tiny_engine(arch, blocks=blocks, kv_ram=ram, kv_ssd=kv_ssd, **settings)
        engine._scheduler.loader.recompute = lambda start, end: 10.0 * max(0, end - start)
        return engine

    return open_engine


def push_out(engine, rng):
    """Fill the pool with other prompts, and have everything written that can be."""
    for _ in range(2 * engine._scheduler.cache.ledger.num_blocks // 13):
        engine.generate(random_prompt(rng, 200, engine.vocab_size), SamplingParams(max_tokens=1))
    settle(engine)


def settle(engine):
    while engine._when_idle():
        pass
    engine._tiering.store.flush()


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("tier", ["ram", "ssd"])
def test_cached_equals_cold(tiny_engine, tiered, arch, tier):  # B27
    rng = random.Random(1)
    engine = tiered(arch, ram=64 << 20 if tier == "ram" else None, ssd=None if tier == "ram" else "ssd", blocks=160)
    prompt = random_prompt(rng, 200, engine.vocab_size)
    cold = tiny_engine(arch, prefix_cache=False)
    for length in (200, 197, 193, 192, 191, 130, 33, 17):
        push_out(engine, rng)
        (result,) = engine.generate(prompt[:length], PARAMS)
        if length < 200:
            assert result.receipt.cached_by_tier[tier] > 0, "it proves nothing otherwise"
            assert result.receipt.cached_tokens >= (length - 1) // 16 * 16
        assert sum(result.receipt.cached_by_tier.values()) == result.receipt.cached_tokens
        assert fingerprints([result]) == fingerprints(cold.generate(prompt[:length], PARAMS))
    check_idle(engine)


def test_an_answer_from_another_day(tiny_engine, tiered):  # B29
    rng = random.Random(2)
    first = tiered()
    prompt = random_prompt(rng, 150, first.vocab_size)
    (said,) = first.generate(prompt, PARAMS)
    first.close()
    second = tiered()
    longer = [*prompt, *said.token_ids, *random_prompt(rng, 10, second.vocab_size)]
    (result,) = second.generate(longer, PARAMS)
    assert result.receipt.cached_by_tier == {"device": 0, "ram": 0, "ssd": 144}
    assert fingerprints([result]) == fingerprints(tiny_engine("llama", prefix_cache=False).generate(longer, PARAMS))


def test_two_engines_on_one_folder(tiered):
    rng = random.Random(3)
    one, other = tiered(), tiered()
    prompts = [random_prompt(rng, 100, one.vocab_size) for _ in range(4)]
    answers = [fingerprints((one if i % 2 else other).generate(prompt, PARAMS)) for i, prompt in enumerate(prompts)]
    for engine in (one, other):
        push_out(engine, rng)
    assert [fingerprints(other.generate(prompt, PARAMS)) for prompt in prompts] == answers
    assert [fingerprints(one.generate(prompt, PARAMS)) for prompt in prompts] == answers


@pytest.mark.parametrize("written", [True, False])
def test_the_process_was_killed(tiered, tmp_path, written):  # B29
    """The folder as `kill -9` leaves it, with all blocks written or with some still on their way."""
    prompt = random_prompt(random.Random(12), 200, 128)
    first = tiered(max_batch_tokens=64)
    (said,) = first.generate(prompt, PARAMS)
    if written:
        settle(first)
    shutil.copytree(tmp_path / "ssd", tmp_path / "left")
    second = tiered(ssd="left")
    (result,) = second.generate(prompt, PARAMS)
    assert fingerprints([result]) == fingerprints([said])
    assert not written or result.receipt.cached_by_tier["ssd"] == 192
    assert second.tier_stats.misses == {}


def test_a_disk_that_becomes_full_while_blocks_go_down(tiny_engine, tiered, monkeypatch):  # B27
    rng = random.Random(13)
    engine = tiered(ram=6 * 8192)
    prompts = [random_prompt(rng, 150, engine.vocab_size) for _ in range(6)]
    cold = tiny_engine("llama", prefix_cache=False)
    expected = [fingerprints(cold.generate(prompt, PARAMS)) for prompt in prompts]
    write, left = OsDisk.write, [3]

    def until_full(self, fd, buffers, offset):
        left[0] -= 1
        if left[0] < 0:
            write(self, fd, [b"".join(map(bytes, buffers))[:5000]], offset)
            raise OSError(errno.ENOSPC, "full")
        write(self, fd, buffers, offset)

    monkeypatch.setattr(OsDisk, "write", until_full)
    for _ in range(2):
        for prompt, right in zip(prompts, expected, strict=True):
            assert fingerprints(engine.generate(prompt, PARAMS)) == right
            settle(engine)
    assert engine.tier_stats.write_errors > 0
    assert engine.tier_stats.dropped_writes > 0
    check_idle(engine)


def write_checkpoint(folder, **changed):
    """A model in a folder, or another one in the same place with one tensor or setting changed, everything else being equal."""
    config = tiny_config("llama", **{name: value for name, value in changed.items() if name != "norm"})
    weights = random_weights(config, seed=1, scale=0.25)
    weights["model.layers.0.input_layernorm.weight"] += changed.get("norm", 0)
    return write_hf(folder, config, weights)


@pytest.mark.parametrize("change", ["nothing", "one tensor", "positions", "format"])
def test_another_model_in_the_same_place(tmp_path, monkeypatch, change):  # B30
    prompt = random_prompt(random.Random(14), 100, 128)
    settings = {"kv_ssd": f"{tmp_path / 'ssd'}:{SSD}", "kv_device": 1 << 22}
    with Engine(write_checkpoint(tmp_path / "model"), **settings) as first:
        first.generate(prompt, PARAMS)
    if change == "one tensor":
        write_checkpoint(tmp_path / "model", norm=0.5)
    if change == "positions":
        write_checkpoint(tmp_path / "model", rope=RopeConfig(theta=20000.0))
    if change == "format":
        monkeypatch.setattr("obole.engine.tiering.FORMAT_VERSION", 2)
    with Engine(tmp_path / "model", **settings) as second, Engine(tmp_path / "model", prefix_cache=False) as cold:
        second._scheduler.loader.recompute = lambda start, end: 10.0 * max(0, end - start)
        (result,) = second.generate(prompt, PARAMS)
        assert result.receipt.cached_tokens == (96 if change == "nothing" else 0)
        assert fingerprints([result]) == fingerprints(cold.generate(prompt, PARAMS))
        assert (second.tier_stats.misses.get("identity", 0) > 0) == (change != "nothing")


@pytest.mark.parametrize("setting", [{"kv_dtype": "bfloat16"}, {"tenant": "other"}, {"kernels": "reference"}])
def test_other_settings_find_nothing(tiered, setting):  # B30
    prompt = random_prompt(random.Random(4), 100, 128)
    first = tiered()
    first.generate(prompt, PARAMS)
    first.close()
    tenant = setting.pop("tenant", "")
    (result,) = tiered(**setting).generate(prompt, PARAMS, tenant=tenant)
    assert result.receipt.cached_tokens == 0


def test_damaged_files_are_misses(tiered, tmp_path):
    """Every third byte of everything in the folder is another one."""
    prompt = random_prompt(random.Random(5), 200, 128)
    first = tiered()
    expected = fingerprints(first.generate(prompt, PARAMS))
    first.close()
    second = tiered()
    files = [path for path in (tmp_path / "ssd").rglob("*") if path.is_file() and path.stat().st_size > 4096]
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        data[4096::3] = bytes(b ^ 1 for b in data[4096::3])
        with path.open("r+b") as file:
            file.write(data)
    (result,) = second.generate(prompt, PARAMS)
    assert fingerprints([result]) == expected
    assert result.receipt.cached_tokens < 100
    assert sum(second.tier_stats.misses.values()) > 0


BOUNDARIES = [
    (KVCacheManager, "reserve"),
    (KVCacheManager, "adopt"),
    (Loader, "begin"),
    (Loader, "lay"),
    (Loader, "enter"),
    (Loader, "settled"),
    (Tiering, "carry"),
    (Tiering, "after_step"),
    (KVPool, "gather"),
    (KVPool, "scatter"),
    (TierStore, "load"),
    (TierStore, "demote"),
]


@pytest.mark.parametrize(("owner", "name"), BOUNDARIES)
@pytest.mark.parametrize("after", [False, True])
def test_interrupted_anywhere(tiny_engine, tiered, monkeypatch, owner, name, after):
    rng = random.Random(6)
    engine = tiered(ram=40 * 8192, blocks=40)
    prompts = [random_prompt(rng, 150, engine.vocab_size) for _ in range(3)]
    cold = tiny_engine("llama", prefix_cache=False)
    expected = [fingerprints(cold.generate(prompt, PARAMS)) for prompt in prompts]
    for prompt in prompts * 2:
        engine.generate(prompt, SamplingParams(max_tokens=1))
    function = getattr(owner, name)
    for call in (1, 2, 4):
        streams = [engine.stream(prompt, PARAMS) for prompt in prompts]
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, failing(function, call, after, KeyboardInterrupt))
            for stream in streams:
                try:
                    for _ in stream:
                        pass
                except KeyboardInterrupt:
                    pass
        for stream in streams:
            stream.close()
        for prompt, right in zip(prompts, expected, strict=True):
            assert fingerprints(engine.generate(prompt, PARAMS)) == right
        check_idle(engine)


def test_random_traffic_through_all_tiers(tiny_engine, tiered):
    """Prompts with common beginnings, in flight together, given up now and then, through a pool and RAM that are too small."""
    rng = random.Random(7)
    engine = tiered("gemma3", ram=60 * 8192, blocks=60, max_batch_tokens=48)
    cold = tiny_engine("gemma3", prefix_cache=False)
    stems = [random_prompt(rng, 120, engine.vocab_size) for _ in range(4)]
    below = 0
    for _ in range(12):
        prompts = [rng.choice(stems)[: rng.randint(40, 120)] + random_prompt(rng, 5, engine.vocab_size) for _ in range(4)]
        streams = [engine.stream(prompt, PARAMS) for prompt in prompts]
        for stream, prompt in zip(streams, prompts, strict=True):
            if rng.random() < 0.2:
                stream.close()
                continue
            for _ in stream:
                pass
            assert fingerprints([stream.result]) == fingerprints(cold.generate(prompt, PARAMS))
            tiers = stream.result.receipt.cached_by_tier
            below += tiers["ram"] + tiers["ssd"]
        settle(engine)
    assert below > 500
    check_idle(engine)


def test_cancelled_while_it_loads(tiered, monkeypatch):  # B31
    rng = random.Random(8)
    engine = tiered()
    prompt = random_prompt(rng, 150, engine.vocab_size)
    engine.generate(prompt, PARAMS)
    push_out(engine, rng)
    monkeypatch.setattr("obole.cache.tiers.load.StoreLoad.ready", property(lambda _: 0))
    monkeypatch.setattr("obole.cache.tiers.load.StoreLoad.over", property(lambda _: False))
    stream = engine.stream(prompt, PARAMS)
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        engine._step()
    assert engine._scheduler.is_loading
    stream.close()
    assert stream.result.finish_reason is FinishReason.CANCELLED
    check_idle(engine)


def test_a_disk_that_hangs(tiny_engine, tiered, monkeypatch):
    rng = random.Random(9)
    engine = tiered()
    prompt = random_prompt(rng, 150, engine.vocab_size)
    engine.generate(prompt, PARAMS)
    push_out(engine, rng)
    engine._scheduler.loader.recompute = lambda start, end: 0.01 * (end - start)
    monkeypatch.setattr("obole.cache.tiers.load.StoreLoad.ready", property(lambda _: 0))
    monkeypatch.setattr("obole.cache.tiers.load.StoreLoad.over", property(lambda _: False))
    (result,) = engine.generate(prompt, PARAMS)
    assert 0.05 * 1.5 <= result.receipt.load_seconds < 0.05 * 1.5 + 0.1
    assert result.receipt.cached_tokens == 0
    monkeypatch.undo()
    assert fingerprints([result]) == fingerprints(tiny_engine("llama", prefix_cache=False).generate(prompt, PARAMS))
