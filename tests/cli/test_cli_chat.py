from __future__ import annotations

import builtins
import json
import sys
from types import SimpleNamespace

import pytest

from obole.cli.chat import read_line, why_cut
from obole.errors import InvalidRequest
from obole.types import FinishReason


def said(script, turn: int) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in script.asked[turn][0]]


def test_history_is_kept(invoke, script) -> None:
    result = invoke("chat", "--system", "Be brief.", "--max-tokens", "9", stdin="One?\n\nTwo?\n")
    assert result.exit_code == 0
    assert result.stdout == "Hello world\nHello world\n"
    assert said(script, 0) == [("system", "Be brief."), ("user", "One?")]
    assert said(script, 1) == [("system", "Be brief."), ("user", "One?"), ("assistant", "Hello world"), ("user", "Two?")]
    assert script.asked[0][1].max_tokens == 9
    assert "prompt 12 (8 cached) · 3 tokens · 4.0 tok/s · 0.25 s to first token" in result.stderr
    assert script.closed == 1


def test_prices(invoke, tmp_path) -> None:
    file = tmp_path / "prices.toml"
    file.write_text('currency = "EUR"\n[per_million]\ninput = 3\ncached = 1\noutput = 10\ncopied = 4\n')
    result = invoke("chat", "--prices", str(file), stdin="One?\n")
    assert result.exit_code == 0
    assert " · 0.00005 EUR: input 0.000012 + cached_device 0.000008 + output 0.00003\n" in result.stderr
    told = invoke("chat", "--prices", str(file), "--json", stdin="One?\nTwo?\n")
    assert [json.loads(line)["receipt"]["price"]["total"] for line in told.stdout.splitlines()] == ["0.00005", "0.00005"]
    assert "price" not in json.loads(invoke("chat", "--json", stdin="One?\n").stdout)["receipt"]
    file.write_text("currency = 1")
    refused = invoke("chat", "--prices", str(file), stdin="One?\n")
    assert refused.exit_code == 1
    assert "per_million" in refused.stderr
    assert refused.stdout == ""


def test_commands(invoke, script, tmp_path) -> None:
    file = tmp_path / "talk.json"
    stdin = f"/help\nOne?\n/save {file}\n/reset\nTwo?\n//slash\n/exit\nnever read\n"
    result = invoke("chat", "--system", "S", stdin=stdin)
    assert result.exit_code == 0
    assert "/reset" in result.stderr
    assert json.loads(file.read_text()) == {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "Hello world"},
        ]
    }
    assert said(script, 1) == [("system", "S"), ("user", "Two?")]
    assert said(script, 2)[-1] == ("user", "/slash")
    assert len(script.asked) == 3


@pytest.mark.parametrize("line", ["/nosuch", "/save", "/save /nowhere/at/all"])
def test_bad_commands_do_not_end_the_conversation(invoke, line) -> None:
    result = invoke("chat", stdin=f"{line}\nOne?\n")
    assert result.exit_code == 1  # a script that drives it can tell
    assert "error: " in result.stderr
    assert result.stdout == "Hello world\n"


def test_cancelled_answer_is_kept_and_marked(invoke, script, tmp_path) -> None:
    def press(number: int) -> None:
        if number == 3 and len(script.asked) == 1:
            raise KeyboardInterrupt

    script.before_piece = press
    result = invoke("chat", stdin=f"One?\nTwo?\n/save {tmp_path / 'f'}\n")
    assert result.exit_code == 0
    assert result.stdout == "Hello wor\nHello world\n"
    assert "cancelled" in result.stderr
    assert said(script, 1) == [("user", "One?"), ("assistant", "Hello wor"), ("user", "Two?")]
    messages = json.loads((tmp_path / "f").read_text())["messages"]
    assert messages[1] == {"role": "assistant", "content": "Hello wor", "cancelled": True}
    assert "cancelled" not in messages[3]


def test_answer_cancelled_before_its_first_token_leaves_no_trace(invoke, script) -> None:
    def press(_: int) -> None:
        if len(script.asked) == 1:
            raise KeyboardInterrupt

    script.before_piece = press
    result = invoke("chat", stdin="One?\nTwo?\n")
    assert said(script, 1) == [("user", "Two?")]
    assert "not kept" in result.stderr


def test_message_that_does_not_fit_is_not_added(invoke, script) -> None:
    def refuse(_: int) -> None:
        if len(script.asked) == 2:
            raise InvalidRequest("prompt", "The prompt has 99 tokens, but the context holds 64.")

    script.before_piece = refuse
    result = invoke("chat", stdin="One?\nfar too long\nThree?\n")
    assert result.exit_code == 1
    assert "error: The prompt has 99 tokens, but the context holds 64, or forget the conversation with /reset." in result.stderr
    assert said(script, 2) == [("user", "One?"), ("assistant", "Hello world"), ("user", "Three?")]


def test_json_lines(invoke, script) -> None:
    def refuse(_: int) -> None:
        if len(script.asked) == 2:
            raise InvalidRequest("prompt", "Too long.")

    script.before_piece = refuse
    result = invoke("chat", "--json", stdin="One?\nTwo?\nThree?\n")
    documents = [json.loads(line) for line in result.stdout.splitlines()]
    assert [d.get("text") for d in documents] == ["Hello world", None, "Hello world"]
    assert documents[1]["error"]["message"].startswith("Too long, or")
    assert documents[1]["error"]["field"] == "prompt"
    assert result.stderr == ""


def test_refused_before_anything_is_asked(invoke, script) -> None:
    assert "--n must be 1" in invoke("chat", "--n", "2").stderr
    script.has_chat_template = False
    result = invoke("chat", stdin="One?\n")
    assert result.exit_code == 1
    assert "no chat template" in result.stderr
    assert script.asked == []


def test_input_that_is_not_utf8(invoke) -> None:
    result = invoke("chat", stdin=b"One?\n\xff\n")
    assert result.exit_code == 1
    assert "not UTF-8" in result.stderr


@pytest.mark.parametrize("key", [EOFError, KeyboardInterrupt])
def test_ctrl_c_and_ctrl_d_at_the_prompt_leave(monkeypatch, key) -> None:
    def press(_: str) -> str:
        raise key

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(builtins, "input", press)
    assert read_line() is None


@pytest.mark.parametrize(
    ("reason", "tokens", "remark"),
    [("stop", 64, ""), ("length", 63, "cut off by --max-tokens"), ("length", 64, "/reset"), ("cancelled", 64, "cancelled")],
)
def test_remarks_on_answers_that_are_not_whole(reason, tokens, remark) -> None:
    receipt = SimpleNamespace(prompt_tokens=20, output_tokens=tokens - 20)
    said = why_cut(SimpleNamespace(finish_reason=FinishReason(reason), receipt=receipt), 64)
    assert remark in said
    assert bool(remark) == bool(said)


def test_first_message_too_long_has_no_conversation_to_forget(invoke, script) -> None:
    def refuse(_: int) -> None:
        raise InvalidRequest("prompt", "Too long.")

    script.before_piece = refuse
    assert "/reset" not in invoke("chat", stdin="One?\n").stderr
