"""`obole score`, `obole models`, the options, the process as a whole."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time

import pytest
import typer

from obole import __version__
from obole.cli.options import ENGINE, NO_OPTIONS, SAMPLING, parse_size
from obole.cli.receipts import size
from obole.cli.terminal import CONTROLS
from obole.config import EngineConfig, SchedulerConfig
from obole.types import SamplingParams


def test_score(invoke, tmp_path) -> None:
    (tmp_path / "t").write_text("x" * 9)
    result = invoke("score", "smollm2-135m", "--file", str(tmp_path / "t"))
    assert result.exit_code == 0
    assert result.stdout == f"tokens      10 (9 scored)\nnll         2.000000\nperplexity  {math.exp(2):.4f}\n"
    document = json.loads(invoke("score", "smollm2-135m", "--file", "-", "--json", stdin="x" * 9).stdout)
    assert document == {"tokens": 10, "scored_tokens": 9, "nll": 2.0, "perplexity": math.exp(2)}


@pytest.mark.parametrize(("length", "windows"), [(63, [64]), (64, [64]), (65, [64, 2]), (199, [64, 64, 64, 8])])
def test_long_texts_are_scored_in_windows(invoke, script, length, windows) -> None:
    result = invoke("score", "smollm2-135m", "--file", "-", "--json", stdin="x" * length)
    assert [len(ids) for ids in script.scored] == windows
    assert json.loads(result.stdout)["scored_tokens"] == sum(windows) - len(windows)


def test_score_refusals(invoke, script) -> None:
    result = invoke("score", "smollm2-135m", "--file", "-", stdin="")
    assert result.stderr == "error: standard input has 1 token, and scoring takes at least 2.\n"
    script.tokenizer = None
    result = invoke("score", "smollm2-135m", "--file", "-", stdin="abc")
    assert result.exit_code == 1
    assert "no tokenizer" in result.stderr
    assert invoke("score", "smollm2-135m").exit_code == 2


def test_models(invoke) -> None:
    lines = invoke("models").stdout.splitlines()
    assert lines[1].split() == ["smollm2-135m", "Apache-2.0", "98.4", "MB", "/cache/smollm2.gguf", "somewhere/smollm2-135m"]
    assert lines[2].split() == ["other-1b", "Apache-2.0", "–", "no", "somewhere/other-1b"]
    first, second = json.loads(invoke("models", "--json").stdout)["models"]
    assert first == {
        "name": "smollm2-135m",
        "licence": "Apache-2.0",
        "cached": True,
        "size": 98_362_432,
        "path": "/cache/smollm2.gguf",
        "source": "somewhere/smollm2-135m",
    }
    assert (second["cached"], second["path"], second["size"]) == (False, None, None)


def test_version(invoke) -> None:
    assert invoke("--version").stdout == f"obole {__version__}\n"


@pytest.mark.parametrize("arguments", [("run", "--nosuch"), ("nosuch",), ("run", "a", "b", "c"), ("run", "--top-k", "x")])
def test_bad_usage(invoke, arguments) -> None:
    assert invoke(*arguments).exit_code == 2


def test_every_setting_has_an_option() -> None:
    assert set(SAMPLING) | NO_OPTIONS == {f.name for f in dataclasses.fields(SamplingParams)}
    settings = {f.name for kind in (EngineConfig, SchedulerConfig) for f in dataclasses.fields(kind)}
    assert set(ENGINE) == settings - {"scheduler"}


def test_help_shows_the_defaults(invoke) -> None:
    text = " ".join(invoke("run", "--help").stdout.replace("│", " ").split())
    assert f"[default: {SchedulerConfig().max_batch_tokens}]" in text
    assert "[default: smollm2-135m]" in text or "[default: (smollm2-135m)]" in text


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("123", 123), ("1kB", 1000), ("500MB", 500_000_000), ("2GiB", 2**31), ("1.5 gib", 3 * 2**29), ("1TiB", 2**40)],
)
def test_sizes(text, count) -> None:
    assert parse_size(text) == count


def test_ambiguous_sizes_are_refused() -> None:
    with pytest.raises(typer.BadParameter):
        parse_size("2G")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (98_362_432, "98.4 MB"), (999_600_000, "1 GB"), (1_234_000_000_000, "1,234 GB")],
)
def test_sizes_as_text(count, text) -> None:
    assert size(count) == text


def test_a_terminal_sees_control_characters_instead_of_obeying_them() -> None:
    assert "a\x1b]0;title\x07\tb\n\x9b2J\r".translate(CONTROLS) == "a␛]0;title␇\tb\n\ufffd2J␍"


def python(code: str, **keywords) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], text=True, stderr=subprocess.PIPE, check=False, **keywords)


def test_help_is_quick_and_leaves_torch_alone() -> None:
    code = """
import sys
from obole.cli.app import main
sys.argv = ["obole", "run", "--help"]
try:
    main()
except SystemExit as done:
    assert not done.code
assert "torch" not in sys.modules
"""
    start = time.monotonic()
    done = python(code, stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert "--kv-device" in done.stdout
    assert time.monotonic() - start < 5  # about 0.2 s on an idle machine; torch alone takes over 1
