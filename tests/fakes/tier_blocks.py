"""Blocks whose contents follow from their number, so that whoever finds one can say whether it is right."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from blake3 import blake3

from obole.cache.tiers.interface import BlockName, Bytes
from obole.cache.tiers.store import TierStore
from obole.types import Tier

SIZE = 1024
FOLDER = Path("/cache")
IDENTITY = b"i" * 32
OWNER = b"owner of a block"
OTHER = b"somebody else's."


def key(number: int) -> bytes:
    return blake3(b"block %d" % number).digest() + b"\0\0"


def name(number: int, owner: bytes = OWNER) -> BlockName:
    return BlockName(key(number), owner)


def content(number: int, size: int = SIZE) -> Bytes:
    return np.frombuffer(blake3(b"content %d" % number).digest(length=size), np.uint8)


def contents(numbers: Iterable[int], size: int = SIZE) -> Bytes:
    return np.stack([content(number, size) for number in numbers])


def persist(store: TierStore, numbers: Sequence[int], owner: bytes = OWNER, *, settle: bool = True) -> None:
    store.persist([name(number, owner) for number in numbers], contents(numbers, store.block_bytes))
    if settle:
        store.flush()


def demote(store: TierStore, numbers: Sequence[int], owner: bytes = OWNER) -> None:
    store.demote([name(number, owner) for number in numbers], contents(numbers, store.block_bytes))


def fetch(store: TierStore, numbers: Sequence[int], seconds: float = 10.0) -> list[Tier]:
    """Load blocks; where each leading one that came was. One with wrong contents fails the test."""
    load = store.load([key(number) for number in numbers])
    until = time.monotonic() + seconds
    while not load.over and time.monotonic() < until:
        store.wait(0.05)
    assert load.over, f"A load of {len(numbers)} blocks was not over after {seconds} s."
    found = []
    for i in range(load.ready):
        assert bytes(load.block(i)) == bytes(content(numbers[i], store.block_bytes)), f"Block {numbers[i]} is wrong."
        found.append(load.tier(i))
    load.close()
    return found


def there(store: TierStore, numbers: Iterable[int]) -> list[int]:
    """The blocks that come, each asked for alone."""
    return [number for number in numbers if fetch(store, [number])]
