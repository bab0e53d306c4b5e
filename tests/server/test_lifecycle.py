"""Readers that are slow, gone or late; a server that is full, or on its way out."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from obole.engine.runner import Runner
from obole.errors import ConfigError
from obole.server.serve import listen

from .asking import CHAT, TEXT, chat, refusal, said, strict, until, user
from .puppets import speaking

ENDLESS = {"prompt": "a", "ignore_eos": True, "max_tokens": 4000}


class Gate:
    """Holds the engine's steps while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.steps = 0
        run = Runner.run

        def gated(runner, plan):
            assert self.open.wait(30)
            self.steps += 1
            return run(runner, plan)

        monkeypatch.setattr(Runner, "run", gated)


@pytest.fixture
def gate(monkeypatch):
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def idle(served) -> bool:
    load = served.server.engine.snapshot()
    return load.running == load.waiting == load.blocks_used == 0


def told(served) -> bool:
    """Whether the engine has been told to end a request, and perhaps has done so."""
    return bool(served.server.engine.engine._unwanted) or not served.web.server_state.tasks


def raw(served, path: str, body: dict, key: str = "") -> socket.socket:
    """A connection on which a request was sent, and nothing is read yet. `key`: of its tenant."""
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), 20)
    data = json.dumps(body).encode()
    more = f"authorization: Bearer {key}\r\n" if key else ""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\n{more}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@contextmanager
def in_background(*calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(30)


# -- readers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(serve_speaking, gate, stream):
    served = serve_speaking(["one"])
    for more in ({}, {"n": 3}, {"prompt": ["a", "b"]}):
        connection = raw(served, TEXT, {**ENDLESS, "stream": stream, "speculate": "off", **more})
        if stream:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        until(lambda: served.server.engine.snapshot().running)
        gate.open.clear()
        connection.close()
        until(lambda: told(served))  # the server knows before the engine takes another step
        steps = gate.steps
        gate.open.set()
        until(lambda: idle(served) and not served.web.server_state.tasks)
        assert gate.steps <= steps + 1
    assert chat(served.client)["choices"][0]["message"]["content"] == "one"


def test_leaving_at_any_time_leaves_nothing_behind(serve_speaking):
    served = serve_speaking(["one"], tenant_concurrency=1000)
    for i in range(40):
        connection = raw(served, TEXT, {**ENDLESS, "stream": i % 2 == 0})
        if i % 4 >= 2:
            time.sleep(0.001 * i)
        connection.close()
    until(lambda: idle(served) and not served.web.server_state.tasks)
    assert served.server.limits._use(served.server.tenants.all[0]).open == 0
    assert chat(served.client)["choices"][0]["message"]["content"] == "one"


def test_a_slow_reader_holds_up_nobody_and_gets_everything(serve_speaking):
    served = serve_speaking(["one"])
    connection = raw(served, TEXT, {**ENDLESS, "stream": True})
    until(lambda: served.server.engine.snapshot().running)
    until(lambda: idle(served))  # the engine did not wait for the reader
    assert chat(served.client)["choices"][0]["message"]["content"] == "one"
    data = b""
    while b"[DONE]" not in data:
        data += connection.recv(1 << 16)
    connection.close()
    body = b"".join(data.split(b"\r\n\r\n", 1)[1].split(b"\r\n")[1::2])
    blocks = [block.removeprefix("data: ") for block in body.decode().split("\n\n") if block.startswith("data: {")]
    text = said(strict(block) for block in blocks)
    assert text == "".join(chr(97 + (i + 1) % 26) for i in range(4000))


def test_a_reader_that_takes_nothing_is_dropped(serve_speaking, monkeypatch):
    # buffers of the kernel hold megabytes otherwise
    monkeypatch.setattr("obole.server.chat._call_id", lambda: "x")
    served = serve_speaking(["one"], stall_seconds=0.3)
    host, port = served.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect((host, int(port)))
    body = json.dumps({**ENDLESS, "stream": True, "logprobs": 100, "n": 8, "speculate": "off"}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    until(lambda: served.web.server_state.tasks)
    until(lambda: idle(served) and not served.web.server_state.connections, 30)
    connection.close()
    assert chat(served.client)["choices"][0]["message"]["content"] == "one"


def test_silence_is_broken_by_comments(serve_speaking, gate):
    served = serve_speaking(["one"], ping_seconds=0.1)
    gate.open.clear()
    with served.client.stream("POST", CHAT, json={"messages": user(), "stream": True}) as response:
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": ping", "", ": ping", ""]
        gate.open.set()
        assert "data: [DONE]" in list(lines)


# -- limits ---------------------------------------------------------------------------------------------------------------


def test_a_request_has_its_own_time(serve_speaking, gate):
    served = serve_speaking(["one"])
    gate.open.clear()
    threading.Timer(0.3, gate.open.set).start()
    for stream in (False, True):
        response = served.client.post(TEXT, json={**ENDLESS, "timeout": 0.05, "stream": stream})
        assert response.status_code == 200
        if not stream:
            [choice] = response.json()["choices"]
            assert choice["finish_reason"] == "length"
            assert response.json()["obole"]["timed_out"] is True
            assert response.json()["usage"]["completion_tokens"] < 4000
        else:
            assert response.content.endswith(b"data: [DONE]\n\n")
            assert b'"timed_out":true' in response.content
    until(lambda: idle(served))


def test_a_tenant_may_have_so_many_requests(serve_speaking, gate):
    served = serve_speaking(["one"], tenant_concurrency=2)
    gate.open.clear()
    with in_background(*[lambda: chat(served.client)] * 2):
        until(lambda: served.server.limits._use(served.server.tenants.all[0]).open == 2)
        response = served.client.post(CHAT, json={"messages": user()})
        assert refusal(response, 429)["code"] == "rate_limit_exceeded"
        assert int(response.headers["retry-after"]) >= 1
        assert served.client.get("/health").status_code == 200
        assert served.client.get("/v1/models").status_code == 200
        gate.open.set()
    chat(served.client)


def test_a_tenant_may_have_so_many_requests_waiting(serve_speaking, gate):
    served = serve_speaking(["one"], tenant_waiting=1)
    gate.open.clear()
    with in_background(lambda: chat(served.client)):
        until(lambda: served.server.limits._use(served.server.tenants.all[0]).waiting == 1)
        refusal(served.client.post(CHAT, json={"messages": user()}), 429)
        gate.open.set()
    chat(served.client)


def test_a_tenant_may_send_so_many_requests_a_minute(serve_speaking):
    served = serve_speaking(["one"], tenant_per_minute=3)
    for _ in range(3):
        chat(served.client)
    response = served.client.post(CHAT, json={"messages": user()})
    refusal(response, 429)
    assert 1 <= int(response.headers["retry-after"]) <= 20
    assert served.client.get("/v1/models").status_code == 200


def test_the_whole_server_may_be_full(serve_speaking, gate):
    served = serve_speaking(["one"], max_waiting=2)
    gate.open.clear()
    engine = served.server.engine
    with ExitStack() as stack:
        stack.enter_context(in_background(lambda: chat(served.client)))
        until(lambda: engine.snapshot().running)  # as far as it gets
        stack.enter_context(in_background(*[lambda: chat(served.client)] * 2))
        until(lambda: engine._arriving == 2)
        response = served.client.post(CHAT, json={"messages": user()})
        assert refusal(response, 503)["code"] == "overloaded"
        assert int(response.headers["retry-after"]) >= 1
        gate.open.set()
    chat(served.client)


# -- the end --------------------------------------------------------------------------------------------------------------


def test_draining_lets_running_requests_finish(serve_speaking, gate):
    served = serve_speaking(["one"], drain_seconds=30.0)
    with httpx.Client(base_url=served.url) as other, other.stream("POST", TEXT, json={**ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
        gate.open.clear()
        served.drain()
        until(lambda: served.server.draining)
        refused = served.client.post(CHAT, json={"messages": user()})
        assert refusal(refused, 503)["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) >= 1
        health = served.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        gate.open.set()
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-4]
    served.thread.join(10)
    assert not served.thread.is_alive()


def test_what_is_not_done_in_time_is_told_so(serve_speaking, gate):
    served = serve_speaking(["one"], drain_seconds=0.05)
    whole: list[httpx.Response] = []
    body = {**ENDLESS, "n": 2, "speculate": "off"}
    with (
        in_background(lambda: whole.append(httpx.post(served.url + TEXT, json=body, timeout=30))),
        httpx.stream("POST", served.url + TEXT, json={**body, "stream": True}, timeout=30) as response,
    ):
        until(lambda: served.server.engine.snapshot().running == 4)
        gate.open.clear()
        served.drain()
        time.sleep(0.1)
        gate.open.set()
        events = [line for line in response.iter_lines() if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert refusal(whole[0], 503)["code"] == "shutting_down"


def start_process(tmp_path, *options: str) -> tuple[subprocess.Popen, str]:
    path = tmp_path / "puppet.gguf"
    if not path.exists():
        speaking(path, ["one"])
    command = [sys.executable, "-c", "from obole.cli.app import main; main()"]
    command += ["serve", str(path), "--port", "0", "--kv-device", "8MiB", "--log-format", "json", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OBOLE_API_KEYS": ""})
    assert process.stderr is not None
    return process, json.loads(process.stderr.readline())["url"]


def test_the_process_from_its_start_to_its_end(tmp_path):
    process, url = start_process(tmp_path, "--api-key", "sk-1", "--drain-seconds", "20")
    key = {"authorization": "Bearer sk-1"}
    try:
        answer = httpx.post(url + CHAT, json={"messages": user()}, headers=key, timeout=20)
        assert answer.json()["choices"][0]["message"]["content"] == "one"
        refusal(httpx.post(url + CHAT, json={"messages": user()}), 401)
        with httpx.stream(
            "POST", url + TEXT, json={**ENDLESS, "max_tokens": 1000, "stream": True}, headers=key, timeout=30
        ) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert list(lines)[-2] == "data: [DONE]"
        _, log = process.communicate(timeout=20)
        assert process.returncode == 0
        entries = [json.loads(line) for line in log.splitlines()]
        assert [entry["status"] for entry in entries if "status" in entry] == [200, 401, 200]
        assert "sk-1" not in log
        assert "hi" not in [entry.get("prompt") for entry in entries]
    finally:
        process.kill()
        process.wait()


def test_the_second_signal_ends_at_once(tmp_path):
    process, url = start_process(tmp_path, "--drain-seconds", "60")
    try:
        with httpx.stream("POST", url + TEXT, json={**ENDLESS, "stream": True, "n": 16}, timeout=30) as response:
            next(response.iter_lines())
            process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(5) in (128 + signal.SIGTERM, 0)  # 0: all was done already
    finally:
        process.kill()
        process.wait()


def test_a_port_that_is_taken():
    with listen("127.0.0.1", 0) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        with pytest.raises(ConfigError, match=f"Port {port} .*choose another port"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match="no host"):
        listen("no such host", 8000)
