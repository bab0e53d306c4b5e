"""`obole bench cache`, on a tiny checkpoint."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from obole.bench import cache as room
from obole.bench.cache import WriteBehind, plain_read
from obole.bench.samples import Samples
from obole.cli.commands import app


@pytest.fixture
def invoke(tiny_folders, monkeypatch):
    monkeypatch.setattr(room, "PROMPT_TOKENS", 40)
    monkeypatch.setattr(room, "OUTPUT_TOKENS", 8)
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments):
        return CliRunner().invoke(app, ["bench", "cache", str(tiny_folders("llama")), "--kv-device", "4MiB", *arguments])

    return run


def test_document(invoke, tmp_path):
    result = invoke("--tokens", "200", "--repeat", "2", "--kv-ssd", f"{tmp_path / 'ssd'}:100MiB", "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["benchmark"], document["tokens"], document["repeat"]) == ("cache", 200, 2)
    rows = {row["tier"]: row for row in document["rows"]}
    assert list(rows) == ["cold", "device", "ram", "ssd"]
    assert all(row["identical"] for row in rows.values())
    # whole blocks, as no answer has filled the last one; reading may not pay for a model that is so quick
    assert [rows[tier]["cached_tokens"] for tier in ("cold", "device", "ram")] == [0, 192, 192]
    assert document["plain"]["bytes"] == 13 * 8192
    assert "cost" in document["write_behind"]


def test_table_and_refusals(invoke, tmp_path):
    result = invoke("--tokens", "100", "--repeat", "1", "--kv-ssd", f"{tmp_path / 'ssd'}:100MiB")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("yes") == 4
    assert "plain reading of 57.3 kB" in result.stdout
    result = invoke("--tokens", "5000", "--kv-ssd", f"{tmp_path / 'ssd'}:100MiB")
    assert result.exit_code == 1
    assert "context" in result.output


def test_cost_is_a_share():
    assert WriteBehind(Samples.of([100.0, 98.0, 102.0]), Samples.of([95.0])).cost == pytest.approx(0.05)


def test_plain_reading_reads_as_much_as_asked(tmp_path):
    (tmp_path / "a").write_bytes(bytes(10_000))
    (tmp_path / "b").write_bytes(bytes(5_000))
    assert plain_read(tmp_path, 12_000, 2).bytes == 12_000
    with pytest.raises(RuntimeError, match="3000 bytes fewer"):
        plain_read(tmp_path, 18_000, 1)
