"""What the engine asks of the tiers below the device pool, RAM and SSD. No torch.

Blocks go down when the pool gives them up, and come up when a prompt begins with them. To a tier a block is a key and
bytes: the key is the one of `cache/prefix.py` with the suffix of its cache group, and so names all that the contents depend
on. The engine's thread is the only caller; reading and writing files happens on threads of the store's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from obole.types import Tier

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class BlockName:
    """`owner`: 16 bytes that stand for the tenant, by which its blocks are found when it wants them deleted."""

    key: bytes
    owner: bytes


class Load(Protocol):
    """Blocks on their way up, in the order in which they were asked for. The engine owns it until `close`."""

    @property
    def ready(self) -> int:
        """Leading blocks whose bytes are here and have passed their checks. Never decreases."""

    @property
    def over(self) -> bool:
        """No more blocks become ready: all are, or the next one turned out to be missing or damaged."""

    def block(self, index: int) -> Bytes:
        """Bytes (block_bytes,) of block `index` < `ready`. Good until `close`."""

    def tier(self, index: int) -> Tier:
        """Where block `index` < `ready` was read from."""

    def close(self) -> None:
        """Done with it, or no longer wanted: reads that have not begun are dropped. May be called again."""


class Tiers(Protocol):
    """RAM and SSD as one. No method raises for what disks do, and none but `flush` and `close` waits for one."""

    def where(self, key: bytes) -> Tier | None:
        """The fastest tier that has a block, or None. O(1). What is there may still turn out to be damaged."""

    def demote(self, names: Sequence[BlockName], blocks: Bytes) -> None:
        """The pool has given up these blocks, (n, block_bytes), which are copied. Some may be known already."""

    def persist(self, names: Sequence[BlockName], blocks: Bytes) -> None:
        """Write down blocks that the pool has just computed and keeps: so that they outlive the process. Copied; written
        behind, or dropped where the disk cannot keep up."""

    def wants(self, key: bytes) -> bool:
        """Whether `persist` has any use for this block: False without an SSD, or where the block is there already."""

    def seconds(self, keys: Sequence[bytes]) -> float:
        """Estimate of the time until all of these blocks are ready, from bandwidths measured so far."""

    def load(self, keys: Sequence[bytes]) -> Load:
        """Begin to bring blocks up."""

    def wait(self, seconds: float) -> None:
        """Sleep until some load has made progress, at most so long."""

    def hold(self, keys: Sequence[bytes], until: float) -> None:
        """Keep these blocks until then (seconds on the clock of the store) in preference to others."""

    def forget(self, owner: bytes) -> int:
        """Delete the blocks of an owner from every tier, files included. Returns how many there were."""

    def flush(self) -> None:
        """Wait until what was to be written is on disk."""

    def close(self) -> None:
        """Flush, and stop the threads."""
