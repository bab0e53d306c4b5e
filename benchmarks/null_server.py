"""What the load generator reaches: `obole bench serve`'s open loop against a server that answers at once.

    python benchmarks/null_server.py [--rate 2000] [--seconds 5] [--delay 0.02]

The server is a process of its own that answers every request with one prepared stream, after `--delay` seconds. Its latency is
known, so what the client adds shows: late sending, and the median and 99th percentile above the delay. The processor time of
the client for a request says what one core could send; that holds also where others keep the machine busy. `--serve PORT`
is the server alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time

import numpy as np

from obole.bench.arrivals import poisson
from obole.bench.client import Client
from obole.bench.load import CHAT, Load, random_messages
from obole.bench.openloop import OpenRun, run_open, run_punctually
from obole.bench.processes import free_address, is_up


def chunk(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def stream() -> bytes:
    """A whole response: two events with text, the usage, the end."""
    events = [chunk(choices=[{"index": 0, "delta": {"content": text}}]) for text in ("null", " null")]
    events.append(chunk(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 2}))
    body = b"".join([*events, b"data: [DONE]\n\n"])
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(body) + body


class Null(asyncio.Protocol):
    """Answers each request on a connection; requests are not pipelined."""

    def __init__(self, answer: bytes, delay: float) -> None:
        self._answer, self._delay, self._missing, self._head = answer, delay, 0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._missing:
            head, found, body = (self._head + data).partition(b"\r\n\r\n")
            if not found:
                self._head = head
                return
            self._head = b""
            _, named, rest = head.lower().partition(b"content-length: ")
            self._missing = (int(rest.split(b"\r\n", 1)[0]) if named else 0) - len(body)
        else:
            self._missing -= len(data)
        if self._missing <= 0:
            self._missing = 0
            asyncio.get_running_loop().call_later(self._delay, self._send)

    def _send(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(self._answer)


async def serve(port: int, delay: float) -> None:
    answer = stream()
    server = await asyncio.get_running_loop().create_server(lambda: Null(answer, delay), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


def told(run: OpenRun, rate: float, delay: float) -> dict[str, float]:
    """Numbers of a round: milliseconds, and requests a second of one core."""
    good = [answer for answer in run.answers if not answer.problem]
    above = 1e3 * (np.array([answer.ended - answer.sent for answer in good]) - delay)
    late = 1e3 * np.array(run.late)
    seconds = run.ended - run.started
    return {
        "rate": rate,
        "requests": len(run.answers),
        "failed": len(run.answers) - len(good),
        "requests_per_second": len(good) / seconds,
        "client_cores": run.client_seconds / seconds,
        "client_microseconds_per_request": 1e6 * run.client_seconds / len(run.answers),
        "requests_per_second_of_a_core": len(run.answers) / run.client_seconds,
        "late_p50_milliseconds": float(np.percentile(late, 50)),
        "late_p99_milliseconds": float(np.percentile(late, 99)),
        "above_delay_p50_milliseconds": float(np.percentile(above, 50)),
        "above_delay_p99_milliseconds": float(np.percentile(above, 99)),
    }


def measure(rate: float, seconds: float, delay: float) -> dict[str, float]:
    address = free_address()
    command = [sys.executable, __file__, "--serve", str(address.port), "--delay", str(delay)]
    with subprocess.Popen(command) as server:
        try:
            while not is_up(address):
                time.sleep(0.05)
            client, offsets = Client(address), poisson(rate, seconds, 0)
            body = Load().body(random_messages(30, 0), 2)
            requests = [client.request("POST", CHAT, body)] * len(offsets)
            for offsets_ in (offsets[: int(rate)], offsets):  # the first round warms up
                run = run_punctually(run_open(client, requests[: len(offsets_)], offsets_, lambda: None))
            return told(run, rate, delay)
        finally:
            server.terminate()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rate", type=float, default=2000.0)
    arguments.add_argument("--seconds", type=float, default=5.0)
    arguments.add_argument("--delay", type=float, default=0.02)
    arguments.add_argument("--serve", type=int, metavar="PORT")
    options = arguments.parse_args()
    if options.serve is not None:
        run_punctually(serve(options.serve, options.delay))
        return
    print(json.dumps(measure(options.rate, options.seconds, options.delay), indent=1))


if __name__ == "__main__":
    main()
