"""What requests can say about the cache: hold a prompt, in each API, and delete everything of one's own."""

from __future__ import annotations

import msgspec
import pytest

from obole.server.anthropic_convert import chat_messages
from obole.server.anthropic_shapes import CountRequest
from obole.server.chat import ChatRequest
from obole.server.conversation import without_marks
from obole.server.responses_convert import input_messages
from obole.server.responses_shapes import ResponsesRequest

from .asking import CHAT, answered, refusal, user
from .puppets import open_speaking
from .test_tenants import PROMPT, bearer

MARK = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def holds(messages):
    plain, hold = without_marks(messages)
    assert all("cache_control" not in message for message in plain)
    assert len(plain) == len(messages)
    return hold.get("hold_messages"), hold.get("hold_seconds")


def text(words, **more):
    return {"type": "text", "text": words, **more}


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "user", "content": "a"}], (None, None)),
        ([{"role": "system", "content": "a", **MARK}, {"role": "user", "content": "b"}], (1, 300.0)),
        ([{"role": "user", "content": [text("a"), text("b", **HOUR)]}, {"role": "user", "content": "c"}], (1, 3600.0)),
        ([{"role": "user", "content": "a", **HOUR}, {"role": "assistant", "content": "b", **MARK}], (2, 3600.0)),
        ([{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "tool_call_id": "c", **MARK}], (2, 300.0)),
    ],
)
def test_marks_in_chat_completions(messages, expected):
    request = msgspec.convert({"messages": messages}, ChatRequest)
    assert holds([message.plain() for message in request.messages]) == expected


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ({"messages": [{"role": "user", "content": "a"}]}, (None, None)),
        ({"messages": [{"role": "user", "content": "a"}], **HOUR}, (1, 3600.0)),
        ({"system": [text("s", **MARK)], "messages": [{"role": "user", "content": "a"}]}, (1, 300.0)),
        (
            {"system": "s", "messages": [{"role": "user", "content": [text("a", **MARK)]}, {"role": "user", "content": "b"}]},
            (2, 300.0),
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}, **MARK}]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [text("r", **HOUR)]}]},
                    {"role": "user", "content": "b"},
                ]
            },
            (3, 3600.0),
        ),
        (
            {
                "tools": [{"name": "f", "input_schema": {"type": "object"}, **MARK}],
                "system": "s",
                "messages": [{"role": "user", "content": "a"}],
            },
            (1, 300.0),
        ),
    ],
)
def test_marks_in_messages(request_, expected):
    assert holds(chat_messages(msgspec.convert(request_, CountRequest))) == expected


def test_marks_in_responses():
    items = [{"type": "message", "role": "user", "content": "a", **MARK}, {"type": "message", "role": "user", "content": "b"}]
    assert holds(input_messages(msgspec.convert({"input": items}, ResponsesRequest).input, [])) == (1, 300.0)


@pytest.fixture
def keyed(tmp_path, serve_engine):
    file = tmp_path / "keys"
    file.write_text("anna sk-anna\n")
    return serve_engine(open_speaking(tmp_path, ["one"]), api_keys=("sk-first",), key_file=file)


def test_a_prompt_is_held_up_to_the_mark(keyed):
    client = keyed.client
    words = PROMPT[-1]["content"]
    messages = [{"role": "system", "content": words, **MARK}, {"role": "user", "content": words}]
    response = client.post(CHAT, json={"messages": messages}, headers=bearer("sk-anna"))
    (receipt,) = response.json()["obole"]["receipts"]
    assert 16 <= receipt["held_tokens"] <= receipt["prompt_tokens"] // 2
    assert receipt["held_tokens"] % 16 == 0
    assert receipt["cached_by_tier"] == {"device": 0, "ram": 0, "ssd": 0}
    whole = [{"role": "user", "content": words, **HOUR}]
    response = client.post(CHAT, json={"messages": whole}, headers=bearer("sk-anna"))
    (receipt,) = response.json()["obole"]["receipts"]
    assert receipt["held_tokens"] == receipt["prompt_tokens"] // 16 * 16
    wrong = client.post(
        CHAT, json={"messages": [{**whole[0], "cache_control": {"type": "forever"}}]}, headers=bearer("sk-anna")
    )
    assert "cache_control" in refusal(wrong, 400)["message"]


def test_everything_of_ones_own_is_deleted(keyed):
    client = keyed.client

    def cached(key):
        body = client.post(CHAT, json={"messages": PROMPT}, headers=bearer(key)).json()
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    for key in ("sk-anna", "sk-first"):
        assert cached(key) == 0
        assert cached(key) > 16
    gone = client.delete("/v1/cache", headers=bearer("sk-anna"))
    assert gone.status_code == 200
    assert gone.json()["device_blocks"] > 1
    assert gone.json()["tier_blocks"] == 0
    assert cached("sk-anna") == 0
    assert cached("sk-first") > 16
    refusal(client.delete("/v1/cache"), 401)
    assert answered(client.post(CHAT, json={"messages": user()}, headers=bearer("sk-anna")))
