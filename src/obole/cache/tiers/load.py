"""Blocks on their way up, as the engine sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from obole.cache.tiers.interface import Bytes
from obole.types import Tier


class StoreLoad:
    """A `Load` of blocks from RAM and SSD. The store's lock guards what the reading threads change.

    It holds the slots of its blocks until `close`; a read that is under way then lets go of its own when it returns.
    """

    def __init__(
        self, count: int, lock: threading.Condition, release: Callable[[int], None], stalled: Callable[[], bool]
    ) -> None:
        self.count = count  # blocks that were there when it began
        self.closed = False
        self.failed = count  # first block that turned out to be missing or damaged
        self._lock = lock
        self._release = release
        self._stalled = stalled
        self._views: list[Bytes | None] = [None] * count
        self._tiers: list[Tier] = [Tier.RAM] * count
        self._slots: list[int] = []
        self._ready = 0

    @property
    def ready(self) -> int:
        return self._ready

    @property
    def over(self) -> bool:
        return self.closed or self._ready >= self.failed or self._stalled()

    def block(self, index: int) -> Bytes:
        view = self._views[index] if 0 <= index < self._ready else None
        if view is None:
            raise IndexError(f"Block {index} is not ready: {self._ready} are.")
        return view

    def tier(self, index: int) -> Tier:
        if not 0 <= index < self._ready:
            raise IndexError(f"Block {index} is not ready: {self._ready} are.")
        return self._tiers[index]

    def close(self) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = True
            for slot in self._slots:
                self._release(slot)
            self._slots.clear()

    def arrive(self, index: int, view: Bytes, tier: Tier, slot: int | None) -> None:
        """A block is here. `slot`: held for this load, which lets go of it; the lock is held."""
        if self.closed:
            if slot is not None:
                self._release(slot)
            return
        self._views[index] = view
        self._tiers[index] = tier
        if slot is not None:
            self._slots.append(slot)
        while self._ready < self.failed and self._views[self._ready] is not None:
            self._ready += 1

    def fail(self, index: int) -> None:
        """A block will not come, and so none behind it is of use; the lock is held."""
        self.failed = min(self.failed, max(index, self._ready))
