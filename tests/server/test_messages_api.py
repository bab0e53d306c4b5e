"""/v1/messages and /v1/messages/count_tokens over HTTP and with Anthropic's own client."""

from __future__ import annotations

import copy
import json
from typing import Any

import anthropic
import httpx
import pytest

from obole.engine.runner import Runner
from obole.server.pace import RECORD_BYTES

from .asking import answered, chat, strict, user
from .puppets import open_speaking
from .test_tools import ARGUMENTS, CALL
from .test_tools import tool as chat_tool
from .typed import sources, typed_events, typed_stream

PATH = "/v1/messages"
SAID = "Hello there, you"


def tool(name: str = "weather", **more: Any) -> dict[str, Any]:
    """A tool as this API has it."""
    function = chat_tool(name)["function"]
    return {"name": name, "description": function["description"], "input_schema": function["parameters"], **more}


def full(body: dict[str, Any]) -> dict[str, Any]:
    return {"messages": user(), "max_tokens": 300, **body}


def message(client: httpx.Client, **body: Any) -> dict[str, Any]:
    return answered(client.post(PATH, json=full(body)))


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    return typed_stream(client, PATH, full(body))


def count(client: httpx.Client, **body: Any) -> int:
    body = {key: value for key, value in full(body).items() if key != "max_tokens"}
    return answered(client.post(f"{PATH}/count_tokens", json=body))["input_tokens"]


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a response in Anthropic's form."""
    assert response.status_code == status, (response.status_code, response.text)
    document = strict(response.content)
    assert list(document) == ["type", "error"]
    assert document["type"] == "error"
    assert set(document["error"]) == {"type", "message"}
    return document["error"]


def text_of(document: dict[str, Any]) -> str:
    return "".join(block["text"] for block in document["content"] if block["type"] == "text")


def prompt_tokens(document: dict[str, Any]) -> int:
    usage = document["usage"]
    return usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]


def folded(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """What a reader makes of the events: each block, and what its deltas were."""
    blocks: list[tuple[dict[str, Any], str]] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert (is_open, event["index"]) == (False, len(blocks))
            blocks.append((copy.deepcopy(event["content_block"]), ""))
            is_open = True
        elif event["type"] == "content_block_delta":
            assert (is_open, event["index"]) == (True, len(blocks) - 1)
            block, raw = blocks.pop()
            delta = event["delta"]
            kind = {"text": "text_delta", "tool_use": "input_json_delta"}[block["type"]]
            assert delta["type"] == kind
            blocks.append((block, raw + (delta["text"] if kind == "text_delta" else delta["partial_json"])))
        elif event["type"] == "content_block_stop":
            assert (is_open, event["index"]) == (True, len(blocks) - 1)
            is_open = False
            block, raw = blocks[-1]
            if block["type"] == "text":
                block["text"] = raw
            else:
                try:
                    block["input"] = json.loads(raw)
                except ValueError:
                    block["input"] = None
    assert not is_open
    return blocks


def nameless(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in block.items() if key != "id"} for block in blocks]


def test_an_answer(client):
    document = message(client)
    assert document["id"].startswith("msg_")
    assert (document["type"], document["role"], document["model"]) == ("message", "assistant", "puppet")
    assert document["content"] == [{"type": "text", "text": SAID}]
    assert (document["stop_reason"], document["stop_sequence"]) == ("end_turn", None)
    again = message(client)
    plain = chat(client)["usage"]
    assert prompt_tokens(document) == prompt_tokens(again) == plain["prompt_tokens"] == count(client)
    assert again["usage"]["cache_read_input_tokens"] == plain["prompt_tokens_details"]["cached_tokens"] > 0
    assert again["usage"]["output_tokens"] == plain["completion_tokens"]
    [receipt] = again["obole"]["receipts"]
    assert receipt["computed_tokens"] == again["usage"]["input_tokens"]


def test_a_stream_tells_the_same_in_order(client):
    message(client)
    whole = message(client)
    events = stream(client)
    kinds = [event["type"] for event in events]
    deltas = ["content_block_delta"] * kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        *deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    begin, end = events[0]["message"], events[-2]
    assert (begin["content"], begin["stop_reason"], begin["usage"]["output_tokens"]) == ([], None, 0)
    assert begin["usage"]["input_tokens"] == prompt_tokens(whole)
    assert [block for block, _ in folded(events)] == whole["content"]
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"] == whole["usage"]
    assert len(sources(events)) == whole["usage"]["output_tokens"]
    assert end["obole"]["receipts"][0]["output_tokens"] == 4


def test_the_same_conversation_is_the_same_prompt_in_both_apis(client):
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    plain = [
        {"role": "system", "content": "Be good."},
        *user("hi"),
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "Error: rain", "tool_call_id": "t1"},
        *user("and tomorrow?"),
    ]
    here = [
        {"role": "user", "content": [{"type": "text", "text": "h", "cache_control": {"type": "ephemeral"}}, text("i")]},
        {"role": "assistant", "content": [text("Let me "), text("see."), use("t1")]},
        {"role": "user", "content": [{**result("t1", [text("rain")]), "is_error": True}, text("and tomorrow?")]},
    ]
    for tools, own in ((None, None), ([chat_tool()], [tool()])):
        expected = chat(client, messages=plain, tools=tools)["usage"]["prompt_tokens"]
        for system in ("Be good.", [text("Be "), {**text("good."), "cache_control": {"type": "ephemeral", "ttl": "1h"}}]):
            assert prompt_tokens(message(client, messages=here, system=system, tools=own)) == expected
            assert count(client, messages=here, system=system, tools=own) == expected
    spoken = [{"role": "system", "content": "Be good."}, *here]
    assert count(client, messages=spoken) == count(client, messages=here, system="Be good.")


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def use(name: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": "weather", "input": json.loads(ARGUMENTS)}


def result(name: str, content: Any = "sunny") -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": name, "content": content}


@pytest.mark.parametrize("before", [[], ["Let me see. "]])
def test_a_round_of_tools(serve_speaking, before):
    client = serve_speaking([*before, *CALL]).client
    first = message(client, tools=[tool()])
    assert first["stop_reason"] == "tool_use"
    assert text_of(first) == "".join(before)
    called = first["content"][-1]
    assert called["id"].startswith("toolu_")
    assert (called["name"], called["input"]) == ("weather", json.loads(ARGUMENTS))
    events = stream(client, tools=[tool()])
    assert nameless([block for block, _ in folded(events)]) == nameless(first["content"])
    assert folded(events)[-1][1] == ARGUMENTS
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert len(sources(events)) == first["usage"]["output_tokens"]
    turns = [*user(), {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result(called["id"])]}]
    assert prompt_tokens(message(client, messages=turns, tools=[tool()])) > prompt_tokens(first)
    turns[-1]["content"][0]["tool_use_id"] = "toolu_0"
    assert "tool_use_id" in refusal(client.post(PATH, json=full({"messages": turns})))["message"]


def test_calls_that_are_asked_for_or_not_wanted(serve_speaking):
    client = serve_speaking(CALL).client
    for choice in (
        {"type": "any", "disable_parallel_tool_use": True},
        {"type": "tool", "name": "b", "disable_parallel_tool_use": True},
    ):
        document = message(client, tools=[tool("a"), tool("b")], tool_choice=choice)
        [block] = document["content"]
        assert document["stop_reason"] == "tool_use"
        assert set(block["input"]) == {"city", "days"}
        assert block["name"] == "b" or choice["type"] == "any"
    unwanted = message(client, tools=[tool()], tool_choice={"type": "none"})
    assert (text_of(unwanted), unwanted["stop_reason"]) == ("".join(CALL), "end_turn")
    assert prompt_tokens(unwanted) == count(client) == count(client, tools=[tool()], tool_choice={"type": "none"})


def test_answers_that_are_cut_short(serve_speaking):
    client = serve_speaking(CALL).client
    for most in range(1, 7):
        document = message(client, tools=[tool()], max_tokens=most)
        assert document["stop_reason"] == "max_tokens"
        events = stream(client, tools=[tool()], max_tokens=most)
        assert events[-2]["delta"]["stop_reason"] == "max_tokens"
        for block, (read, raw) in zip(document["content"], folded(events), strict=True):
            if block["type"] == "text":  # the beginning of a marker
                assert block == read
            elif raw != ARGUMENTS:
                assert ARGUMENTS.startswith(raw)
                assert raw == document["obole"]["partial_inputs"][block["id"]]
                assert (block["input"], read["input"]) == ({}, None)
    assert "partial_inputs" not in message(client, tools=[tool()])["obole"]


@pytest.mark.parametrize(
    ("stops", "said", "found"),
    [
        ([" there"], "Hello", " there"),
        (["re, you and me", "re,"], "Hello the", "re,"),
        (["Hel", "Hello", "ello"], "", "Hel"),
        (["nothing"], SAID, None),
        (["you"], "Hello there, ", "you"),
        ([], SAID, None),
    ],
)
def test_stop_sequences(client, stops, said, found):
    document = message(client, stop_sequences=stops)
    assert text_of(document) == said
    assert (document["stop_reason"], document["stop_sequence"]) == ("stop_sequence" if found else "end_turn", found)
    events = stream(client, stop_sequences=stops)
    assert "".join(raw for _, raw in folded(events)) == said
    assert events[-2]["delta"] == {key: document[key] for key in ("stop_reason", "stop_sequence")}


def test_a_stop_sequence_among_markers_of_calls(serve_speaking):
    client = serve_speaking(["Look: ", "<tool_call>", "?? ", "end"]).client
    document = message(client, tools=[tool()], stop_sequences=["end"])
    assert (text_of(document), document["stop_sequence"]) == ("Look: <tool_call>?? ", "end")


def test_more_tokens_than_the_context_holds(client, plain):
    most = plain.server.engine.engine.max_context
    prompt = count(client)
    for asked in (most * 10, most, most - prompt + 1, most - prompt):
        assert message(client, max_tokens=asked)["stop_reason"] == "end_turn"
    long = user("x" * (most - prompt + 1))
    assert count(client, messages=long) == most - 1
    document = message(client, messages=long, max_tokens=most)
    assert document["stop_reason"] == "model_context_window_exceeded"
    assert document["usage"]["output_tokens"] == 1
    assert message(client, messages=long, max_tokens=1)["stop_reason"] == "max_tokens"
    assert "shorten the prompt" in refusal(client.post(PATH, json=full({"messages": user("x" * most)})))["message"]


def test_answers_as_data(client):
    schema = {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False}
    body = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    assert json.loads(text_of(message(client, **body))) == {"x": 1}
    bad = {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strnig"}}}}
    refusal(client.post(PATH, json=full(bad)))


def test_extensions(client):
    assert text_of(message(client, seed=3, top_k=1, min_p=0.1, temperature=1.0, speculate="off")) == SAID
    assert text_of(message(client, prediction={"type": "content", "content": SAID})) == SAID
    assert message(client, timeout=0.0)["obole"]["timed_out"] is True
    nothing = dict.fromkeys(["system", "tools", "tool_choice", "stop_sequences", "thinking", "metadata", "top_p", "container"])
    hints = {"thinking": {"type": "disabled"}, "metadata": {"user_id": "me"}, "service_tier": "auto"}
    assert text_of(message(client, **{**nothing, **hints}, cache_control={"type": "ephemeral"})) == SAID


def test_a_paced_stream(client):
    body = {**full({}), "stream": True, "pace": 200}
    raw = client.post(PATH, json=body).content
    assert len(raw) % RECORD_BYTES == 0
    assert [read for read, _ in folded(typed_events(raw))] == [text(SAID)]
    assert "pace" in refusal(client.post(PATH, json={**body, "stream": False}))["message"]


UNSUPPORTED = [
    ("max_tokens", None),
    ("max_tokens", 0),
    ("messages", []),
    ("messages", None),
    ("messages", [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}]),
    ("messages", [{"role": "tool", "content": "hi"}]),
    ("messages", [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]),
    ("messages", [{"role": "user", "content": [{"type": "document", "source": {}}]}]),
    ("messages", [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x", "signature": "y"}]}]),
    ("thinking", {"type": "enabled", "budget_tokens": 1024}),
    ("thinking", {"type": "adaptive"}),
    ("tools", [{"type": "web_search_20250305", "name": "web_search"}]),
    ("tools", [{"name": "x", "input_schema": {"type": "array"}}]),
    ("tools", [{"name": "a b", "input_schema": {}}]),
    ("tools", [{"name": "a", "input_schema": {}, "input_examples": [{}]}]),
    ("tool_choice", {"type": "any"}),
    ("tool_choice", {"type": "sometimes"}),
    ("output_config", {"effort": "high"}),
    ("container", "c"),
    ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
    ("mcp_servers", [{"type": "url", "url": "x", "name": "y"}]),
    ("speed", "fast"),
    ("inference_geo", "us"),
    ("service_tier", "priority"),
    ("stop_sequences", ["x"] * 17),
    ("stop_sequences", [""]),
    ("cache_control", {"type": "permanent"}),
    ("metadata", {"other": 1}),
    ("temperature", -1),
    ("n", 2),
    ("no_such_field", 1),
]


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED, ids=[f"{name}-{n}" for n, (name, _) in enumerate(UNSUPPORTED)])
def test_what_is_not_supported_is_refused_by_name(client, field, value):
    for more in ({}, {"stream": True}):
        error = refusal(client.post(PATH, json={**full({field: value}), **more}))
        assert error["type"] == "invalid_request_error"
        said = error["message"].replace("The last message", "messages")
        assert field in said


def test_errors_have_anthropics_types(serve_speaking, monkeypatch):
    served = serve_speaking(["one"], api_keys=("key",), body_bytes=1000)

    def ask(**more: Any) -> httpx.Response:
        body = full({"messages": user("x" * 1000)} if "long" in more else {"model": more.get("model")})
        headers = {} if "nobody" in more else {"x-api-key": "key", "anthropic-version": "2023-06-01"}
        return served.client.post(PATH, json=body, headers=headers)

    assert refusal(ask(nobody=True), 401)["type"] == "authentication_error"
    assert refusal(ask(model="no-such"), 404)["type"] == "not_found_error"
    assert refusal(ask(long=True), 413)["type"] == "request_too_large"
    assert text_of(answered(ask())) == "one"
    served.server.draining = True
    assert refusal(ask(), 503)["type"] == "overloaded_error"
    served.server.draining = False

    def fail(*_):
        raise MemoryError("no more")

    monkeypatch.setattr(Runner, "run", fail)
    assert refusal(ask(), 500)["type"] == "api_error"
    events = typed_stream(httpx.Client(base_url=served.url, headers={"x-api-key": "key"}), PATH, full({}))
    assert [event["type"] for event in events] == ["message_start", "ping", "error"]
    assert events[-1]["error"]["type"] == "api_error"


# -- Anthropic's client ---------------------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def api(plain) -> anthropic.Anthropic:
    with anthropic.Anthropic(base_url=plain.url, api_key="none", max_retries=0) as client:
        yield client


def test_the_client_reads_messages_and_streams(api):
    whole = api.messages.create(model="puppet", max_tokens=100, messages=HI)
    assert whole._request_id  # what users name when they report a problem
    assert (whole.content[0].text, whole.stop_reason) == (SAID, "end_turn")
    with api.messages.stream(model="puppet", max_tokens=100, messages=HI, stop_sequences=[", "]) as events:
        pieces = "".join(events.text_stream)
        final = events.get_final_message()
    assert pieces == final.content[0].text == "Hello there"
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", ", ")
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == (
        api.messages.count_tokens(model="puppet", messages=HI).input_tokens
    )


def test_the_client_makes_a_round_of_tools(tmp_path, serve_engine):
    served = serve_engine(open_speaking(tmp_path, CALL), api_keys=("key",))
    with anthropic.Anthropic(base_url=served.url, api_key="key") as api:
        asked: dict[str, Any] = {"model": "puppet", "max_tokens": 300, "tools": [tool()]}
        first = api.messages.create(messages=HI, **asked)
        with api.messages.stream(messages=HI, **asked) as events:
            streamed = events.get_final_message()
        assert streamed.content[0].input == first.content[0].input == json.loads(ARGUMENTS)
        for answer in (first, streamed):
            turns = [*HI, {"role": "assistant", "content": answer.content}]
            turns.append({"role": "user", "content": [result(answer.content[0].id)]})
            again = api.messages.create(messages=turns, **asked)
            assert again.usage.input_tokens + again.usage.cache_read_input_tokens > first.usage.input_tokens
        with api.messages.stream(messages=HI, model="puppet", max_tokens=4, tools=[tool()]) as events:
            assert events.get_final_message().content[0].input == {"city": "Lima"}
    stranger = anthropic.Anthropic(base_url=served.url, api_key="another", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(messages=HI, **asked)


def test_the_client_knows_its_errors(api):
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        api.messages.create(model="puppet", max_tokens=10, messages=HI, extra_body={"temperature": -1})
    with pytest.raises(anthropic.NotFoundError):
        api.messages.create(model="no-such", max_tokens=10, messages=HI)
