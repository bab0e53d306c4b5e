"""Libraries that speak to servers like this one: LangChain, and LiteLLM where it is installed (it is large)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .puppets import open_speaking
from .test_messages_api import tool as anthropic_tool
from .test_openai_client import Trip
from .test_responses import function
from .test_tools import ARGUMENTS, CALL, tool

SAID = "Hello there, you"
CITY = json.loads(ARGUMENTS)


@pytest.fixture(scope="module", autouse=True)
def _alone():
    """Neither of them may ask anybody else for anything."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
            patch.setenv(name, "false")
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        yield


@pytest.fixture
def calling(tmp_path, serve_engine):
    """A server whose model answers with a call, if there are tools."""
    return serve_engine(open_speaking(tmp_path, CALL))


# -- LangChain ------------------------------------------------------------------------------------------------------------

BOTH = pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])


def langchain(served: Any, responses: bool, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    settings = {"base_url": f"{served.url}/v1", "api_key": "none", "model": served.server.model, "max_retries": 0}
    return ChatOpenAI(**settings, use_responses_api=responses, **more)


@BOTH
def test_langchain_answers_and_streams(plain, responses):
    model = langchain(plain, responses, stream_usage=True)
    whole = model.invoke("hi")
    assert whole.text == SAID
    assert whole.usage_metadata["output_tokens"] == 4
    streamed = None
    for chunk in model.stream("hi"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.text == SAID
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert streamed.usage_metadata[name] == whole.usage_metadata[name]


@BOTH
def test_langchain_makes_a_round_of_tools(calling, responses):
    free = {**tool()["function"], "strict": False}
    model = langchain(calling, responses).bind_tools([{"type": "function", "function": free}])
    first = model.invoke("hi")
    [call] = first.tool_calls
    assert (call["name"], call["args"]) == ("weather", CITY)
    result = {"role": "tool", "content": "sunny", "tool_call_id": call["id"]}
    again = model.invoke([("system", "Be good."), ("user", "hi"), first, result])
    assert again.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]
    streamed = None
    for chunk in model.stream("hi"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == CITY
    assert model.invoke([("user", "hi"), streamed, {**result, "tool_call_id": streamed.tool_calls[0]["id"]}])


@BOTH
def test_langchain_reads_data(plain, responses):
    model = langchain(plain, responses, seed=1 if not responses else None, max_tokens=200)
    assert isinstance(model.with_structured_output(Trip, method="json_schema").invoke("hi"), Trip)


def test_langchain_continues_responses(plain):
    model = langchain(plain, responses=True, use_previous_response_id=True)
    first = model.invoke("hi")
    second = model.invoke([("user", "hi"), first, ("user", "more")])
    fresh = langchain(plain, responses=True).invoke([("user", "hi"), ("assistant", SAID), ("user", "more")])
    assert second.usage_metadata["input_tokens"] == fresh.usage_metadata["input_tokens"]


# -- LiteLLM --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def litellm(_alone):
    found = pytest.importorskip("litellm")
    found.telemetry = False
    found.suppress_debug_info = True
    return found


ROUTES = pytest.mark.parametrize(("route", "base"), [("openai", "/v1"), ("anthropic", "")])


@ROUTES
def test_litellm_answers_and_streams(litellm, plain, route, base):
    asked = {"model": f"{route}/puppet", "api_base": f"{plain.url}{base}", "api_key": "none", "max_tokens": 100}
    asked["messages"] = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "hi"}]
    whole = litellm.completion(**asked)
    assert whole.choices[0].message.content == SAID
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SAID
    usage = next(chunk.usage for chunk in chunks if getattr(chunk, "usage", None))
    assert usage.total_tokens == whole.usage.total_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens == 4


@ROUTES
def test_litellm_makes_a_round_of_tools(litellm, calling, route, base):
    asked = {"model": f"{route}/puppet", "api_base": f"{calling.url}{base}", "api_key": "none", "max_tokens": 300}
    asked |= {"tools": [tool()]}
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    first = litellm.completion(messages=messages, **asked)
    [call] = first.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == CITY
    messages += [first.choices[0].message, {"role": "tool", "content": "sunny", "tool_call_id": call.id}]
    assert litellm.completion(messages=messages, **asked).usage.prompt_tokens > first.usage.prompt_tokens


def test_litellm_responses(litellm, plain):
    asked = {"model": "openai/puppet", "api_base": f"{plain.url}/v1", "api_key": "none", "input": "hi"}
    whole = litellm.responses(**asked, tools=[function("other")])
    assert whole.output[0].content[0].text == SAID
    events = list(litellm.responses(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == SAID


def test_litellm_messages(litellm, plain):
    import asyncio

    asked = {"model": "anthropic/puppet", "api_base": plain.url, "api_key": "none", "max_tokens": 100}
    asked |= {"messages": [{"role": "user", "content": "hi"}], "tools": [anthropic_tool("other")]}
    whole = asyncio.run(litellm.anthropic_messages(**asked))
    assert whole["content"][0]["text"] == SAID
