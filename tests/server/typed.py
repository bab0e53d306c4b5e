"""Streams of events that say their type."""

from __future__ import annotations

from typing import Any

import httpx

from .asking import strict

Event = dict[str, Any]


def typed_events(raw: bytes) -> list[Event]:
    """The data of all events, each of the type that its `event` line says."""
    blocks = raw.decode("utf-8").split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        name, data = lines
        found.append(strict(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def typed_stream(client: httpx.Client, path: str, body: dict[str, Any]) -> list[Event]:
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return typed_events(response.content)


def sources(events: list[Event]) -> list[str]:
    """Who proposed the tokens of a stream."""
    return [source for event in events for source in event.get("obole", {}).get("sources", [])]
