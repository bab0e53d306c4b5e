"""Requests and streams as tests want them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

import httpx

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def user(text: str = "hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def strict(text: str | bytes) -> Any:
    """JSON without what only Python takes for it."""

    def no_number(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=no_number)


def chat(client: httpx.Client, **body: Any) -> dict[str, Any]:
    return answered(client.post(CHAT, json={"messages": user(), **body}))


def text(client: httpx.Client, **body: Any) -> dict[str, Any]:
    return answered(client.post(TEXT, json=body))


def answered(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    document: dict[str, Any] = strict(response.content)
    return document


def events(raw: bytes) -> list[dict[str, Any]]:
    """The data of a stream that came to its proper end."""
    blocks = raw.decode("utf-8").split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith(("data: ", ":")) and "\n" not in block for block in blocks)
    return [strict(block.removeprefix("data: ")) for block in blocks if not block.startswith(":")]


def streamed(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    if path == CHAT:
        body = {"messages": user(), **body}
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.content)


def said(chunks: Iterable[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice from its chunks."""
    pieces = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(piece.get("text") or piece.get("delta", {}).get("content") or "" for piece in pieces)


def reasons(chunks: Iterable[dict[str, Any]], index: int = 0) -> list[str]:
    return [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == index and c["finish_reason"]]


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a response, in the form that it must have."""
    assert response.status_code == status, (response.status_code, response.text)
    document = strict(response.content)
    assert list(document) == ["error"]
    error: dict[str, Any] = document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].strip()
    assert "Traceback" not in error["message"]
    return error


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for something that happens on another thread."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)
