"""What clients see when the engine fails under them."""

from __future__ import annotations

import json
import threading

import pytest

from obole.engine.engine import Engine
from obole.engine.runner import Runner
from obole.errors import EngineFailure

from .asking import CHAT, chat, refusal, until, user


def test_a_step_that_fails_ends_its_requests_and_no_others(serve_speaking, monkeypatch):
    served = serve_speaking(["one", " two", " three"], log_format="json")
    run = Runner.run
    bad = threading.Event()

    def failing(runner, plan):
        if bad.is_set():
            raise RuntimeError("out of luck")
        return run(runner, plan)

    monkeypatch.setattr(Runner, "run", failing)
    bad.set()
    error = refusal(served.client.post(CHAT, json={"messages": user()}), 500)
    assert error["code"] == "engine_failure"
    response = served.client.post(CHAT, json={"messages": user(), "stream": True})
    assert response.status_code == 200
    *_, last = [line for line in response.text.split("\n\n") if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failure"
    bad.clear()
    assert chat(served.client)["choices"][0]["message"]["content"] == "one two three"
    assert served.client.get("/health").status_code == 200


class Disaster(BaseException):
    pass


def test_an_engine_that_failed_for_good_ends_the_server(serve_speaking, monkeypatch):
    served = serve_speaking(["one"], drain_seconds=5.0)

    def failing(_engine):
        raise Disaster("no more")

    monkeypatch.setattr(Engine, "_step", failing)
    refusal(served.client.post(CHAT, json={"messages": user()}), 500)
    until(lambda: not served.thread.is_alive())
    assert isinstance(served._failure, EngineFailure)
    monkeypatch.undo()


@pytest.mark.parametrize("stream", [False, True])
def test_what_nobody_thought_of_is_told_without_a_trace(serve_speaking, monkeypatch, stream):
    served = serve_speaking(["one"])
    lines: list[str] = []
    served.server.log._write = lines.append
    target = "obole.server.generation.Generation.report"
    monkeypatch.setattr(target, lambda _self: 1 / 0)
    response = served.client.post(CHAT, json={"messages": user(), "stream": stream})
    if stream:
        assert '"code":"internal_error"' in response.text
    else:
        assert refusal(response, 500)["code"] == "internal_error"
    assert "ZeroDivisionError" not in response.text
    assert any("ZeroDivisionError" in line and "Traceback" in line for line in lines)
    monkeypatch.undo()
    assert chat(served.client)["choices"][0]["message"]["content"] == "one"
