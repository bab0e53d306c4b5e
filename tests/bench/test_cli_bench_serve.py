"""`obole bench serve`: on a server that it starts, and on one that is there."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from fakes.talking import write_talking
from obole.bench.processes import free_address, obole_command, serving
from obole.cli.bench_serve import read_prompts, server_options
from obole.cli.commands import app
from obole.errors import ConfigError, InvalidRequest

SMALL = ("--concurrency", "2", "--requests", "5", "--output-tokens", "6")
ENGINE = ("--kv-device", "4MiB", "--threads", "2")


@pytest.fixture(autouse=True)
def plain_output(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("OBOLE_DEBUG", raising=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_talking(tmp_path_factory.mktemp("talking") / "model.gguf"))


@pytest.fixture(scope="module")
def url(model):
    address = free_address()
    with serving(obole_command(model, address, ENGINE), address) as running:
        yield address.url
        assert running.stop() == 0


def bench(*arguments: str):
    return CliRunner().invoke(app, ["bench", "serve", *arguments])


def test_a_model_with_and_without_a_server(model):
    result = bench(model, *ENGINE, *SMALL, "--prompt-tokens", "200", "--offline", "--repeat", "2", "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["benchmark"], document["model"], document["repeat"]) == ("serve", model, 2)
    [row] = document["rows"]
    assert (row["concurrency"], row["requests"], row["errors"]) == (2, 5, {})
    assert row["prompt_tokens"] == pytest.approx(200, rel=0.2)
    assert row["output_tokens"] == 6
    for name in ("output_tokens_per_second", "first_token_p99_milliseconds", "between_tokens_p50_milliseconds"):
        assert row[name] > 0
        assert len(row["repetitions"][name]) == 2
    offline = document["offline"]
    names = ("served_tokens_per_second", "output_tokens_per_second")
    rates = zip(*(offline["repetitions"][name] for name in names), strict=True)
    assert offline["repetitions"]["cost_percent"] == pytest.approx([100 * (1 - served / alone) for served, alone in rates])
    assert offline["errors"] == {}
    assert "long" not in document


def test_a_server_that_is_there(url, tmp_path):
    file = tmp_path / "found.json"
    long = ("--long-prompt-every", "0.02", "--long-prompt-tokens", "1000", "--requests", "40")
    result = bench(url + "/v1", *SMALL, *long, "--repeat", "1", "--json", str(file), "--extra", '{"speculate": "off"}')
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text())
    assert document["long"]["requests"] >= 1
    assert document["long"]["prompt_tokens"] == pytest.approx(1000, rel=0.2)
    assert document["rows"][0]["tokens_per_event"] <= 6
    assert "output tokens/s" in result.stdout
    assert "beside a long prompt" in result.stdout


def test_prompts_from_a_file(url, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "hello"}\n\n{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n'
    )
    result = bench(url, *SMALL, "--prompts", str(file), "--no-ignore-eos", "--repeat", "1", "--json", "-")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"][0]["errors"] == {}


def test_what_cannot_be_measured_is_told(url):
    result = bench(url, *SMALL, "--prompt-tokens", "2045", "--output-tokens", "40", "--repeat", "1")
    assert result.exit_code == 1
    assert "cannot be measured: 400" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("http://127.0.0.1:9", "--offline"), 2, "--offline"),
        (("http://127.0.0.1:9", "--threads", "2"), 2, "--threads"),
        (("http://127.0.0.1:9", "--revision", "x"), 2, "--revision"),
        (("model", "--offline", "--extra", '{"stop": "x"}'), 2, "--extra"),
        (("model", "--offline", "--long-prompt-every", "1"), 2, "--long-prompt-every"),
        (("model", "--extra", "[]"), 2, "JSON object"),
        (("model", "--prompts", "x", "--prompt-tokens", "3"), 2, "--prompt-tokens"),
        (("model", "--prompts", "/nowhere"), 1, "/nowhere"),
        (("model", "--concurrency", "0"), 2, "concurrency"),
        (("http://127.0.0.1:9", "--repeat", "1"), 1, "cannot be measured"),
        (("http://user@:9",), 1, "not the address"),
        (("./no-such-model.gguf",), 1, "no-such-model"),
    ],
)
def test_refusals(arguments, status, message):
    result = bench(*arguments)
    assert (result.exit_code, message in result.stderr) == (status, True), result.output
    assert not result.stdout


@pytest.mark.parametrize("line", ["x", "[]", "{}", '"text"', "3"])
def test_prompts_that_are_none(tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}\n' + line)
    with pytest.raises(InvalidRequest, match="Line 2"):
        read_prompts(file)


def test_settings_become_options():
    settings = {"threads": 2, "prefix_cache": False, "kv_device": 1 << 20, "speculate": "off"}
    assert server_options("main", settings) == [
        "--revision", "main", "--threads", "2", "--no-prefix-cache", "--kv-device", "1048576", "--speculate", "off"
    ]  # fmt: skip


def test_a_server_that_does_not_come_up(tmp_path):
    address = free_address()
    with (
        pytest.raises(ConfigError, match="status 3 before it was up: alas"),
        serving(["sh", "-c", "echo alas; exit 3"], address),
    ):
        pass
    with pytest.raises(ConfigError, match="cannot be started"), serving([str(tmp_path / "none")], address):
        pass


def test_answers_have_the_same_digest_each_time_and_the_gate_compares_it(url, tmp_path):
    file = tmp_path / "baseline.json"
    result = bench(url, *SMALL, "--repeat", "3", "--json", str(file))
    assert result.exit_code == 0, result.output
    gate = CliRunner().invoke(app, ["bench", "gate", str(file), "--tolerance", "9", "--json", "-"])
    assert gate.exit_code == 0, gate.output
    found = json.loads(gate.stdout)
    assert found["bits"] == {"same": True, "why": ""}
    assert "whole_answer_p50_milliseconds" in {change["figure"] for change in found["changes"]}
