"""/v1/responses over HTTP and with OpenAI's own client."""

from __future__ import annotations

import copy
import json
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from obole.server.pace import RECORD_BYTES

from .asking import answered, chat, refusal, user
from .puppets import open_speaking
from .test_tools import ARGUMENTS, CALL, tool
from .typed import sources, typed_events, typed_stream

PATH = "/v1/responses"
SAID = "Hello there, you"


def function(name: str = "weather", **more: Any) -> dict[str, Any]:
    """A tool as this API has it; not strict, so that the model writes calls as it likes."""
    return {"type": "function", **tool(name)["function"], "strict": False, **more}


def respond(client: httpx.Client, given: Any = "hi", **body: Any) -> dict[str, Any]:
    return answered(client.post(PATH, json={"input": given, **body}))


def stream(client: httpx.Client, given: Any = "hi", **body: Any) -> list[dict[str, Any]]:
    events = typed_stream(client, PATH, {"input": given, **body})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def text_of(document: dict[str, Any]) -> str:
    return "".join(part["text"] for item in document["output"] if item["type"] == "message" for part in item["content"])


def folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a reader makes of the events: the output items. Each `done` must agree with what came before it."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        item = items[event["output_index"]] if "output_index" in event and event["output_index"] < len(items) else None
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(copy.deepcopy(event["item"]))
        elif kind == "content_part.added":
            item["content"].append(copy.deepcopy(event["part"]))
        elif kind == "output_text.delta":
            item["content"][event["content_index"]]["text"] += event["delta"]
            item["content"][event["content_index"]]["logprobs"] += event["logprobs"]
        elif kind == "output_text.done":
            assert item["content"][event["content_index"]]["text"] == event["text"]
            item["content"][event["content_index"]]["logprobs"] = event["logprobs"]
        elif kind == "content_part.done":
            assert item["content"][event["content_index"]] == event["part"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (item["arguments"], item["name"]) == (event["arguments"], event["name"])
        elif kind == "output_item.done":
            item["status"] = event["item"]["status"]
            assert event["item"] == item
        if item is not None and "item_id" in event:
            assert event["item_id"] == item["id"]
    return items


def nameless(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what is another one each time."""
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def test_a_response_has_all_that_readers_expect(client):
    document = respond(client, temperature=0.5, seed=1, metadata={"a": "b"}, user="me", instructions="Be good.")
    assert document["id"].startswith("resp_")
    assert text_of(document) == SAID
    assert document["status"] == document["output"][0]["status"] == "completed"
    assert (document["object"], document["model"], document["error"]) == ("response", "puppet", None)
    assert (document["temperature"], document["metadata"], document["user"]) == (0.5, {"a": "b"}, "me")
    assert (document["instructions"], document["text"]["format"]) == ("Be good.", {"type": "text"})
    usage = document["usage"]
    assert usage["output_tokens"] == 4
    assert usage["total_tokens"] == usage["input_tokens"] + 4
    [receipt] = document["obole"]["receipts"]
    assert receipt["prompt_tokens"] == usage["input_tokens"]
    assert receipt["cached_tokens"] == usage["input_tokens_details"]["cached_tokens"]


def test_a_stream_tells_the_same_in_order(client):
    whole = respond(client)
    events = stream(client)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds == begin + ["output_text.delta"] * deltas + end
    assert events[0]["response"]["status"] == events[1]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    last = events[-1]["response"]
    assert last["output"] == folded(events)
    assert nameless(last["output"]) == nameless(whole["output"])
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == len(sources(events))
    assert last["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    own = {"id", "created_at", "completed_at", "output", "usage", "obole"}
    assert {k: v for k, v in last.items() if k not in own} == {k: v for k, v in whole.items() if k not in own}


def test_the_same_conversation_is_the_same_prompt_in_all_apis(serve_speaking):
    client = serve_speaking(CALL).client
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        {"role": "system", "content": "Be good.\n\nBe quick."},
        *user("hi"),
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        *user("and tomorrow?"),
    ]
    items = [
        {"role": "developer", "content": "Be quick."},
        {"role": "user", "content": [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sunny"}]},
        {"type": "message", "role": "user", "content": "and tomorrow?"},
    ]
    for tools, functions in ((None, None), ([tool(strict=False)], [function()])):
        plain = chat(client, messages=messages, tools=tools)["usage"]
        again = respond(client, items, instructions="Be good.", tools=functions)["usage"]
        assert again["input_tokens"] == plain["prompt_tokens"]
        assert again["input_tokens_details"]["cached_tokens"] >= plain["prompt_tokens"] - 16


def test_a_response_is_continued(client):
    first = respond(client, "one", instructions="Be good.")
    second = respond(client, "two", previous_response_id=first["id"])
    third = respond(client, [{"role": "user", "content": "three"}], previous_response_id=second["id"], instructions="Hm.")
    assert third["previous_response_id"] == second["id"]
    said = [{"role": "assistant", "content": SAID}]
    messages = [*user("one"), *said, *user("two"), *said, *user("three")]
    assert second["usage"]["input_tokens"] == chat(client, messages=messages[:3])["usage"]["prompt_tokens"]
    system = [{"role": "system", "content": "Hm."}]  # the instructions of one response are not those of the next
    assert third["usage"]["input_tokens"] == chat(client, messages=system + messages)["usage"]["prompt_tokens"]
    # what was continued may go
    client.delete(f"{PATH}/{first['id']}")
    client.delete(f"{PATH}/{second['id']}")
    fourth = respond(client, "four", previous_response_id=third["id"])
    messages += [*said, *user("four")]
    assert fourth["usage"]["input_tokens"] == chat(client, messages=messages)["usage"]["prompt_tokens"]


@pytest.mark.parametrize("before", [[], ["Let me see. "]])
def test_a_round_of_tools(serve_speaking, before):
    client = serve_speaking([*before, *CALL]).client
    first = respond(client, tools=[function()])
    assert text_of(first) == "".join(before)
    call = first["output"][-1]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", ARGUMENTS)
    assert (first["status"], call["status"]) == ("completed", "completed")
    events = stream(client, tools=[function()])
    assert folded(events) == events[-1]["response"]["output"]
    assert nameless(folded(events)) == nameless(first["output"])
    assert len(sources(events)) == first["usage"]["output_tokens"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    whole = [{"role": "user", "content": "hi"}, *first["output"], result]
    second = respond(client, [result], previous_response_id=first["id"], tools=[function()])
    assert respond(client, whole, tools=[function()])["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    error = refusal(client.post(PATH, json={"input": [{**result, "call_id": "c9"}], "previous_response_id": first["id"]}))
    assert error["param"] == "input[0].call_id"


def test_calls_that_are_asked_for(client):
    for choice in ("required", {"type": "function", "name": "weather"}):
        body = {"tools": [function()], "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 300}
        [call] = respond(client, **body)["output"]
        assert set(json.loads(call["arguments"])) == {"city", "days"}
        assert nameless(folded(stream(client, **body))) == nameless([call])


def test_tools_are_strict_where_they_can_be(client):
    def strict(*tools):
        return [one["strict"] for one in respond(client, tools=list(tools))["tools"]]

    loose = {"type": "object", "properties": {"x": {"not": {"const": 1}}}}
    open_, other = function(strict=None), function("other", strict=None)
    assert strict(open_, other) == [True, True]
    assert strict(open_, function("odd", parameters=loose, strict=None)) == [False, False]
    assert strict(open_, function("free")) == [False, False]
    assert (
        refusal(client.post(PATH, json={"input": "hi", "tools": [function(parameters=loose, strict=True)]}))["param"] == "tools"
    )


def test_answers_that_are_cut_short(serve_speaking):
    client = serve_speaking(["Look. ", *CALL]).client
    for most in range(1, 7):
        document = respond(client, tools=[function()], max_output_tokens=most)
        assert document["status"] == document["output"][-1]["status"] == "incomplete"
        assert document["incomplete_details"] == {"reason": "max_output_tokens"}
        events = stream(client, tools=[function()], max_output_tokens=most)
        assert events[-1]["type"] == "response.incomplete"
        assert nameless(folded(events)) == nameless(document["output"])
    assert document["output"][0]["status"] == "completed"
    assert ARGUMENTS.startswith(document["output"][1]["arguments"])


def test_logprobs_are_those_of_chat_completions(client):
    plain = chat(client, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [item] = respond(client, **body)["output"]
    assert [one["token"] for one in item["content"][0]["logprobs"]] == [one["token"] for one in plain]
    events = stream(client, **body)
    assert folded(events)[0]["content"] == item["content"]
    assert all(event["logprobs"] for event in events if event["type"] == "response.output_text.delta")
    assert respond(client)["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize(
    ("format", "check"),
    [
        (
            {"type": "json_schema", "name": "x", "schema": {"const": "hey"}, "strict": True},
            lambda text: json.loads(text) == "hey",
        ),
        ({"type": "json_object"}, lambda text: text.startswith("{")),
        ({"type": "regex", "regex": "(ab){3}"}, lambda text: text == "ababab"),
        ({"type": "text"}, lambda text: text == SAID),
    ],
)
def test_formats(client, format, check):
    document = respond(client, text={"format": format}, max_output_tokens=50)
    assert check(text_of(document))
    assert document["text"]["format"]["type"] == format["type"]


UNSUPPORTED = [
    ("background", True),
    ("conversation", "conv_1"),
    ("context_management", [{"type": "compaction"}]),
    ("include", ["web_search_call.results"]),
    ("max_tool_calls", 3),
    ("moderation", {"model": "x"}),
    ("prompt", {"id": "pmpt_1"}),
    ("reasoning", {"effort": "high"}),
    ("reasoning", {"summary": "auto"}),
    ("service_tier", "flex"),
    ("text", {"verbosity": "low"}),
    ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}),
    ("tool_choice", {"type": "web_search_preview"}),
    ("tools", [{"type": "web_search"}]),
    ("tools", [{"type": "mcp", "server_label": "x", "server_url": "y"}]),
    ("top_logprobs", 2),
    ("truncation", "auto"),
    ("stream_options", {"include_obfuscation": False}),
    ("n", 2),
    ("max_tokens", 2),
    ("no_such_field", 1),
    ("input", None),
    ("input", []),
    ("input", 3),
    ("input", [{"role": "user"}]),
    ("input", [{"role": "tool", "content": "x"}]),
    ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
    ("input", [{"type": "reasoning", "id": "r", "summary": []}]),
    ("input", [{"type": "item_reference", "id": "x"}]),
    ("input", ["hi"]),
    ("max_output_tokens", 0),
    ("max_output_tokens", 10**9),
    ("stop", ["x"] * 17),
    ("prompt_cache_retention", "24h"),
    ("text", {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strnig"}}}),
    ("text", {"format": {"type": "json_schema", "schema": {}}}),
]


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED, ids=[f"{name}-{n}" for n, (name, _) in enumerate(UNSUPPORTED)])
def test_what_is_not_supported_is_refused_by_name(client, field, value):
    for more in ({}, {"stream": True}) if field != "stream_options" else ({},):
        error = refusal(client.post(PATH, json={"input": "hi", field: value, **more}))
        assert error["param"].split("[")[0].split(".")[0] == field
        assert error["message"]


def test_obfuscation_is_refused_where_it_is_asked_for(client):
    body = {"input": "hi", "stream": True, "stream_options": {"include_obfuscation": True}}
    assert refusal(client.post(PATH, json=body))["param"] == "stream_options.include_obfuscation"
    assert stream(client, stream_options={"include_obfuscation": False})


def test_what_asks_for_nothing_is_no_reason_to_refuse(client):
    nothing = dict.fromkeys(["conversation", "prompt", "tools", "tool_choice", "reasoning", "text", "user", "include", "stop"])
    more = {"background": False, "truncation": "disabled", "include": ["reasoning.encrypted_content"], "max_tool_calls": None}
    hints = {"prompt_cache_key": "k", "safety_identifier": "s", "service_tier": "auto", "reasoning": {"effort": None}}
    assert text_of(respond(client, **{**nothing, **more, **hints})) == SAID


def test_extensions(client):
    assert text_of(respond(client, stop=" there")) == "Hello"
    assert text_of(respond(client, seed=3, top_k=1, min_p=0.1, temperature=1.0, speculate="off")) == SAID
    predicted = respond(client, prediction={"type": "content", "content": SAID}, speculate="prediction")
    assert predicted["usage"]["output_tokens_details"]["rejected_prediction_tokens"] >= 0
    assert respond(client, timeout=0.0)["obole"]["timed_out"] is True


def test_a_paced_stream(client):
    body = {"input": "hi", "stream": True, "pace": 200}
    raw = client.post(PATH, json=body).content
    assert len(raw) % RECORD_BYTES == 0
    assert text_of(typed_events(raw)[-1]["response"]) == SAID
    assert refusal(client.post(PATH, json={**body, "stream": False}))["param"] == "pace"


# -- OpenAI's client ------------------------------------------------------------------------------------------------------


@pytest.fixture
def api(plain) -> openai.OpenAI:
    with openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0) as client:
        yield client


class Trip(BaseModel):
    city: Literal["Paris", "Lima"]
    days: int


def test_the_client_reads_responses_and_streams(api):
    first = api.responses.create(model="puppet", input="hi")
    assert first.output_text == SAID
    assert api.responses.retrieve(first.id) == first
    with api.responses.stream(model="puppet", input="more", previous_response_id=first.id) as events:
        pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert "".join(pieces) == final.output_text == SAID
    assert api.responses.retrieve(final.id).usage == final.usage
    api.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(first.id)
    parsed = api.responses.parse(model="puppet", input="hi", text_format=Trip, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Trip)


def test_the_client_makes_a_round_of_tools(tmp_path, serve_engine):
    served = serve_engine(open_speaking(tmp_path, CALL))
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as api:
        given: list[Any] = [{"role": "user", "content": "hi"}]
        first = api.responses.create(model="puppet", input=given, tools=[function()], store=False)
        given += first.output
        given.append({"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sunny"})
        second = api.responses.create(model="puppet", input=given, tools=[function()], store=False)
        assert second.usage.input_tokens > first.usage.input_tokens
        with api.responses.stream(model="puppet", input="hi", tools=[function()]) as events:
            assert events.get_final_response().output[0].arguments == ARGUMENTS


def test_the_client_knows_its_errors(api):
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(model="puppet", input="hi", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        api.responses.create(model="puppet", input="hi", previous_response_id="resp_0")
    assert missing.value.code == "previous_response_not_found"
