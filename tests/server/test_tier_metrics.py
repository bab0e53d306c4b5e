"""Metrics of tiers, and of what a cache that never forgets would have found."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from .asking import CHAT, TEXT
from .puppets import open_speaking
from .test_tenants import PROMPT


def figures(client):
    page = client.get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {(s.name, *s.labels.values()): s.value for s in samples}


def test_hits_by_tier_and_share_of_ideal(tmp_path, serve_engine):
    engine = open_speaking(tmp_path, ["one"], kv_ram=16 << 20, kv_ssd=f"{tmp_path / 'ssd'}:64MiB")
    client = serve_engine(engine).client
    for _ in range(3):
        assert client.post(CHAT, json={"messages": PROMPT}).status_code == 200
    found = figures(client)
    hits = found["obole_prefix_cache_hits_total",]
    assert hits > 0
    assert found["obole_prefix_cache_hits_by_tier_total", "device"] == hits
    assert found["obole_prefix_cache_share_of_ideal",] == pytest.approx(1.0)
    assert found["obole_prefix_cache_ideal_hits_total",] == pytest.approx(hits, abs=32)
    assert found["obole_prefix_reuse_gap_seconds_bucket", "+Inf"] * 16 == found["obole_prefix_cache_ideal_hits_total",]
    assert found["obole_kv_tier_dropped_writes_total",] == 0
    for tier in ("ram", "ssd"):
        for name in ("blocks", "bytes", "tokens_written_total", "tokens_read_total"):
            assert found[f"obole_kv_tier_{name}", tier] >= 0


def test_without_tiers(tmp_path, serve_engine):
    client = serve_engine(open_speaking(tmp_path, ["one"])).client
    assert client.post(TEXT, json={"prompt": "a few words"}).status_code == 200
    assert not [name for name, *_ in figures(client) if "kv_tier" in name]
