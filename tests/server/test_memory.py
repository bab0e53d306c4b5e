"""Memory goes back to the system in the pauses of the engine, once in each."""

from __future__ import annotations

import ctypes
import sys

import psutil
import pytest

from obole.server.memory import REST_SECONDS, Rest, give_back


def test_once_in_each_pause_that_lasts():
    now, busy = 0.0, True
    rest = Rest(lambda: busy, lambda: now)
    told: list[float] = []
    for tick in range(1000):
        now = tick / 10
        busy = now < 5 or 6 <= now < 20 or 30 <= now < 31
        if rest.look():
            told.append(now)
    assert told == [20 + REST_SECONDS, 31 + REST_SECONDS]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_what_is_free_between_what_stays_goes_back():
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("another C library")
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    size, count = 60_000, 1000  # below what glibc maps apart
    places = [libc.malloc(size) for _ in range(count)]
    for place in places:
        ctypes.memset(place, 1, size)
    stays = places[::50]
    for place in set(places) - set(stays):
        libc.free(place)
    before = psutil.Process().memory_info().rss
    give_back()
    assert before - psutil.Process().memory_info().rss > 0.8 * size * count
    for place in stays:
        libc.free(place)
