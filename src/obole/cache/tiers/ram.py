"""The RAM tier: blocks of one size in slots of one mapping. No thread and no lock of its own: the store's lock guards it."""

from __future__ import annotations

import contextlib
import itertools
import mmap
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from obole.cache.tiers.interface import BlockName, Bytes
from obole.cache.tiers.policy import Holding, Policy

_STRIDE = 64
_PATIENCE = 64  # blocks in use that are passed over before a reservation gives up


class Arena:
    """Slots for blocks, each held by any number of owners and free once the last has let go.

    Anonymous memory, which the system provides page by page as it is first written. The RAM tier, the queue of blocks on
    their way to disk and loads under way hold slots; none of them copies a block that another one has.
    """

    def __init__(self, block_bytes: int, slots: int) -> None:
        self.slots = slots
        stride = -(-block_bytes // _STRIDE) * _STRIDE
        self._map = mmap.mmap(-1, max(1, slots * stride), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without large pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        table: Bytes = np.frombuffer(self._map, dtype=np.uint8)[: slots * stride]
        self._table = table.reshape(slots, stride)[:, :block_bytes]
        self._free = list(range(slots - 1, -1, -1))
        self.holders = [0] * slots

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free slot, held once; None where there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self.holders[slot] = 1
        return slot

    def hold(self, slot: int) -> None:
        self.holders[slot] += 1

    def release(self, slot: int) -> None:
        self.holders[slot] -= 1
        if self.holders[slot] == 0:
            self._free.append(slot)

    def view(self, slot: int) -> Bytes:
        """The bytes of a slot, (block_bytes,). Good as long as somebody holds it."""
        view: Bytes = self._table[slot]
        return view


class Ram:
    """Which block is in which slot, at most `capacity` of them, and which goes next.

    First go copies of what the pool has taken up, then others by the policy. `leaving(name, slot)` is called with each of
    the latter before its slot is let go of.
    """

    def __init__(
        self, arena: Arena, capacity: int, policy: Policy, leaving: Callable[[BlockName, int], None], clock: Callable[[], float]
    ) -> None:
        self.capacity = capacity
        self._arena = arena
        self._policy = Holding(policy)
        self._leaving = leaving
        self._clock = clock
        self._slots: dict[bytes, int] = {}
        self._owners: dict[bytes, bytes] = {}
        self._copies: OrderedDict[bytes, None] = OrderedDict()  # of what the pool has; the others are the policy's
        self._reserved = 0  # slots taken and not yet named

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def find(self, key: bytes) -> int | None:
        return self._slots.get(key)

    def items(self) -> list[tuple[BlockName, int]]:
        return [(BlockName(key, self._owners[key]), slot) for key, slot in self._slots.items()]

    def rise(self, key: bytes) -> None:
        """The pool takes up a block that is here: what stays is a copy."""
        if key not in self._copies:
            self._policy.remove(key)
            self._copies[key] = None

    def sink(self, key: bytes) -> None:
        """The pool gives up a block that is here."""
        if key in self._copies:
            del self._copies[key]
            self._policy.add(key)
        else:
            self._policy.hit(key)

    def reserve(self, *, copy: bool) -> int | None:
        """A slot to put a block into, held once for the caller. Others make room, for a copy only copies do.

        None where there is no room, or all that might make it is in use.
        """
        while len(self._slots) + self._reserved >= self.capacity:
            if not (self._drop_copy() or (not copy and self._drop())):
                return None
        slot = self._arena.take()
        if slot is not None:
            self._reserved += 1
        return slot

    def name(self, name: BlockName, slot: int, *, copy: bool) -> None:
        """A reserved slot now has the contents of a block. Where the block is here already the slot is let go of."""
        self._reserved -= 1
        if name.key in self._slots:
            self._arena.release(slot)
            return
        self._slots[name.key] = slot
        self._owners[name.key] = name.owner
        if copy:
            self._copies[name.key] = None
        else:
            self._policy.add(name.key)

    def give_back(self, slot: int) -> None:
        """A reserved slot that is not needed after all."""
        self._reserved -= 1
        self._arena.release(slot)

    def hold(self, key: bytes, until: float) -> None:
        self._policy.hold(key, until)

    def forget(self, owner: bytes) -> set[bytes]:
        """Drop all blocks of an owner; their keys."""
        gone = {key for key, other in self._owners.items() if other == owner}
        for key in gone:
            if key in self._copies:
                del self._copies[key]
            else:
                self._policy.remove(key)
            self._policy.release(key)
            self._remove(key)
        return gone

    def _drop_copy(self) -> bool:
        for key in itertools.islice(self._copies, _PATIENCE):
            if self._arena.holders[self._slots[key]] == 1:  # else giving it up would free nothing yet
                del self._copies[key]
                self._remove(key)
                return True
        return False

    def _drop(self) -> bool:
        spared: list[bytes] = []
        dropped = False
        while not dropped and len(spared) < _PATIENCE:
            try:
                key = self._policy.victim(self._clock())
            except KeyError:
                break
            if self._arena.holders[self._slots[key]] > 1:
                spared.append(key)
                continue
            self._leaving(BlockName(key, self._owners[key]), self._slots[key])
            self._remove(key)
            dropped = True
        for key in spared:
            self._policy.add(key)
        return dropped

    def _remove(self, key: bytes) -> None:
        del self._owners[key]
        self._arena.release(self._slots.pop(key))
