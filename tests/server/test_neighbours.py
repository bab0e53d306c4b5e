"""Requests side by side: the same answers as alone, and nobody waits for what somebody else sent."""

from __future__ import annotations

import threading
import time

from .asking import CHAT, TEXT, refusal, streamed, text, until, user
from .puppets import open_speaking


def test_a_seeded_answer_does_not_depend_on_its_neighbours(tiny_engine, serve_engine):
    """The model is a random one, whose every token depends on all before."""
    served = serve_engine(tiny_engine("llama", blocks=200))
    body = {"prompt": [5, 9, 2, 77, 31], "max_tokens": 24, "temperature": 0.8, "seed": 42, "return_token_ids": True}

    def ids(document: dict) -> list[int]:
        return document["choices"][0]["token_ids"]

    alone = ids(text(served.client, **body))
    found: list[list[int]] = []

    def noise(i: int) -> None:
        text(served.client, prompt=[5, 9, 2, 77, i], max_tokens=30, temperature=1.5)

    threads = [threading.Thread(target=noise, args=(i,)) for i in range(7)]
    threads += [threading.Thread(target=lambda: found.append(ids(text(served.client, **body)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found.append(ids(text(served.client, **body, speculate="off")))
    stream = streamed(served.client, TEXT, **body)
    found.append([i for chunk in stream for choice in chunk["choices"] for i in choice.get("token_ids", [])])
    assert found == [alone] * 5


def test_texts_that_take_long_hold_up_nobody(tmp_path, serve_engine):
    served = serve_engine(open_speaking(tmp_path, ["one"], max_context=4096))
    worst, over = [0.0], threading.Event()

    def watch() -> None:
        while not over.is_set():
            start = time.monotonic()
            assert served.client.get("/health").status_code == 200
            worst[0] = max(worst[0], time.monotonic() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        schema = {"type": "array", "items": {"enum": [f"item {i}" for i in range(10_000)]}}
        hostile = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        refusal(served.client.post(CHAT, json={"messages": user("a" * 500_000)}))
        refusal(served.client.post(CHAT, json={"messages": user("word " * 1_000_000)}))
        refusal(served.client.post(CHAT, json={"messages": [*user("x") * 4000]}))
        served.client.post(CHAT, json={"messages": user(), "response_format": hostile, "max_tokens": 2})
    finally:
        over.set()
        watcher.join(30)
    assert worst[0] < 2.0  # seconds; far less when the machine has nothing else to do
    until(lambda: served.server.engine.snapshot().blocks_used == 0)
