"""Moves blocks between the pool and the tiers below it: the engine's hands, where the scheduler has decided.

Blocks that the pool gives up go down in the step that takes their place. Blocks that it has just computed are written behind
for the SSD, a few in a step: at most `SHARE` of the engine's time goes into that, and what has to wait is written later, as
long as it is still in the pool or in RAM.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from obole.cache.managers import KVCacheManager
from obole.cache.pool import KVPool
from obole.cache.prefix import canonical, owner_tag
from obole.cache.tiers.interface import BlockName
from obole.cache.tiers.store import StoreStats, TierStore
from obole.config import EngineConfig, parse_ssd
from obole.engine.machine import total_memory
from obole.engine.recall import Recall
from obole.errors import ConfigError
from obole.speculate.memory import Memory
from obole.types import NamedBlock, StepPlan, Tier

FORMAT_VERSION = 1  # of what a block's bytes mean; a store takes other versions for somebody else's
SHARE = 0.03  # of the time of steps that writing behind may take on the engine's thread
SAVED_SECONDS = 0.05  # of that share may be saved up
BATCH = 8  # blocks written behind at a time
PAUSE_SECONDS = 0.1  # after the disk could not take a block
WAIT_SECONDS = 0.005  # that the engine sleeps at a time while it only waits for blocks: newcomers wait as long
CLOSE_SECONDS = 10.0


@dataclass(slots=True)
class Tiering:
    """Owns the store until `close`. `recall`: None where no texts are kept."""

    store: TierStore
    pool: KVPool
    cache: KVCacheManager
    clock: Callable[[], float]
    recall: Recall | None
    _unwritten: deque[NamedBlock]
    _held: dict[bytes, float] = field(default_factory=dict)  # until when, of blocks that may not be written yet
    _credit: float = 0.0  # seconds
    _paused_until: float = 0.0

    def carry(self, plan: StepPlan) -> None:
        """Before a step: take down what the pool gives up, then lay in what has come up."""
        if plan.demotions:  # those that the store has already too: it counts what the pool lets go of
            contents = self.pool.gather([named.block for named in plan.demotions])
            self.store.demote([BlockName(named.key, named.owner) for named in plan.demotions], contents)
        if plan.promotions:
            blocks, contents_up = zip(*plan.promotions, strict=True)
            self.pool.scatter(blocks, contents_up)

    def wait(self) -> None:
        """Nothing can be computed before some block comes up."""
        self.store.wait(WAIT_SECONDS)

    def after_step(self, seconds: float) -> None:
        """Write behind, for a share of what the step took."""
        if self.recall is not None:
            self.recall.feed()
        self._unwritten.extend(self.cache.ledger.take_named())
        self._credit = min(SAVED_SECONDS, self._credit + SHARE * seconds)
        while self._credit > 0 and self._unwritten and self.clock() >= self._paused_until:
            began = self.clock()
            self._write()
            self._credit -= self.clock() - began

    def when_idle(self) -> bool:
        """Write some of what is left, or sleep a little if the disk is behind. False if there is nothing more."""
        if self.recall is not None and self.recall.feed():
            return True
        if not self._unwritten:
            return False
        if self.clock() < self._paused_until:
            time.sleep(WAIT_SECONDS)
        else:
            self._write()
        return True

    def _write(self) -> None:
        """One batch: blocks that are in the pool, and blocks that have gone down to RAM meanwhile."""
        ledger, store, queue = self.cache.ledger, self.store, self._unwritten
        here: list[NamedBlock] = []
        below: list[NamedBlock] = []
        while queue and len(here) + len(below) < BATCH:
            named = queue.popleft()
            if not store.wants(named.key):
                continue
            if ledger.key_of[named.block] == named.key:
                here.append(named)
            elif store.where(named.key) is Tier.RAM:
                below.append(named)
        if here:
            store.persist([BlockName(n.key, n.owner) for n in here], self.pool.gather([n.block for n in here]))
        if below:
            store.persist_from_ram([BlockName(n.key, n.owner) for n in below])
        for named in (*here, *below):
            if (until := self._held.pop(named.key, 0.0)) > self.clock():
                store.hold([named.key], until)
        refused = [named for named in (*here, *below) if store.wants(named.key)]
        if refused:
            queue.extendleft(reversed(refused))
            self._paused_until = self.clock() + PAUSE_SECONDS

    def hold(self, keys: list[bytes], until: float) -> None:
        """Keep blocks in preference to others, now or once they are written."""
        self.store.hold(keys, until)
        now = self.clock()
        self._held = {key: end for key, end in self._held.items() if end > now}
        self._held |= {key: until for key in keys if self.store.wants(key)}

    def forget(self, tenant: str) -> int:
        """Delete a tenant's blocks and texts from the store. Those in the pool have lost their names before, and stay here."""
        if self.recall is not None:
            self.recall.forget(tenant)
        return self.store.forget(owner_tag(tenant))

    def stats(self) -> StoreStats:
        """From any thread."""
        return self.store.stats()

    def close(self) -> None:
        """Write what is left, for at most ten seconds, and close the store."""
        until = time.monotonic() + CLOSE_SECONDS
        self._unwritten.extend(self.cache.ledger.take_named())
        while self._unwritten and time.monotonic() < until:
            self._write()
            if self._paused_until > self.clock():
                time.sleep(WAIT_SECONDS)
                self._paused_until = 0.0
        self.store.close()


def writable_folder(name: str, size: int) -> tuple[Path, int]:
    """The folder, made if need be. Raises `ConfigError` for one that is of no use: once it is open, its failures are misses."""
    folder = Path(name).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"kv_ssd: {folder} cannot be written to ({error.strerror}): name another folder.") from None
    return folder, size


def open_tiering(
    config: EngineConfig, pool: KVPool, cache: KVCacheManager, memory: Memory, clock: Callable[[], float]
) -> Tiering | None:
    """Open the tiers that the settings ask for. Raises `ConfigError` for those that there is no room for."""
    if config.kv_ram is None and config.kv_ssd is None:
        return None
    ram, device, total = config.kv_ram or 0, pool.num_blocks * pool.block_bytes, total_memory()
    if ram and ram + device > total:
        raise ConfigError(
            f"kv_ram of {ram} bytes and the KV pool of {device} are more than the machine's memory ({total} bytes): "
            "set kv_ram or kv_device to less."
        )
    if 0 < ram < pool.block_bytes:
        raise ConfigError(f"kv_ram of {ram} bytes holds no block, which has {pool.block_bytes}: set it to more.")
    ssd = None if config.kv_ssd is None else writable_folder(*parse_ssd(config.kv_ssd))
    identity = blake3(canonical([FORMAT_VERSION, cache.identity])).digest()
    store = TierStore(pool.block_bytes, identity, ram, ssd, clock)
    recall = Recall(store, memory, clock) if ssd is not None and memory.limit else None
    return Tiering(store, pool, cache, clock, recall, deque(maxlen=pool.num_blocks))
