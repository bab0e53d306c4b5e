"""Settings of tiers: what they mean, and what is refused."""

from __future__ import annotations

import pytest

from obole.config import engine_config, parse_size, parse_ssd
from obole.engine.core import pick_num_blocks
from obole.errors import ConfigError


def test_sizes_and_folders():
    assert parse_size("2GiB") == 2 << 30
    assert parse_size("1.5 kB") == 1500
    assert parse_ssd("/a/b:10GiB") == ("/a/b", 10 << 30)
    assert parse_ssd("C:/a:b:500MB") == ("C:/a:b", 500_000_000)


@pytest.mark.parametrize("given", ["", "/a", "/a:", ":1GiB", "/a:0", "/a:2G", "/a:-1", "/a:lots", 5])
def test_a_folder_without_a_size_is_refused(given):
    with pytest.raises(ConfigError, match="kv_ssd must be a folder and a size"):
        engine_config({"kv_ssd": given})


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "1GiB"])
def test_wrong_amounts_of_memory_are_refused(given):
    with pytest.raises(ConfigError, match="kv_ram must be a whole number"):
        engine_config({"kv_ram": given})


def test_tiers_without_a_prefix_cache_are_refused():
    with pytest.raises(ConfigError, match="prefix_cache"):
        engine_config({"kv_ram": 1 << 30, "prefix_cache": False})


def test_a_folder_that_cannot_be_used(tiny_engine, tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("file", "file/folder"):
        with pytest.raises(ConfigError, match=r"kv_ssd: .* cannot be written to"):
            tiny_engine("llama", kv_ssd=f"{tmp_path / name}:1GiB")
    with pytest.raises(ConfigError, match="kv_ram of 100 bytes holds no block"):
        tiny_engine("llama", kv_ram=100)


def test_more_memory_than_there_is(tiny_engine, monkeypatch):
    with pytest.raises(ConfigError, match=rf"not enough free memory .* beside kv_ram of {1 << 49} bytes: .* or kv_ram to less"):
        tiny_engine("llama", kv_ram=1 << 49)
    monkeypatch.setattr("obole.engine.tiering.total_memory", lambda: 10 << 20)
    tiny_engine("llama", kv_ram=5 << 20, kv_device=4 << 20)
    with pytest.raises(ConfigError, match="set kv_ram or kv_device to less"):
        tiny_engine("llama", kv_ram=7 << 20, kv_device=4 << 20)


def test_the_pool_leaves_room_for_the_ram_tier(monkeypatch):
    monkeypatch.setattr("obole.engine.core.available_memory", lambda: 1000 << 20)
    most = 1 << 20  # bytes of a block, so that the limit of contexts is far away

    def blocks(**settings):
        return pick_num_blocks(engine_config(settings), most, 1, 1 << 20, 200 << 20)

    assert blocks() == 400
    assert blocks(kv_ram=600 << 20) == 100
    assert blocks(kv_ram=600 << 20, kv_device=5 << 20) == 5


def test_a_folder_that_may_be_too_small(tiny_engine, tmp_path):
    with pytest.raises(ConfigError, match=r"kv_ssd of 1024 bytes is too small .* give it \d+ bytes or more"):
        tiny_engine("llama", kv_ssd=f"{tmp_path}:1KiB")
