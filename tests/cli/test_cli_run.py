from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from obole.cli.options import WrongUsage
from obole.cli.run import read_prompt, sort_arguments
from obole.errors import ConfigError, InvalidRequest, ModelError


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def interrupt(at: int, *, by_signal: bool = False):
    """A script step that presses Ctrl-C before piece `at`."""

    def press(number: int) -> None:
        if number == at and by_signal:
            os.kill(os.getpid(), signal.SIGINT)
        elif number == at:
            raise KeyboardInterrupt

    return press


def test_text_on_stdout_receipt_on_stderr(invoke, script) -> None:
    result = invoke("run", "smollm2-135m", "Hi there")
    assert result.exit_code == 0
    assert result.stdout == "Hello world\n"
    assert "12 tokens: 8 cached + 4 computed" in result.stderr
    assert "3 tokens: 3 model" in result.stderr
    assert "4 forward passes · weights 394 MB (131 MB a token) · KV 5 MB (1.67 MB a token)" in result.stderr
    assert "0.00 s queued + 0.25 s prefill + 0.50 s decode = 0.75 s · 4.0 tokens/s" in result.stderr
    assert "seed" not in result.stderr  # nothing was left to chance
    assert "KV pool 2 GB (91,000 tokens, bfloat16)" in result.stderr
    assert script.asked[0][0] == user("Hi there")
    assert script.closed == 1


def test_json_is_one_object_and_nothing_else(invoke) -> None:
    result = invoke("run", "smollm2-135m", "Hi", "--json")
    document = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    assert document["text"] == "Hello world"
    assert document["token_ids"] == [0, 1, 2]
    assert document["finish_reason"] == "stop"
    assert document["usage"]["prompt_tokens"] == 12
    assert document["usage"]["completion_tokens"] == 3
    assert document["receipt"]["sources"] == {"model": 3}


def test_options_reach_the_engine(invoke, script) -> None:
    options = [
        *("--kv-device", "2GiB", "--threads", "3", "--max-context", "77", "--kernels", "reference"),
        *("--revision", "v1", "--no-prefix-cache", "--max-tokens", "5", "--temperature", "0.5", "--seed", "-3"),
        *("--stop", "END", "--stop", "###", "--logit-bias", "9=-2.5", "--stop-token-id", "4"),
    ]
    assert invoke("run", "m/odel", "Hi", "--raw", *options).exit_code == 0
    assert script.opened == [
        (
            "m/odel",
            {
                "revision": "v1",
                "kv_device": 2 * 1024**3,
                "threads": 3,
                "max_context": 77,
                "kernels": "reference",
                "prefix_cache": False,
            },
        )
    ]
    [(prompt, params)] = script.asked
    assert prompt == "Hi"
    assert (params.max_tokens, params.temperature, params.seed, params.stop) == (5, 0.5, -3, ("END", "###"))
    assert (dict(params.logit_bias), params.stop_token_ids) == ({9: -2.5}, (4,))


def test_settings_left_alone_are_not_passed(invoke, script) -> None:
    invoke("run", "Hi")
    assert script.opened == [("smollm2-135m", {"revision": None})]


def test_settings_come_from_the_environment(invoke, script, monkeypatch) -> None:
    monkeypatch.setenv("OBOLE_KV_DEVICE", "500MB")
    invoke("run", "Hi")
    assert script.opened[0][1]["kv_device"] == 500_000_000


@pytest.mark.parametrize(
    ("first", "second", "file", "expected"),
    [
        (None, None, None, ("smollm2-135m", None)),
        ("smollm2-135m", None, None, ("smollm2-135m", None)),
        ("qwen3-0.6b", None, None, ("qwen3-0.6b", None)),
        ("org/repo-1.5B", None, None, ("org/repo-1.5B", None)),
        ("missing.gguf", None, None, ("missing.gguf", None)),
        (os.path.dirname(__file__), None, None, (os.path.dirname(__file__), None)),
        ("What is 3/4 of 8?", None, None, ("smollm2-135m", "What is 3/4 of 8?")),
        ("hello", None, None, ("smollm2-135m", "hello")),
        ("x" * 100_000, None, None, ("smollm2-135m", "x" * 100_000)),
        ("nul\0byte", None, None, ("smollm2-135m", "nul\0byte")),
        ("-", None, None, ("smollm2-135m", "-")),
        ("hello", None, Path("f"), ("hello", None)),
        ("anything", "smollm2-135m", None, ("anything", "smollm2-135m")),
    ],
)
def test_a_lone_argument_is_a_model_or_a_prompt(first, second, file, expected) -> None:
    assert sort_arguments(first, second, file) == expected


@pytest.mark.parametrize("arguments", [("smollm2-135m",), ("smollm2-135m", "-"), ("-",), ()])
def test_prompt_from_standard_input(invoke, script, arguments) -> None:
    assert invoke("run", *arguments, stdin="Zwölf?\n").exit_code == 0
    assert script.asked[0][0] == user("Zwölf?")


def test_prompt_file_is_exact_with_raw(invoke, script, tmp_path) -> None:
    (tmp_path / "p").write_bytes(b"def f():\r\n\n")
    invoke("run", "smollm2-135m", "--prompt-file", str(tmp_path / "p"), "--raw")
    invoke("run", "smollm2-135m", "--prompt-file", str(tmp_path / "p"))
    assert [prompt for prompt, _ in script.asked] == ["def f():\r\n\n", user("def f():\r\n")]


def test_two_prompts_are_refused(invoke, tmp_path) -> None:
    for arguments in (("smollm2-135m", "Hi"), ("-",)):
        result = invoke("run", *arguments, "--prompt-file", str(tmp_path / "p"))
        assert result.exit_code == 2
        assert "not both" in result.stderr


def test_no_prompt_at_a_terminal_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(WrongUsage, match="There is no prompt"):
        read_prompt(None, None)


@pytest.mark.parametrize(
    ("stdin", "arguments", "status", "words", "field"),
    [
        (b"", (), 2, "The prompt is empty", "prompt"),
        (b"ab\xff", (), 1, "standard input is not UTF-8 text (byte 2)", "prompt"),
        (b"", ("--prompt-file", "/nowhere/x"), 1, "/nowhere/x cannot be read: No such file or directory.", "prompt"),
        (b"", ("--prompt-file", "/"), 1, "/ cannot be read: Is a directory.", "prompt"),
        (b"Hi", ("--temperature", "-1"), 2, "--temperature must be", "temperature"),
        (b"Hi", ("--temperature", "nan"), 2, "--temperature must be", "temperature"),
        (b"Hi", ("--max-tokens", "2", "--min-tokens", "3"), 2, "--min-tokens (3) is more than --max-tokens (2)", "min_tokens"),
        (b"Hi", ("--n", "0"), 2, "--n must be", "n"),
        (b"Hi", ("--stop-token-id", "-1"), 2, "--stop-token-id must be", "stop_token_ids"),
        (b"Hi", ("--threads", "0"), 2, "--threads must be", "threads"),
        (b"Hi", ("--kernels", "foo"), 2, "--kernels must be one of", "kernels"),
        (b"Hi", ("--max-batch-tokens", "0"), 2, "--max-batch-tokens must be", "max_batch_tokens"),
    ],
)
def test_bad_input_is_one_sentence(invoke, script, stdin, arguments, status, words, field) -> None:
    plain = invoke("run", "smollm2-135m", *arguments, stdin=stdin)
    assert plain.exit_code == status
    assert plain.stdout == ""
    assert plain.stderr.startswith("error: ")
    assert words in plain.stderr
    assert plain.stderr.count("\n") == 1
    machine = invoke("run", "smollm2-135m", *arguments, "--json", stdin=stdin)
    assert machine.exit_code == status
    error = json.loads(machine.stdout)["error"]
    assert words in error["message"]
    assert error["field"] == field
    assert script.opened == []  # refused before anything is loaded


def test_logprobs_without_json_are_refused(invoke) -> None:
    result = invoke("run", "Hi", "--logprobs", "3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--logprobs is shown with --json only" in result.stderr
    assert invoke("run", "Hi", "--logprobs", "3", "--json").exit_code == 0


@pytest.mark.parametrize("size", ["2G", "x", "-1MB", "1.2.3GB", ""])
def test_bad_sizes_are_bad_usage(invoke, size) -> None:
    result = invoke("run", "Hi", "--kv-device", size)
    assert result.exit_code == 2
    assert "is not a size" in result.stderr


def test_a_model_without_a_template_needs_raw(invoke, script) -> None:
    script.has_chat_template = False
    result = invoke("run", "smollm2-135m", "Hi")
    assert result.exit_code == 1
    assert "--raw" in result.stderr
    assert script.closed == 1
    assert invoke("run", "smollm2-135m", "Hi", "--raw").exit_code == 0


def test_errors_of_the_engine(invoke, script) -> None:
    def fail() -> None:
        raise ModelError("There is no model [nosuch].")

    script.load = fail
    assert invoke("run", "Hi").stderr == "error: There is no model [nosuch].\n"
    assert json.loads(invoke("run", "Hi", "--json").stdout) == {
        "error": {"message": "There is no model [nosuch].", "field": None}
    }


def test_unexpected_errors_have_no_traceback_unless_wanted(invoke, script, monkeypatch) -> None:
    def fail() -> None:
        raise RuntimeError("boom")

    script.load = fail
    result = invoke("run", "Hi")
    assert result.exit_code == 1
    assert result.stderr == "error: Unexpected RuntimeError: boom (set OBOLE_DEBUG=1 to see where it came from).\n"
    monkeypatch.setenv("OBOLE_DEBUG", "1")
    assert isinstance(invoke("run", "Hi").exception, RuntimeError)


@pytest.mark.parametrize("by_signal", [False, True])  # a second Ctrl-C, or one where signals are not ours; the usual one
@pytest.mark.parametrize(("at", "text"), [(1, ""), (3, "Hello wor\n")])
def test_ctrl_c_keeps_what_there_is(invoke, script, at, text, by_signal) -> None:
    before = signal.getsignal(signal.SIGINT)
    script.pieces.append("!")
    script.before_piece = interrupt(at, by_signal=by_signal)
    result = invoke("run", "Hi")
    assert result.exit_code == 130
    assert result.stdout == text
    assert "cancelled" in result.stderr
    assert signal.getsignal(signal.SIGINT) is before
    assert script.closed == 1


def test_ctrl_c_with_json(invoke, script) -> None:
    script.before_piece = interrupt(2)
    result = invoke("run", "Hi", "--json")
    assert result.exit_code == 130
    document = json.loads(result.stdout)
    assert (document["text"], document["finish_reason"]) == ("Hello", "cancelled")


def test_ctrl_c_while_loading(invoke, script) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    script.load = press
    result = invoke("run", "Hi")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")


def test_several_answers_are_not_interleaved(invoke) -> None:
    result = invoke("run", "Hi", "--n", "3")
    assert result.stdout == "".join(f"── answer {i} of 3 ──\nHello world\n" for i in (1, 2, 3))
    assert result.stderr.count("── receipt of answer") == 3
    assert len(json.loads(invoke("run", "Hi", "--n", "3", "--json").stdout)["choices"]) == 3


@pytest.mark.parametrize("by_signal", [False, True])
def test_several_cancelled_answers(invoke, script, by_signal) -> None:
    script.before_piece = interrupt(4, by_signal=by_signal)
    result = invoke("run", "Hi", "--n", "2")
    assert result.exit_code == 130
    assert result.stdout == "── answer 1 of 2 ──\nHello wor\n── answer 2 of 2 ──\nHello\n"
    assert result.stderr.count("ended by cancelled") == 2


def test_equal_answers_are_said_to_be(invoke) -> None:
    assert "All answers are equal" in invoke("run", "Hi", "--n", "2").stderr
    assert "All answers are equal" not in invoke("run", "Hi", "--n", "2", "--temperature", "0.8").stderr
    assert "All answers are equal" not in invoke("run", "Hi").stderr


@pytest.mark.parametrize(("given", "shown"), [((), "seed 7"), (("--seed", "-1"), "seed -1")])
def test_the_seed_is_shown_as_it_was_given(invoke, given, shown) -> None:
    assert f"ended by stop · {shown}\n" in invoke("run", "Hi", "--temperature", "1", *given).stderr


def test_a_prompt_far_beyond_the_context_is_refused_before_it_is_rendered(invoke, script, tmp_path) -> None:
    (tmp_path / "p").write_bytes(b"x" * 1_000_000)
    result = invoke("run", "smollm2-135m", "--prompt-file", str(tmp_path / "p"))
    assert result.exit_code == 1
    assert result.stderr == ("error: The prompt has 1 MB, far more than the context of 64 tokens can hold; shorten it.\n")
    assert script.asked == []
    assert invoke("run", "smollm2-135m", "x" * 60_000).exit_code == 0  # whether this fits is for the engine to say


def test_texts_of_devices_are_refused(invoke, monkeypatch) -> None:
    monkeypatch.setattr("obole.cli.answering.MOST_READ", 1000)
    result = invoke("run", "smollm2-135m", "--prompt-file", "/dev/zero")
    assert result.exit_code == 1
    assert "/dev/zero has more than 1 kB" in result.stderr


def test_a_word_that_names_a_folder_without_a_model_is_a_prompt(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, inside in (("docs", "readme.md"), ("quantised", "m.GGUF"), ("tensors", "config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / inside).touch()
    assert sort_arguments("docs", None, None) == ("smollm2-135m", "docs")
    for model in ("quantised", "tensors", "./docs", "docs/"):
        assert sort_arguments(model, None, None) == (model, None)


def test_errors_say_which_word_was_taken_as_the_model(invoke, script) -> None:
    def fail() -> None:
        raise ModelError("There is no such model.")

    script.load = fail
    said = "error: There is no such model. ('either/or' was taken as the model.)\n"
    assert invoke("run", "either/or", stdin="Hi").stderr == said
    assert invoke("run", "either/or", "Hi").stderr == said
    assert invoke("run", "either/or", stdin="").stderr.endswith("('either/or' was taken as the model.)\n")
    for known in (("other.gguf", "Hi"), ("smollm2-135m", "Hi"), ("Hi",)):
        assert "taken as" not in invoke("run", *known).stderr


@pytest.mark.parametrize(
    ("error", "message", "field"),
    [
        (ConfigError("A KV pool of 9 bytes is too small."), "--kv-device: A KV pool of 9 bytes is too small.", "kv_device"),
        (ConfigError("max_context 9 is beyond 8."), "--max-context 9 is beyond 8.", "max_context"),
        (ConfigError("Set it, or set kernels to 'reference'."), "Set it, or set --kernels to 'reference'.", "kernels"),
        (ConfigError("9 threads cannot be started."), "--threads: 9 threads cannot be started.", "threads"),
        (ConfigError("Nothing known."), "Nothing known.", None),
        (ModelError("/x/max_tokens/m.gguf: no seed."), "/x/max_tokens/m.gguf: no seed.", None),
        (InvalidRequest("prompt", "Shorten it or raise max_context."), "Shorten it or raise --max-context.", "prompt"),
        (InvalidRequest("stop", "There is no tokenizer."), "--stop: There is no tokenizer.", "stop"),
    ],
)  # fmt: skip
def test_errors_speak_of_options(invoke, script, error, message, field) -> None:
    def fail() -> None:
        raise error

    script.load = fail
    assert invoke("run", "Hi").stderr == f"error: {message}\n"
    assert json.loads(invoke("run", "Hi", "--json").stdout) == {"error": {"message": message, "field": field}}
