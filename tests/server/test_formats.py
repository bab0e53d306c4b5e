"""Answers that are held to a format, whatever the model would say; text that is cut into odd tokens."""

from __future__ import annotations

import json
import time

import jsonschema
import pytest

from .asking import CHAT, TEXT, chat, reasons, refusal, said, streamed, user
from .puppets import always_drafting, open_speaking

NASTY = "ď 🫠 🥹 龜 👩‍👩‍👧 नमस्ते"


def constant(text: str) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "forced", "schema": {"const": text}}}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_characters_over_several_tokens(client, path):
    body = {"response_format": constant(NASTY), "max_tokens": 200, **({} if path == CHAT else {"prompt": "a"})}
    chunks = streamed(client, path, **body)
    assert json.loads(said(chunks)) == NASTY
    assert reasons(chunks) == ["stop"]
    assert all("\ufffd" not in said([chunk]) for chunk in chunks)


@pytest.mark.parametrize("count", range(2, 12))
def test_cut_within_a_character_the_stream_ends_as_the_whole_does(client, count):
    whole = chat(client, response_format=constant("🫠é"), max_tokens=count)["choices"][0]
    chunks = streamed(client, CHAT, response_format=constant("🫠é"), max_tokens=count)
    assert (said(chunks), reasons(chunks)) == (whole["message"]["content"], [whole["finish_reason"]])
    assert whole["message"]["content"].count("\ufffd") <= 1


def test_bytes_that_are_no_text(serve_speaking):
    served = serve_speaking([b"a\xf0\x9f", "bc", b"!\xff"])
    for found in (chat(served.client)["choices"][0]["message"]["content"], said(streamed(served.client, CHAT))):
        assert found == "a\ufffdbc!\ufffd"


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Lima"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def test_a_schema_is_kept_to(tmp_path, serve_engine):
    client = serve_engine(always_drafting(open_speaking(tmp_path, ["one"]))).client
    made = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    choice = chat(client, response_format=made, max_tokens=200)["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    chunks = streamed(client, CHAT, response_format=made, max_tokens=200)
    assert said(chunks) == choice["message"]["content"]
    sources = {source for chunk in chunks for source in chunk["obole"].get("sources", [])}
    assert "forced" in sources


def test_other_formats(client):
    text = chat(client, response_format={"type": "regex", "regex": "(yes|no), [0-9]{2}"})["choices"][0]["message"]["content"]
    assert text[:3] in ("yes", "no,")
    lark = 'start: "left" | "right"'
    assert chat(client, response_format={"type": "lark", "lark": lark})["choices"][0]["message"]["content"] in ("left", "right")
    assert chat(client, response_format={"type": "text"})["choices"][0]["message"]["content"] == "Hello there, you"


def test_any_object(client):
    bias = {str(ord("}")): 50, "32": -100, "10": -100, "9": -100}
    choice = chat(client, response_format={"type": "json_object"}, max_tokens=50, logit_bias=bias)["choices"][0]
    assert json.loads(choice["message"]["content"]) == {}


@pytest.mark.parametrize(
    "made",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"name": "x y", "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strnig"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"foo": "bar"}}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "(", "type": "string"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "https://example.org/schema.json"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["x" * 300_000]}}},
        {"type": "json_object", "schema": {}},
        {"type": "regex", "regex": "("},
        {"type": "lark", "lark": "start: nothing"},
        {"type": "xml"},
        {},
    ],
    ids=lambda made: str(made)[:60],
)
def test_what_cannot_be_kept_to_is_refused(client, made):
    assert refusal(client.post(CHAT, json={"messages": user(), "response_format": made}))["param"].startswith("response_format")


def test_hostile_schemas_disturb_nobody(tmp_path, serve_engine):
    client = serve_engine(open_speaking(tmp_path, ["one"])).client
    deep: dict = {}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    for schema in (deep, {"type": "string", "pattern": "(a{1,1000}){1,1000}"}):
        made = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        start = time.monotonic()
        response = client.post(CHAT, json={"messages": user(), "response_format": made, "max_tokens": 4})
        assert response.status_code in (200, 400), response.text
        assert time.monotonic() - start < 15
        assert chat(client)["choices"][0]["message"]["content"] == "one"
