"""RAM and SSD as dictionaries, with a disk that is as slow and as faulty as a test wants it."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from obole.cache.tiers.interface import BlockName, Bytes
from obole.types import Tier


@dataclass
class FakeTiers:
    """`seconds_per_block`: of the SSD; infinite: it hangs. `expected`: what `seconds` believes it is, if something else.

    `damaged`: keys of blocks that are found to be so when they are read, and then gone; `failure_rate`: chance of others.
    """

    clock: Callable[[], float]
    ram_blocks: int = 1000
    ssd_blocks: int = 0
    latency: float = 0.0
    seconds_per_block: float = 0.0
    expected: float | None = None
    failure_rate: float = 0.0
    damaged: set[bytes] = field(default_factory=set)
    seed: int = 0
    blocks: dict[Tier, OrderedDict[bytes, Bytes]] = field(
        default_factory=lambda: {Tier.RAM: OrderedDict(), Tier.SSD: OrderedDict()}
    )
    owners: dict[bytes, bytes] = field(default_factory=dict)
    held: dict[bytes, float] = field(default_factory=dict)
    loads: list[FakeLoad] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self.blocks = {Tier.RAM: OrderedDict(), Tier.SSD: OrderedDict()}
        self.rng = random.Random(self.seed)

    def where(self, key: bytes) -> Tier | None:
        return next((tier for tier, blocks in self.blocks.items() if key in blocks), None)

    def demote(self, names: Sequence[BlockName], blocks: Bytes) -> None:
        assert len(names) == len(blocks)
        for name, data in zip(names, blocks, strict=True):
            self._put(Tier.RAM, name, data)

    def persist(self, names: Sequence[BlockName], blocks: Bytes) -> None:
        assert len(names) == len(blocks)
        for name, data in zip(names, blocks, strict=True):
            self._put(Tier.SSD, name, data)

    def wants(self, key: bytes) -> bool:
        return self.ssd_blocks > 0 and key not in self.blocks[Tier.SSD]

    def seconds(self, keys: Sequence[bytes]) -> float:
        if self.expected is not None:
            return self.expected * len(keys)
        return self.latency + sum(self.seconds_per_block for key in keys if self.where(key) is not Tier.RAM)

    def load(self, keys: Sequence[bytes]) -> FakeLoad:
        load = FakeLoad(self, list(keys))
        self.loads.append(load)
        return load

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)

    def hold(self, keys: Sequence[bytes], until: float) -> None:
        self.held |= dict.fromkeys(keys, until)

    def forget(self, owner: bytes) -> int:
        keys = {key for key, own in self.owners.items() if own == owner}
        for blocks in self.blocks.values():
            for key in keys & blocks.keys():
                del blocks[key]
        return len(keys)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def read(self, key: bytes) -> tuple[Tier, Bytes] | None:
        tier = self.where(key)
        if tier is None:
            return None
        if key in self.damaged or (tier is Tier.SSD and self.rng.random() < self.failure_rate):
            del self.blocks[tier][key]
            return None
        self.blocks[tier].move_to_end(key)
        return tier, self.blocks[tier][key].copy()

    def _put(self, tier: Tier, name: BlockName, data: Bytes) -> None:
        blocks, most = self.blocks[tier], self.ram_blocks if tier is Tier.RAM else self.ssd_blocks
        self.owners[name.key] = name.owner
        blocks[name.key] = data.copy()
        blocks.move_to_end(name.key)
        while len(blocks) > most:
            key, oldest = blocks.popitem(last=False)
            if tier is Tier.RAM:
                self._put(Tier.SSD, BlockName(key, self.owners[key]), oldest)


class FakeLoad:
    """Reads a block when its time has come. Bytes handed out are overwritten on `close`, so that using them is noticed."""

    def __init__(self, tiers: FakeTiers, keys: list[bytes]) -> None:
        self.tiers, self.keys = tiers, keys
        self.found: list[tuple[Tier, Bytes]] = []
        self.due = tiers.clock() + tiers.latency
        self.failed = self.closed = False

    @property
    def ready(self) -> int:
        assert not self.closed
        while len(self.found) < len(self.keys) and not self.failed:
            key = self.keys[len(self.found)]
            slow = self.tiers.where(key) is Tier.SSD
            due = self.due + self.tiers.seconds_per_block if slow else -math.inf
            if due > self.tiers.clock():
                break
            found = self.tiers.read(key)
            if found is None:
                self.failed = True
            else:
                self.found.append(found)
                self.due = max(self.due, due)
        return len(self.found)

    @property
    def over(self) -> bool:
        return self.ready == len(self.keys) or self.failed

    def block(self, index: int) -> Bytes:
        assert index < self.ready
        return self.found[index][1]

    def tier(self, index: int) -> Tier:
        assert index < self.ready
        return self.found[index][0]

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for _, data in self.found:
                data[:] = 255
