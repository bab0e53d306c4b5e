"""`obole bench`: documents, tables and refusals, on a tiny checkpoint."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from obole.bench import kernels as room
from obole.cli.bench_tables import number
from obole.cli.commands import app

COMMANDS = {
    "latency": ("--prompt-tokens", "20", "--output-tokens", "4", "--context", "0,10"),
    "throughput": ("--sequences", "1,3", "--prompt-tokens", "8", "--output-tokens", "4"),
    "roofline": ("--sequences", "1,2", "--context", "5", "--output-tokens", "3", "--prompt-tokens", "10"),
    "overhead": ("--sequences", "2", "--context", "5", "--output-tokens", "3"),
    "kernels": ("--kinds", "q4_0", "--rows", "1,2", "--shape", "48x96"),
}
ROWS = {"latency": 2, "throughput": 2, "roofline": 3, "overhead": 1, "kernels": 2 + 3 + 2 * 7}
FIELDS = {
    "latency": {
        "prompt_tokens", "context", "output_tokens", "prefill_tokens_per_second", "decode_tokens_per_second",
        "bytes_per_token", "read_bandwidth_bytes_per_second", "share_of_bandwidth", "repetitions",
    },
    "throughput": {
        "sequences", "prompt_tokens", "output_tokens", "step_milliseconds", "decode_tokens_per_second",
        "decode_tokens_per_second_each", "ratio_to_one", "repetitions",
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(room, "MEASURED_SECONDS", 0.0005)
    monkeypatch.setattr(room, "VOCABULARY", 1000)
    monkeypatch.setattr(room, "last_level_cache", lambda: 1 << 16)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("OBOLE_DEBUG", raising=False)


@pytest.fixture
def invoke(tiny_folders):
    def run(command, *arguments):
        model = [] if command == "kernels" else [str(tiny_folders("llama")), "--kv-device", "2MiB"]
        return CliRunner().invoke(app, ["bench", command, *model, "--threads", "2", *arguments])

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_documents(invoke, command):
    result = invoke(command, *COMMANDS[command], "--repeat", "2", "--json", "-")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["benchmark"] == command
    assert (document["threads"], document["repeat"]) == (2, 2)
    assert document["kernels"].startswith("native")
    assert set(document["machine"]) == {"cpu", "cores", "memory_bytes", "cache_bytes"}
    assert {"obole", "python", "torch", "numpy"} == set(document["versions"])
    assert document["date"].endswith("+00:00")
    if command != "kernels":
        assert document["model"].endswith("llama")
        assert len(document["digest"]) == 64
    assert len(document["rows"]) == ROWS[command]
    for row in document["rows"]:
        assert FIELDS.get(command, set(row)) == set(row)
        for name, values in row["repetitions"].items():
            assert len(values) == 2
            assert row[name] == pytest.approx(sum(values) / 2)


@pytest.mark.parametrize("command", COMMANDS)
def test_tables_and_files(invoke, command, tmp_path):
    file = tmp_path / "found.json"
    result = invoke(command, *COMMANDS[command], "--repeat", "1", "--json", str(file))
    assert result.exit_code == 0, result.output
    assert json.loads(file.read_text())["benchmark"] == command
    assert "2 threads" in result.stdout.splitlines()[0]
    if command == "overhead":
        assert "not kernel: " in result.stdout
    else:
        assert len(result.stdout.splitlines()) >= ROWS[command] + 2


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("latency", "--context", "0,x"), 2, "whole numbers"),
        (("latency", "--context", ""), 2, "whole numbers"),
        (("throughput", "--sequences", "0"), 2, "whole numbers"),
        (("throughput", "--repeat", "0"), 2, "repeat"),
        (("kernels", "--shape", "48"), 2, "shape"),
        (("kernels", "--kinds", "Q9_9"), 1, "Q9_9"),
        (("kernels", "--kernels", "nonsense"), 1, "nonsense"),
        (("latency", "--json", "/nowhere/at/all.json"), 1, "cannot be written"),
        (("latency", "--json", "/"), 1, "cannot be written"),
        (("latency", "--prompt-tokens", "100000"), 1, "context"),
        (("throughput", "--sequences", "1000"), 1, "sequences"),
        (("overhead", "--sequences", "100", "--context", "1"), 1, "recorded"),
    ],
)
def test_refusals(invoke, arguments, status, message):
    result = invoke(*arguments)
    assert result.exit_code == status
    assert message in result.stderr
    assert not result.stdout


def test_errors_as_json_only_on_standard_output(invoke, tmp_path):
    result = invoke("latency", "--prompt-tokens", "100000", "--json", "-")
    assert (result.exit_code, json.loads(result.stdout)["error"]["field"]) == (1, "prompt_tokens")
    result = invoke("latency", "--prompt-tokens", "100000", "--json", str(tmp_path / "x.json"))
    assert "error:" in result.stderr
    assert not result.stdout
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(("value", "text"), [(0.0712, "0.0712"), (9.876, "9.88"), (99.96, "100"), (12345.6, "12,346")])
def test_numbers(value, text):
    assert number(value) == text
