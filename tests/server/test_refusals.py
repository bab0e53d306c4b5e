"""What is wrong with a request is said in one sentence that names it, with a 4xx; the next request is served as ever."""

from __future__ import annotations

import json
import socket
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from obole.server.body import strict_json
from obole.server.errors import ApiError

from .asking import CHAT, TEXT, chat, refusal, user

JSON = {"content-type": "application/json"}


@pytest.fixture(autouse=True)
def goes_on(plain):
    """Whatever the test sent: a plain request is answered, and nothing is left running."""
    yield
    assert chat(plain.client)["choices"][0]["message"]["content"] == "Hello there, you"
    load = plain.server.engine.snapshot()
    assert (load.running, load.waiting, load.blocks_used) == (0, 0, 0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"messages": [{"role": "user", "content": "hi"}],}',
        b'{"temperature": NaN, "messages": [{"role": "user", "content": "hi"}]}',
        b'{"temperature": 1e999, "messages": [{"role": "user", "content": "hi"}]}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"messages": [], "messages": [{"role": "user", "content": "hi"}]}',
        b'{"messages": [{"role": "user", "role": "system", "content": "hi"}]}',
        b'\xef\xbb\xbf{"messages": [{"role": "user", "content": "hi"}]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b'{"messages": [{"role": "user", "content": "hi \\ud83d"}]}',
        b'{"messages": [{"role": "\\ud800", "content": "hi"}]}',
        b'{"\\udc00": 1}',
        b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b"[]",
        b'"x"',
        b"null",
        b"5",
    ],
    ids=lambda body: body[:30].decode("latin-1"),
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_proper_json(client, path, body):
    refusal(client.post(path, content=body, headers=JSON))


def test_types_and_encodings(client):
    body = json.dumps({"messages": user()}).encode()
    for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
        refusal(client.post(CHAT, content=body, headers=headers), 415)
    refusal(client.post(CHAT, content=body, headers={**JSON, "content-encoding": "gzip"}), 415)
    assert client.post(CHAT, content=body, headers={"content-type": "application/json; charset=utf-8"}).status_code == 200


def test_nul_and_pairs_of_surrogates_are_text(client):
    body = b'{"messages": [{"role": "user", "content": "a\\u0000b \\ud83e\\udee0"}]}'
    assert client.post(CHAT, content=body, headers=JSON).status_code == 200


def test_large_bodies_are_not_read(serve_speaking):
    served = serve_speaking(["one"], body_bytes=1000)
    refusal(served.client.post(CHAT, json={"messages": user("x" * 1000)}), 413)
    pieces = (b"x" * 600 for _ in range(3))
    refusal(served.client.post(CHAT, content=pieces, headers=JSON), 413)
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 200000000\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    assert chat(served.client)["choices"][0]["message"]["content"] == "one"


def test_bodies_that_stop_coming(serve_speaking):
    served = serve_speaking(["one"], body_seconds=0.2)
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 20\r\n\r\n{"
        connection.sendall(head.encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(head.encode())
    assert chat(served.client)["choices"][0]["message"]["content"] == "one"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", "0.5"), ("temperature", True), ("temperature", [1]), ("top_p", 1.1),
        ("top_p", -0.1), ("top_k", -2), ("top_k", 0.5), ("min_p", 1.5), ("repetition_penalty", 0), ("repetition_penalty", -1),
        ("presence_penalty", 3), ("frequency_penalty", -3), ("seed", 1.5), ("seed", "x"), ("seed", 2**70), ("n", 0),
        ("n", 17), ("n", 1000), ("n", "2"), ("stop", ""), ("stop", [""]), ("stop", ["x"] * 17), ("stop", [1]), ("stop", {}),
        ("stop_token_ids", [-1]), ("stop_token_ids", [10**6]), ("stop_token_ids", ["a"]), ("logit_bias", {"999999": 5}),
        ("logit_bias", {"-1": 5}), ("logit_bias", {"abc": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": "x"}),
        ("logit_bias", {"1": 1, "01": 2}), ("logit_bias", [1]), ("min_tokens", -1), ("stream", "yes"), ("stream_options", 1),
        ("stream_options", {"include_usage": True}), ("timeout", -1), ("timeout", "1"), ("speculate", "magic"), ("user", 5),
        ("prediction", "text"), ("prediction", {"type": "x", "content": ""}), ("model", 5), ("ignore_eos", "no"),
        ("no_such_field", 1), ("cache_salt", "x"), ("response_format", "json"), ("pace", -1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_fields_out_of_range_are_named(client, path, field, value):
    base = {"messages": user()} if path == CHAT else {"prompt": "a"}
    error = refusal(client.post(path, json={**base, field: value}))
    assert error["param"].split(".")[0].split("[")[0] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", []), ("messages", None), ("messages", "hi"), ("messages", [{}]), ("messages", [{"role": "user"}]),
        ("messages", [{"role": "user", "content": None}]), ("messages", [{"role": "nobody", "content": "x"}]),
        ("messages", [{"role": "user", "content": "x", "extra": 1}]), ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]),
        ("messages", [{"role": "tool", "content": "x"}]), ("messages", [{"role": "function", "name": "f", "content": "x"}]),
        ("top_logprobs", 2), ("top_logprobs", 101), ("logprobs", 2), ("store", True), ("service_tier", "priority"),
        ("modalities", ["audio"]), ("audio", {}), ("functions", []), ("function_call", "auto"), ("reasoning_effort", "high"),
        ("web_search_options", {}), ("metadata", {"a": 1}), ("max_tokens", 0), ("verbosity", "low"),
        ("mtp", "confadapt"), ("mtp", "fast"), ("tau", 1.5), ("mtp_tokens", 0), ("mtp_tokens", 65), ("speculate", "mtp"),
    ],
)  # fmt: skip
def test_fields_of_chats_are_named(client, field, value):
    error = refusal(client.post(CHAT, json={"messages": user(), "logprobs": None, field: value}))
    assert error["param"].split(".")[0].split("[")[0] == field


def test_edges_of_sampling_that_are_no_errors(client):
    grid = [{"temperature": t} for t in (0, 1e-45, 1e-6, 1e-4, 2, 1e9)] + [{"top_p": p, "temperature": 1} for p in (0, 1e-9, 1)]
    grid += [{"top_k": k, "temperature": 1} for k in (-1, 0, 1, 300, 10**6)] + [{"min_p": p, "temperature": 1} for p in (0, 1)]
    grid += [{"repetition_penalty": p} for p in (1e-9, 1e9)]
    for more in grid:
        assert chat(client, max_tokens=3, seed=1, **more)["usage"]["completion_tokens"] in (1, 2, 3)


def test_models_by_name(client):
    for name in ("puppet", "other-name", None):
        assert chat(client, model=name)["model"] == "puppet"
    for name in ("no-such", "", "Puppet", "../puppet"):
        for path, base in ((CHAT, {"messages": user()}), (TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
            error = refusal(client.post(path, json={**base, "model": name}), 404)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert "puppet" in error["message"]
    refusal(client.post(CHAT, json={"messages": user(), "model": "no-such", "stream": True}), 404)
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["puppet", "other-name"]
    assert client.get("/v1/models/other-name").json()["id"] == "other-name"
    refusal(client.get("/v1/models/no-such"), 404)
    refusal(client.get("/v1/models/a/b"), 404)


def test_paths_and_methods(client):
    refusal(client.get("/v1/nothing"), 404)
    assert refusal(client.get(CHAT), 405)
    assert client.get(CHAT).headers["allow"] == "POST"
    refusal(client.delete("/health"), 405)
    assert client.head("/health").status_code == 200


def test_prompts_that_cannot_fit(client):
    secret = "the secret is xyzzy. "
    for length in (4096, 300_000, 5_000_000):
        error = refusal(client.post(CHAT, json={"messages": user(secret + "a" * length + " What is it?")}))
        assert error["param"] == "messages"
        assert refusal(client.post(TEXT, json={"prompt": "a" * length}))["param"] in ("prompt", "max_tokens")
    refusal(client.post(CHAT, json={"messages": user("a") * 5000}))
    error = refusal(client.post(CHAT, json={"messages": user(), "max_completion_tokens": 4096}))
    assert error["param"] == "max_completion_tokens"


def values() -> st.SearchStrategy[object]:
    scalars = (
        st.none() | st.booleans() | st.integers(-(2**64), 2**64) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    )
    return st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(values())
@settings(max_examples=60)
def test_proper_json_is_read_as_it_is(value):
    try:
        body = json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        with pytest.raises(ApiError, match="surrogate"):
            strict_json(json.dumps(value).encode())
    else:
        assert strict_json(body) == value


@given(st.binary() | st.text(alphabet='{}[]",:0123456789eE+-.ntfalsuredD\\ \n').map(str.encode))
@settings(max_examples=150)
def test_whatever_is_sent_is_json_or_refused(body):
    with suppress(ApiError):
        strict_json(body)
