"""The command line as a process: its streams, Ctrl-C, and errors before any command has begun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from obole.cli import models, signals, terminal
from obole.cli.receipts import receipt_text
from obole.engine.results import Choice
from obole.types import FinishReason, SamplingParams

from .conftest import receipt

MAIN = "import sys; from obole.cli.app import main; sys.argv[0] = 'obole'; main()"


def shell(redirected: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `obole ARGUMENTS` with the shell's redirections."""
    line = f'"$0" -c "$1" {" ".join(arguments)} {redirected}'
    return subprocess.run(["bash", "-c", line, sys.executable, MAIN], text=True, capture_output=True, check=False)


@pytest.mark.parametrize("arguments", [("models",), ("models", "--json"), ("--help",), ("run", "--help"), ("--version",), ()])
@pytest.mark.parametrize(("redirected", "reason"), [("> /dev/full", "No space left on device"), (">&-", "it is closed")])
def test_output_that_cannot_be_written_is_one_sentence(arguments, redirected, reason) -> None:
    done = shell(redirected, *arguments)
    assert done.returncode == 1
    assert done.stderr == f"error: standard output cannot be written: {reason}.\n"


@pytest.mark.parametrize("arguments", [("models",), ("--help",), ("score", "--help"), ("--version",)])
def test_a_reader_that_has_left_is_no_news(arguments) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_input_is_no_prompt() -> None:
    done = shell("<&-", "run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: The prompt is empty")


def test_closed_error_stream_does_no_harm() -> None:
    assert shell("2>&-", "--version").stdout.startswith("obole ")


INTERRUPTED = """
import os, signal, sys

at = sys.argv.pop()

class Press:  # Ctrl-C while the module `at` is imported
    def find_spec(self, name, *_):
        if name == at:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Press())
from obole.cli.app import main
sys.argv.append("--version")
main()
"""


@pytest.mark.parametrize("at", ["numpy", "typer", "rich.console", "obole.cli.run"])
def test_ctrl_c_during_imports_is_quiet(at) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, at], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = subprocess.run([sys.executable, "-c", INTERRUPTED, "typer"], capture_output=True, text=True, check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.returncode, done.stdout.startswith("obole ")) == (0, True)


def test_ctrl_c_can_wait() -> None:
    reached = []

    def imports() -> None:
        with signals.later():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append(True)

    with pytest.raises(KeyboardInterrupt):
        imports()
    assert reached
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("arguments", "words", "field"),
    [
        (("run", "--nosuch"), "No such option: --nosuch", "nosuch"),
        (("run", "Hi", "--top-k"), "requires an argument", "top_k"),
        (("run", "Hi", "--top-k", "x"), "--top-k", "top_k"),
        (("run", "a", "b", "c"), "extra argument", None),
        (("run", "Hi", "--kv-device", "2G"), "'2G' is not a size", "kv_device"),
        (("run", "-", "--prompt-file", "x"), "two prompts", "prompt"),
        (("score",), "Missing argument 'MODEL'", "model"),
        (("score", "m", "--max-context", "1", "--file", "x"), "--max-context is 1", "max_context"),
        (("chat", "--n", "2"), "--n must be 1", "n"),
        (("nosuch",), "No such command 'nosuch'", None),
    ],
)
def test_wrong_usage_looks_like_any_error(invoke, script, arguments, words, field) -> None:
    plain = invoke(*arguments)
    assert (plain.exit_code, plain.stdout) == (2, "")
    assert plain.stderr.startswith("error: ")
    assert words in plain.stderr.splitlines()[0]
    assert plain.stderr.splitlines()[0].endswith((".", "?"))
    assert all(line.startswith("obole") and "--help lists" in line for line in plain.stderr.splitlines()[1:])
    machine = invoke(arguments[0], "--json", *arguments[1:])
    assert (machine.exit_code, machine.stderr) == (2, "")
    error = json.loads(machine.stdout)["error"]
    assert words in error["message"]
    assert error["field"] == field
    assert script.opened == []


def test_json_after_two_dashes_is_a_prompt(invoke) -> None:
    assert invoke("run", "a", "b", "--", "--json").stdout == ""


def test_without_arguments_there_is_help(invoke) -> None:
    result = invoke()
    assert (result.exit_code, result.stderr) == (0, "")
    assert "score" in result.stdout


def test_help_has_no_types_of_python_and_no_stray_breaks(invoke, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    for command in ("run", "chat", "score", "models"):
        text = invoke(command, "--help").stdout
        assert not [word for word in ("<bool>", "<int>", "<str>", "<float>", "list[") if word in text]
    assert "each window has nothing before it" in invoke("score", "--help").stdout


@pytest.mark.parametrize(("width", "rule"), [(30, 30), (62, 62), (200, 62)])
def test_the_rule_of_a_receipt_fits_the_terminal(width, rule) -> None:
    choice = Choice(0, "", (), FinishReason.STOP, None, receipt(1))
    assert len(receipt_text(choice, SamplingParams(), "receipt", width).splitlines()[0]) == rule


def test_nothing_is_divided_by_no_tokens() -> None:
    text = receipt_text(Choice(0, "", (), FinishReason.LENGTH, None, receipt(0)), SamplingParams())
    assert "a token" not in text
    assert "output  0 tokens · ended by length\n" in text


def test_tokens_never_read_are_shown() -> None:
    from dataclasses import replace

    unread = replace(receipt(0), computed_tokens=1, unread_tokens=3)
    text = receipt_text(Choice(0, "", (), FinishReason.CANCELLED, None, unread), SamplingParams())
    assert "prompt  12 tokens: 8 cached + 1 computed + 3 unread\n" in text


def test_models_on_a_narrow_terminal_keep_paths_whole(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(models, "Console", lambda **_: Console(width=50, highlight=False))
    models.models()
    assert "smollm2-135m · Apache-2.0 · 98.4 MB\n  /cache/smollm2.gguf\n  somewhere/smollm2-135m\n" in capsys.readouterr().out
    monkeypatch.setattr(models, "Console", lambda **_: Console(width=200, highlight=False, no_color=True, color_system=None))
    models.models()
    assert capsys.readouterr().out.splitlines()[0].split() == ["name", "licence", "size", "cached", "source"]


def test_progress_in_tokens_starts_without_a_share(monkeypatch) -> None:
    updates = []
    monkeypatch.setattr(terminal.Progress, "update", lambda _self, _task, **fields: updates.append(fields))
    with terminal.progress_bar() as report:
        report("scoring", 0, 5000)
        report("scoring", 4096, 5000)
    assert [(u["amount"], u["total"]) for u in updates] == [("5,000 tokens", None), ("4,096 of 5,000 tokens", 5000)]


def test_quality_benchmark_says_what_it_needs() -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "quality.py"
    code = f"import sys, runpy; sys.modules['transformers'] = None; runpy.run_path({str(script)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'obole[dev]'" in done.stderr
