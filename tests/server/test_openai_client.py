"""OpenAI's own client, as people use it."""

from __future__ import annotations

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from .puppets import always_drafting, open_speaking
from .test_tools import ARGUMENTS, CALL, tool

TEXT = "Hello there, you"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def api(plain) -> openai.OpenAI:
    with openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_chat(api):
    answer = api.chat.completions.create(model="puppet", messages=HI, temperature=0, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert "".join(one.token for one in answer.choices[0].logprobs.content[:-1]) == TEXT
    assert answer.usage.completion_tokens == 4
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    assert answer.obole["receipts"][0]["output_tokens"] == 4


def test_a_stream(api):
    chunks = list(api.chat.completions.create(model="puppet", messages=HI, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].usage.completion_tokens == 4
    options = {"include_usage": True}
    chunks = list(api.chat.completions.create(model="puppet", messages=HI, stream=True, stream_options=options))
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    with api.chat.completions.stream(model="puppet", messages=HI) as stream:
        assert stream.get_final_completion().choices[0].message.content == TEXT


def test_completions(api):
    answer = api.completions.create(model="puppet", prompt=["a", "x"], max_tokens=3, logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["abcd", "xyza"]
    chunks = list(api.completions.create(model="puppet", prompt="a", max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "bcd"


def test_models(api):
    assert [model.id for model in api.models.list()] == ["puppet", "other-name"]
    assert api.models.retrieve("other-name").id == "other-name"


class Trip(BaseModel):
    city: Literal["Paris", "Lima"]
    days: int


def test_answers_as_data(api):
    parsed = api.chat.completions.parse(model="puppet", messages=HI, response_format=Trip, max_tokens=200, seed=1)
    assert isinstance(parsed.choices[0].message.parsed, Trip)
    with api.chat.completions.stream(model="puppet", messages=HI, response_format=Trip, max_tokens=200, seed=1) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed


def test_a_round_of_tools(tmp_path, serve_engine):
    served = serve_engine(open_speaking(tmp_path, CALL))
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as api:
        first = api.chat.completions.create(model="puppet", messages=HI, tools=[tool()])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls[0].function.arguments == ARGUMENTS
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": json.dumps({"sun": True})}
        for turn in (message, message.model_dump(), message.model_dump(exclude_none=True)):
            again = api.chat.completions.create(model="puppet", messages=[*HI, turn, result], tools=[tool()])
            assert again.usage.prompt_tokens > first.usage.prompt_tokens
        with api.chat.completions.stream(model="puppet", messages=HI, tools=[tool()]) as stream:
            streamed = stream.get_final_completion().choices[0].message
        assert streamed.tool_calls[0].function.arguments == ARGUMENTS


def test_the_model_name_does_not_matter_where_there_is_one(tmp_path, serve_engine):
    served = serve_engine(open_speaking(tmp_path, ["one"]))
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as api:
        [model] = api.models.list()
        assert model.id == "puppet"
        assert api.chat.completions.create(model=model.id, messages=HI).model == model.id


def test_predicted_outputs(tmp_path, serve_engine):
    served = serve_engine(always_drafting(open_speaking(tmp_path, ["Hello", " there", ", you"])))
    text = "".join(chr(97 + i % 26) for i in range(200))
    body = {"prediction": {"type": "content", "content": text}, "speculate": "prediction"}
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as api:
        expected = api.completions.create(model="puppet", prompt="z", max_tokens=200, extra_body={"speculate": "off"})
        answer = api.completions.create(model="puppet", prompt="z", max_tokens=200, extra_body=body)
        assert answer.choices[0].text == expected.choices[0].text == text
        assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 0
        chat = api.chat.completions.create(model="puppet", messages=HI, prediction={"type": "content", "content": TEXT})
        assert chat.choices[0].message.content == TEXT


def test_errors_are_its_own_exceptions(api):
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model="puppet", messages=HI, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        api.chat.completions.create(model="no-such", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="no_such_field"):
        api.chat.completions.create(model="puppet", messages=HI, extra_body={"no_such_field": 1})


async def ask_together(url: str) -> list[str]:
    import asyncio

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:

        async def one(letter: str) -> str:
            stream = await api.completions.create(model="puppet", prompt=letter, max_tokens=5, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        return await asyncio.gather(*map(one, "abcdefgh"))


def test_many_at_once(plain):
    import asyncio

    answers = asyncio.run(ask_together(plain.url))
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    assert answers == [alphabet[i + 1 : i + 6] for i in range(8)]
