"""Logs and traces in all their shapes, and what is none of them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from obole.economics import reading
from obole.economics.formats import records
from obole.economics.reading import Line, lines
from obole.economics.records import Blocks, Reply, Text
from obole.errors import InvalidRequest

ASKED = [{"role": "user", "content": "Hi"}]
SAID = {"choices": [{"message": {"content": "Yes"}}]}
ITEMS = [{"type": "output_text", "text": "Yes"}]
CALLED = '{"name": "f", "arguments": {"a": 1}}'
NAMES = ("messages", "prompt", "response", "choices", "message", "content", "role", "text", "output", "usage", "body", "type")
CALL = {"function": {"name": "f", "arguments": '{"a": 1}'}}


def read(*texts: str | bytes | dict, skip: list[str] | None = None) -> list:
    """The records of a file with these lines."""
    raw = [json.dumps(t).encode() if isinstance(t, dict) else t.encode() if isinstance(t, str) else t for t in texts]
    return [record for _, record in records((Line("log", i, text) for i, text in enumerate(raw, 1)), skip)]


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ({"messages": ASKED, "response": "Yes"}, "Yes"),
        ({"messages": ASKED, "completion": "Yes"}, "Yes"),
        ({"messages": ASKED, "choices": [{"message": {"role": "assistant", "content": "Yes"}}]}, "Yes"),
        ({"request": {"messages": ASKED}, "response": {"choices": [{"message": {"content": "Yes"}}]}}, "Yes"),
        ({"request": {"body": {"messages": ASKED}}, "response": {"body": SAID}}, "Yes"),
        ({"body": {"messages": ASKED}, "response": {"status_code": 200, "body": {"choices": [{"text": "Yes"}]}}}, "Yes"),
        ({"input": {"messages": ASKED}, "output": {"choices": [{"message": {"content": "Yes"}}]}}, "Yes"),
        ({"input": ASKED, "model": "m", "output": [{"type": "message", "content": ITEMS}]}, "Yes"),
        ({"messages": ASKED, "response": {"content": [{"type": "text", "text": "Yes"}]}}, "Yes"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "Yes"}]}, "Yes"),
        ({"messages": ASKED, "response": {"choices": [{"message": {"content": None, "tool_calls": [CALL]}}]}}, CALLED),
        ({"messages": ASKED}, None),
        ({"messages": ASKED, "response": {"error": {"message": "no"}}}, None),
    ],
)  # fmt: skip
def test_chats(line, answer):
    [record] = read(line)
    assert record.prompt == [{"role": "user", "content": "Hi"}]
    assert record.answer == answer


def test_what_else_a_line_says():
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    content = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, "b"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "developer", "content": "S"}, {"role": "user", "content": content}]
    [record] = read(
        {"request": {"messages": messages, "user": "anna", "tools": tools}, "response": {"choices": [], "usage": usage}}
    )
    assert record == Text(
        prompt=[{"role": "system", "content": "S"}, {"role": "user", "content": "a<image_url>b"}],
        tools=tools,
        tenant="anna",
        input_tokens=9,
        output_tokens=2,
        cached_tokens=4,
    )
    assert [r.prompt for r in read({"prompt": "x"}, {"prompt": ["y"]}, {"prompt": [[1, 2]]}, {"prompt": [3]})] == [
        "x",
        "y",
        [1, 2],
        [3],
    ]
    [anthropic] = read(
        {"request": {"system": "S", "messages": ASKED}, "response": {"content": [{"type": "text", "text": "Y"}]}}
    )
    assert anthropic.prompt[0] == {"role": "system", "content": "S"}


def test_batches_and_the_servers_own_log():
    [request] = read({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ASKED}})
    assert (request.key, request.answer) == ("1", None)
    body = {"choices": [{"message": {"content": "Yes"}}]}
    found = read(
        {"custom_id": "1", "response": {"status_code": 200, "body": body}, "error": None},
        {"custom_id": "2", "response": None, "error": {"code": "x"}},
    )
    assert found == [Reply("1", "Yes")]
    own = read(
        {"time": "t", "level": "info", "message": "serves"},
        {"time": "t", "level": "info", "request": "r", "tenant": "a", "prompt": [ASKED, "text", [1, 2]]},
        {"time": "t", "level": "info", "request": "r"},
    )
    assert [(r.prompt, r.tenant) for r in own] == [(ASKED, "a"), ("text", "a"), ([1, 2], "a")]


def test_traces():
    mooncake = {"timestamp": 1500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 7, 8]}
    first, second = read(mooncake, {**mooncake, "hash_ids": [0, 7, 9]})
    assert (first.input_tokens, first.output_tokens, first.at, first.block_tokens) == (1100, 5, 1.5, 512)
    assert first.keys[:2] == second.keys[:2]
    assert first.keys[2] != second.keys[2]
    assert len({key & 0xFFFFFF for key in first.keys}) == 3  # well mixed
    assert (
        read("TIMESTAMP,ContextTokens,GeneratedTokens\r\n", "2023-11-16 18:17:03.9799600,4808,10\r\n")[0].input_tokens == 4808
    )
    one = {"t": 0.0, "in": 130, "out": 7, "hash_ids": [1, 2]}
    session = {
        "id": "s",
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": [one, {"type": "subagent", "requests": [one]}, {"x": 1}],
    }
    found = read(session)
    assert [r.input_tokens for r in found] == [130, 130]
    [other] = read({**session, "id": "other", "requests": [one]})
    assert not set(other.keys) & set(found[0].keys)
    assert (
        read({**session, "hash_id_scope": "global"})[0].keys == read({**session, "id": "b", "hash_id_scope": "global"})[0].keys
    )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["{}"], "Line 1 of log is nothing that is known here"),
        (['{"a": 1}'], "nothing that is known"),
        (["[1]"], "begins a JSON array"),
        (["[\n"], "begins a JSON array"),
        (["hello"], "no whole JSON value"),
        (['{"messages":'], "no whole JSON value"),
        (["5"], "no JSON object"),
        ([b"\xff\xfe{}"], "not UTF-8"),
        (["[" * 100_000], "JSON array"),
        (['{"a":' * 100_000], "no whole JSON value"),
        ([{"messages": ASKED}, '{"messages": [{"role"'], "Line 2 of log is no whole JSON value"),
        ([{"messages": ASKED}, {"text": 1}], "Line 2 of log has neither messages nor a prompt"),
        ([{"messages": [{"content": "x"}]}], "messages without a role"),
        ([{"messages": []}], "is empty"),
        ([{"prompt": 5}], "no text"),
        ([{"timestamp": 0, "input_length": "x", "hash_ids": []}], "no record of a Mooncake trace"),
        ([{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}], "more than blocks"),
        ([{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}], "no record of a Mooncake"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "x,1,2"], "Line 2 of log is not a time and two numbers"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03,-1,2"], "Line 2"),
        ([{"block_size": 64, "requests": [{"in": 5}]}], "no session of agents"),
        ([{"block_size": 64, "requests": 5}], "no session of agents"),
        ([{"custom_id": "1", "body": 5}], "no object under body"),
        (["a,b\n1,2"], "no whole JSON value"),
    ],
)  # fmt: skip
def test_foreign_and_damaged_lines_are_named(texts, message):
    with pytest.raises(InvalidRequest, match=message):
        read(*texts)


def test_damaged_lines_can_be_skipped_but_no_foreign_file():
    skipped: list[str] = []
    assert len(read({"messages": ASKED}, "{", {"messages": ASKED}, skip=skipped)) == 2
    assert skipped == ["Line 2 of log is no whole JSON value: write one object a line."]
    with pytest.raises(InvalidRequest):
        read("{", {"messages": ASKED}, skip=[])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(
    st.dictionaries(
        st.sampled_from(("messages", "prompt", "response", "choices", "request", "usage", "output")), values, max_size=4
    )
)
def test_nothing_but_a_refusal_comes_of_nonsense(document):
    try:
        found = read(document)
    except InvalidRequest:
        return
    assert all(isinstance(one, Text | Blocks | Reply) for one in found)
    assert all(one.answer is None or isinstance(one.answer, str) for one in found)


# -- files --------------------------------------------------------------------------------------------------------------------

BODY = b'{"a": 1}\n\n{"b": 2}\n'


def tar(*members: tuple[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return made.getvalue()


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, bz2.compress, lzma.compress, lambda body: gzip.compress(body[:5]) + gzip.compress(body[5:])]
)
def test_files_plain_and_compressed(tmp_path, pack):
    path = tmp_path / "log"
    path.write_bytes(pack(BODY))
    seen: list[int] = []
    assert [(line.number, line.text) for line in lines(path, seen.append)] == [(1, b'{"a": 1}\n'), (3, b'{"b": 2}\n')]
    assert 0 < seen[-1] <= path.stat().st_size


def test_archives(tmp_path):
    path = tmp_path / "log.tar.gz"
    path.write_bytes(tar(("x/one", BODY), ("x/._one", b"\x00"), ("x/two", b"z")))
    assert [(Path(line.file).name, line.number) for line in lines(path)] == [("one", 1), ("one", 3), ("two", 1)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(BODY * 9000)[:-400], "damaged"),
        (gzip.compress(BODY)[:12] + b"xxxx" + gzip.compress(BODY)[16:], "damaged"),
        (lzma.compress(BODY)[:-20], "damaged"),
        (tar(("one", BODY * 9000))[:-300], "damaged"),
        (b"PK\x03\x04xxxx", "zip archive"),
        (b"\x28\xb5\x2f\xfdxxxx", "zstd"),
        (b"PAR1xxxx", "Parquet"),
    ],
)
def test_files_that_are_damaged_or_foreign(tmp_path, data, message):
    path = tmp_path / "log"
    path.write_bytes(data)
    with pytest.raises(InvalidRequest, match=message):
        list(lines(path))


def test_a_line_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST_LINE", 1000)
    path = tmp_path / "log"
    path.write_bytes(b"{}\n" + b"x" * 5000)
    with pytest.raises(InvalidRequest, match="Line 2 of"):
        list(lines(path))
    with pytest.raises(InvalidRequest, match="cannot be read"):
        list(lines(tmp_path))
    (tmp_path / "empty").touch()
    assert list(lines(tmp_path / "empty")) == []
