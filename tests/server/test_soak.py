"""A server among many clients, some of which leave or talk nonsense: the same answers as alone, and nothing is left of it.

The environment makes it longer: OBOLE_SOAK_CONNECTIONS, OBOLE_SOAK_REQUESTS, OBOLE_SOAK_MODEL (`make drill`).
"""

from __future__ import annotations

import asyncio
import json
import os
import time

import psutil
import pytest

from fakes.talking import write_talking
from obole.bench.client import Client
from obole.bench.processes import free_address, obole_command, serving
from obole.server.memory import REST_SECONDS

from .soaking import Crowd, answers, at_their_largest, good_requests, watch

CONNECTIONS = int(os.environ.get("OBOLE_SOAK_CONNECTIONS", "64"))
REQUESTS = int(os.environ.get("OBOLE_SOAK_REQUESTS", "600"))
MODEL = os.environ.get("OBOLE_SOAK_MODEL", "")
GROWTH = 24 << 20  # bytes that the server may have more after the last third than after the first
LIMITS = ("--tenant-concurrency", "4096", "--tenant-waiting", "4096", "--max-waiting", "4096", "--stored-responses", "32")


def resident(process: psutil.Process) -> int:
    """Bytes of a process and of those that it started."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


async def idle(client: Client, seconds: float = 30.0) -> bool:
    """Whether nothing runs or waits, and no block is in use, before the time is up."""
    line = client.line()
    names = ("obole_num_requests_running", "obole_num_requests_waiting", "obole_kv_cache_usage_perc")
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            text = (await line.ask(client.request("GET", "/metrics"))).body.decode()
            values = dict(row.rsplit(" ", 1) for row in text.splitlines() if not row.startswith("#"))
            if all(float(values[name]) == 0 for name in names):
                return True
            await asyncio.sleep(0.05)
        return False
    finally:
        line.close()


@pytest.mark.timeout(max(300, 5 * REQUESTS))
def test_a_crowd_leaves_nothing_behind(tmp_path):
    model = MODEL or str(write_talking(tmp_path / "model.gguf"))
    pool = ("--kv-device", "256MiB" if MODEL else "8MiB", "--draft-memory", "4MiB")
    address = free_address()
    good = good_requests()
    with serving(obole_command(model, address, (*pool, *LIMITS, "--log-format", "json")), address) as running:
        process = psutil.Process(running.process.pid)
        sizes: list[int] = []
        waits: list[float] = []

        async def soak() -> Crowd:
            client = Client(address)
            expected = await answers(client, good)
            await at_their_largest(client)
            assert await idle(client)
            crowd = Crowd(client, good, expected, CONNECTIONS, seed=REQUESTS)
            watching = asyncio.create_task(watch(client, lambda: None, waits, crowd.tally))
            for _ in range(3):
                await crowd.send(REQUESTS // 3)
                assert await idle(client), "something still runs, though nobody waits for it"
                await asyncio.sleep(REST_SECONDS + 1)  # then the server gives back what it does not use
                sizes.append(resident(process))
            watching.cancel()
            assert await answers(client, good) == expected
            assert await idle(client)
            return crowd

        crowd = asyncio.run(soak())
        status = running.stop()
        entries = [json.loads(line) for line in running.written().splitlines()]
    grown = sizes[-1] - sizes[0]
    print(f"\n{dict(crowd.tally.counts)}; /health after at most {max(waits):.3f} s; {grown / 2**20:+.1f} MiB")
    assert crowd.tally.faults == []
    assert crowd.tally.counts["answered"] > REQUESTS / 2
    assert crowd.tally.counts["given up"]
    assert crowd.tally.counts["malformed"]
    assert [entry for entry in entries if entry["level"] != "info" or entry.get("status", 200) >= 500] == []
    assert grown < GROWTH
    assert max(waits) < 5.0
    assert status == 0
