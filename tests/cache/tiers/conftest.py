"""Stores that are closed when a test ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fakes.faulty_disk import FaultyDisk
from fakes.tier_blocks import FOLDER, IDENTITY, SIZE
from obole.cache.tiers.io import Disk
from obole.cache.tiers.store import TierStore

BUDGET = 256 * SIZE  # segments of eight blocks


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def open_store() -> Iterator[Callable[..., TierStore]]:
    stores: list[TierStore] = []

    def open_one(
        disk: Disk | None, *, ram: int = 0, budget: int = BUDGET, identity: bytes = IDENTITY, **more: Any
    ) -> TierStore:
        size = more.pop("size", SIZE)
        ssd = None if disk is None else (more.pop("folder", FOLDER), budget)
        stores.append(TierStore(size, identity, ram * size, ssd, more.pop("clock", None) or _clock(), disk=disk, **more))
        return stores[-1]

    yield open_one
    for store in stores:
        if isinstance(store_disk := _disk_of(store), FaultyDisk):
            store_disk.hanging.set()
            store_disk.latency = 0.0
        store.close()


def _disk_of(store: TierStore) -> object:
    return store._ssd._disk if store._ssd is not None else None


def _clock() -> Callable[[], float]:
    """A clock on which nothing ever happens at once."""
    ticks = itertools.count()
    return lambda: next(ticks) * 1e-6
