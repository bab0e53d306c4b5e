"""What the load generator reaches: `obole bench serve`'s open loop against a server that answers at once.

    python benchmarks/null_server.py [--rate 2000] [--seconds 5] [--delay 0.02] [--repeat 5]

The server is a process of its own that answers every request with one prepared stream, after `--delay` seconds. It says how
long it really held the request, from its last byte to the answer's first, so what the client adds to a latency shows: what is
left of it besides. Before each round the client only sleeps until the same times: how late it wakes up then is the machine's
part. Client and server have a core each, where the machine has two. The processor time of the client for a request says what
one core could send; that holds also where others keep the machine busy. `--serve PORT` is the server alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np

from obole.bench.arrivals import poisson
from obole.bench.client import Client
from obole.bench.load import CHAT, Load, random_messages
from obole.bench.openloop import OpenRun, no_collection, run_open, run_punctually
from obole.bench.processes import free_address, is_up

SHARES = (50, 90, 99, 99.9)  # percentiles


def stream() -> bytes:
    """A whole response: two events with text, the usage, the end. Of the usage a number of nine digits is still to be filled in
    (%9d): microseconds for which the request was held, in the place of the tokens of the prompt."""
    events = [b'{"choices": [{"index": 0, "delta": {"content": "%s"}}]}' % text for text in (b"null", b" null")]
    events += [b'{"choices": [], "usage": {"prompt_tokens": %9d, "completion_tokens": 2}}', b"[DONE]"]
    body = b"".join(b"data: %s\n\n" % event for event in events)
    length = len(body % 0)
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % length + body


class Null(asyncio.Protocol):
    """Answers each request on a connection; requests are not pipelined."""

    def __init__(self, answer: bytes, delay: float) -> None:
        self._answer, self._delay, self._missing, self._head, self._came = answer, delay, 0, b"", 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._came = time.perf_counter()
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
            self._transport.write(self._answer % round(1e6 * (time.perf_counter() - self._came)))


async def serve(port: int, delay: float) -> None:
    answer = stream()
    server = await asyncio.get_running_loop().create_server(lambda: Null(answer, delay), "127.0.0.1", port, backlog=1024)
    with no_collection():
        await server.serve_forever()


def told(run: OpenRun, rate: float) -> dict[str, float]:
    """Numbers of a round. `late`: sent later than meant; `added`: what a latency has beside the time that the server held the
    request, lateness included."""
    good = [answer for answer in run.answers if not answer.problem]
    added = [1e3 * (answer.ended - answer.sent) - 1e-3 * answer.prompt_tokens for answer in good]
    held = [1e-3 * answer.prompt_tokens for answer in good]
    late = [1e3 * seconds for seconds in run.late]
    seconds = run.ended - run.started
    return {
        "rate": rate,
        "requests": len(run.answers),
        "failed": len(run.answers) - len(good),
        "requests_per_second": len(good) / seconds,
        "client_cores": run.client_seconds / seconds,
        "client_microseconds_per_request": 1e6 * run.client_seconds / len(run.answers),
        "requests_per_second_of_a_core": len(run.answers) / run.client_seconds,
        **{
            f"{name}_p{share}_milliseconds": float(np.percentile(values, share))
            for name, values in (("late", late), ("added", added), ("held", held))
            for share in SHARES
        },
    }


def pin(core: int) -> None:
    """Keep this process on one of its cores, where it has several; the operating system would move it now and then."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})


async def sleeping(offsets: Sequence[float]) -> dict[str, float]:
    """How late a process of this machine wakes up that does nothing else at these times."""
    started, late = time.perf_counter(), []
    for offset in offsets:
        await asyncio.sleep(max(0.0, started + offset - time.perf_counter()))
        late.append(1e3 * (time.perf_counter() - started - offset))
    return {f"asleep_p{share}_milliseconds": float(np.percentile(late, share)) for share in SHARES}


def measure(rate: float, seconds: float, delay: float, repeat: int) -> list[dict[str, float]]:
    address = free_address()
    command = [sys.executable, __file__, "--serve", str(address.port), "--delay", str(delay)]
    with subprocess.Popen(command) as server:
        pin(0)
        try:
            while not is_up(address):
                time.sleep(0.05)
            body = Load().body(random_messages(30, 0), 2)
            client = Client(address)

            def one(seed: int, seconds: float) -> dict[str, float]:
                offsets = poisson(rate, seconds, seed)
                requests = [client.request("POST", CHAT, body)] * len(offsets)
                asleep = run_punctually(sleeping(offsets))
                return told(run_punctually(run_open(client, requests, offsets, lambda: None)), rate) | asleep

            one(repeat, 1.0)  # warms up
            return [one(seed, seconds) for seed in range(repeat)]
        finally:
            server.terminate()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rate", type=float, default=2000.0)
    arguments.add_argument("--seconds", type=float, default=5.0)
    arguments.add_argument("--delay", type=float, default=0.02)
    arguments.add_argument("--repeat", type=int, default=5)
    arguments.add_argument("--serve", type=int, metavar="PORT")
    options = arguments.parse_args()
    if options.serve is not None:
        pin(1)
        run_punctually(serve(options.serve, options.delay))
        return
    rounds = measure(options.rate, options.seconds, options.delay, options.repeat)
    print(json.dumps({name: statistics.median(one[name] for one in rounds) for name in rounds[0]}, indent=1))
    for name in ("asleep_p99_milliseconds", "late_p99_milliseconds", "added_p99_milliseconds"):
        print(f"{name}, all rounds: " + ", ".join(f"{value:.2f}" for value in sorted(one[name] for one in rounds)))


if __name__ == "__main__":
    main()
