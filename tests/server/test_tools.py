"""Tools over chat completions: calls in text that is free, and calls that are asked for."""

from __future__ import annotations

import json

import pytest

from .asking import CHAT, answered, chat, reasons, refusal, said, streamed, user

CALL = ["<tool_call>\n", '{"name": "weather", ', '"arguments": {"city": ', '"Lima"', ', "days": 3', "}}", "\n</tool_call>"]
ARGUMENTS = '{"city": "Lima", "days": 3}'


def tool(name: str = "weather", **more) -> dict:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
    }
    return {"type": "function", "function": {"name": name, "description": "Forecast.", "parameters": parameters, **more}}


def calls_of(chunks) -> list[dict]:
    """What a client makes of the pieces of calls."""
    found: list[dict] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            for piece in choice["delta"].get("tool_calls", []):
                if piece["index"] == len(found):
                    assert piece["type"] == "function"
                    found.append({"id": piece["id"], "name": piece["function"]["name"], "arguments": ""})
                else:
                    assert piece["index"] == len(found) - 1
                    assert set(piece) == {"index", "function"}
                found[-1]["arguments"] += piece["function"]["arguments"]
    return found


@pytest.mark.parametrize("before", [[], ["Let me see. "]])
def test_a_call_that_the_model_writes(serve_speaking, before):
    client = serve_speaking([*before, *CALL]).client
    document = chat(client, tools=[tool()])
    [choice] = document["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == ("".join(before) or None)
    [call] = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert (call["type"], call["function"]) == ("function", {"name": "weather", "arguments": ARGUMENTS})
    chunks = streamed(client, CHAT, tools=[tool()])
    assert said(chunks) == "".join(before)
    assert reasons(chunks) == ["tool_calls"]
    [streamed_call] = calls_of(chunks)
    assert (streamed_call["name"], streamed_call["arguments"]) == ("weather", ARGUMENTS)
    assert chunks[-1]["usage"]["completion_tokens"] == document["usage"]["completion_tokens"]
    assert sum(len(c["obole"].get("sources", [])) for c in chunks) == document["usage"]["completion_tokens"]
    # the same text is only text where there are no tools, or other ones, or none may be called
    for more in ({}, {"tools": [tool("other")]}, {"tools": [tool()], "tool_choice": "none"}):
        [choice] = chat(client, **more)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("".join([*before, *CALL]), "stop")
        assert "tool_calls" not in choice["message"]


def test_tools_that_may_not_be_called_are_not_shown(client):
    shown = answered(client.post("/tokenize", json={"messages": user(), "tools": [tool()]}))["count"]
    bare = answered(client.post("/tokenize", json={"messages": user()}))["count"]
    assert chat(client, tools=[tool()])["usage"]["prompt_tokens"] == shown > bare
    assert chat(client, tools=[tool()], tool_choice="none")["usage"]["prompt_tokens"] == bare
    assert chat(client, tools=[])["usage"]["prompt_tokens"] == bare


def test_a_call_that_is_cut_short(serve_speaking):
    client = serve_speaking(CALL).client
    for most in range(2, 7):
        [choice] = chat(client, tools=[tool()], max_tokens=most)["choices"]
        assert choice["finish_reason"] == "length"
        chunks = streamed(client, CHAT, tools=[tool()], max_tokens=most)
        assert reasons(chunks) == ["length"]
        whole = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", [])]
        assert [call["arguments"] for call in calls_of(chunks)] == whole
        assert all(ARGUMENTS.startswith(arguments) for arguments in whole)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_calls_that_are_asked_for(client, choice):
    """The model wants to say "Hello there, you"."""
    for tools in ([tool()], [tool(), tool("other")]):
        document = chat(client, tools=tools, tool_choice=choice, max_tokens=300, parallel_tool_calls=False)
        [answer] = document["choices"]
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["content"] is None
        [call] = answer["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert len(arguments["city"]) <= 5
        assert arguments["days"] in range(1, 10)
        if choice != "required":
            assert call["function"]["name"] == "weather"
        chunks = streamed(client, CHAT, tools=tools, tool_choice=choice, max_tokens=300, parallel_tool_calls=False)
        assert [(c["name"], c["arguments"]) for c in calls_of(chunks)] == [tuple(call["function"].values())]
        assert said(chunks) == ""


@pytest.mark.parametrize("stream", [False, True])
def test_only_one_call_where_only_one_may_be(serve_speaking, stream):
    second = ['\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 1}}', "\n</tool_call> "]
    client = serve_speaking([*CALL, *second]).client
    for parallel, count in ((None, 2), (True, 2), (False, 1)):
        fields = {"tools": [tool()], "parallel_tool_calls": parallel}
        if stream:
            assert len(calls_of(streamed(client, CHAT, **fields))) == count
        else:
            assert len(chat(client, **fields)["choices"][0]["message"]["tool_calls"]) == count


def test_strict_tools_hold_the_arguments_to_their_schema(serve_speaking):
    wrong = ["<tool_call>\n", '{"name": "weather", ', '"arguments": {"town": 1}}', "\n</tool_call>"]
    client = serve_speaking(wrong).client
    free = chat(client, tools=[tool()])["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(free) == {"town": 1}
    held = chat(client, tools=[tool(strict=True)], max_tokens=300)["choices"][0]["message"]["tool_calls"][0]["function"]
    assert set(json.loads(held["arguments"])) == {"city", "days"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [tool(), tool()]}, "tools"),
        ({"tools": [tool(name="a b")]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools"),
        ({"tools": [tool(parameters={"type": "object", "properties": {"x": {"type": "strnig"}}}, strict=True)]}, "tools"),
        ({"tools": [tool(description="x" * 300_000)]}, "tools"),
        ({"tools": [tool()], "response_format": {"type": "regex", "regex": "x"}}, "response_format"),
    ],
)
def test_tools_that_make_no_sense(client, body, param):
    error = refusal(client.post(CHAT, json={"messages": user(), **body}))
    assert error["param"].split("[")[0] == param


def test_a_format_and_tools_that_may_not_be_called(client):
    body = {"tools": [tool()], "tool_choice": "none", "response_format": {"type": "regex", "regex": "yes"}}
    assert chat(client, **body)["choices"][0]["message"]["content"] == "yes"


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>{{ 'assistant\n' }}"
)


def test_a_model_whose_template_has_no_tools_is_told_them(serve_speaking):
    client = serve_speaking(CALL, template=CHATML).client
    [choice] = chat(client, tools=[tool()])["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS

    def rendered(messages, **more) -> str:
        ids = answered(client.post("/tokenize", json={"messages": messages, **more}))["tokens"]
        return bytes(i for i in ids if i < 256).decode()

    assert json.dumps(tool()) in rendered(user(), tools=[tool()])
    turns = [*user(), choice["message"]]
    turns += [{"role": "tool", "tool_call_id": "1", "content": text} for text in ("wet", "dry")]
    written = "".join(CALL)
    expected = (
        f"user\nhi\nassistant\n{written}\nuser\n<tool_response>\nwet\n</tool_response>\n<tool_response>\ndry\n</tool_response>"
    )
    assert rendered(turns) == f"{expected}\nassistant\n"
    system = [{"role": "system", "content": "Be brief."}]
    assert rendered([*system, *turns], tools=[tool()]).startswith("system\nBe brief.\n\n# Tools\n")
    count = answered(client.post("/tokenize", json={"messages": turns, "tools": [tool()]}))["count"]
    assert chat(client, messages=turns, tools=[tool()])["usage"]["prompt_tokens"] == count
    required = chat(client, tools=[tool("other")], tool_choice="required", max_tokens=300, parallel_tool_calls=False)
    assert required["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "other"


def test_a_format_beside_tools_is_that_of_answers_without_calls(serve_speaking):
    schema = {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": False}
    made = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"tools": [tool()], "response_format": made, "max_tokens": 300, "parallel_tool_calls": False}
    client = serve_speaking(CALL).client
    called = chat(client, **body, logit_bias={str(ord("<")): 100})["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    answer = chat(client, **body, logit_bias={str(ord("<")): -100, "260": -100})["choices"][0]
    assert json.loads(answer["message"]["content"]) == {"x": 1}
    assert answer["finish_reason"] == "stop"
