"""RAM and SSD as one: `TierStore`, the `Tiers` of the engine.

    the pool gives blocks up -> demote -> RAM -> (its policy gives them up) -> write queue -> SSD
    the pool has computed    -> persist ---------------------------------------> write queue -> SSD
    a prompt begins with     -> load <- RAM, or SSD, which puts them into RAM on their way

A block is copied once on its way down, from the pool into a slot of the arena, and not at all on its way up: what the engine
sees of a load is the slot itself, which the disk was read into. One lock guards all books; no file is touched while it is held.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from obole.cache.tiers.documents import document_key, pack_document, unpack_document
from obole.cache.tiers.interface import BlockName, Bytes
from obole.cache.tiers.io import Disk, OsDisk
from obole.cache.tiers.load import StoreLoad
from obole.cache.tiers.policy import Lru
from obole.cache.tiers.ram import Arena, Ram
from obole.cache.tiers.reader import STALL_SECONDS, Readers
from obole.cache.tiers.ssd import Ssd, fault_counts
from obole.errors import ConfigError
from obole.types import Tier

QUEUE_BYTES = 64 << 20  # of blocks that wait to be written
QUEUE_BLOCKS = 8  # at least
FLUSH_SECONDS = 60.0  # that a disk is waited for
CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class TierStats:
    """Blocks that are there, and blocks and bytes moved since the store was opened."""

    blocks: int
    bytes: int
    blocks_written: int
    blocks_read: int
    bytes_written: int
    bytes_read: int
    bandwidth: float | None  # bytes a second, of reads from SSD, of copies into RAM; None: nothing measured yet


@dataclass(frozen=True, slots=True)
class StoreStats:
    """`misses`: what was found on disk and not served, by reason. `dropped_writes`: blocks that the disk had no time for."""

    tiers: Mapping[Tier, TierStats]
    misses: Mapping[str, int]
    dropped_writes: int
    write_errors: int
    documents: int
    document_bytes: int
    disk_bytes: int  # of all records known in the folder, other processes' included


class TierStore:
    """Blocks of one size and one identity, in RAM, on SSD, or both.

    `identity`: 32 bytes, a digest of all that fixes the contents of a block beside its key. `ssd`: folder and bytes; the
    bytes count everything in it, of other identities and processes too. Raises ConfigError where a tier has too little room.
    """

    def __init__(
        self,
        block_bytes: int,
        identity: bytes,
        ram_bytes: int,
        ssd: tuple[Path, int] | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        disk: Disk | None = None,
        queue_bytes: int = QUEUE_BYTES,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        if len(identity) != 32:
            raise ConfigError(f"The identity of a store is 32 bytes, not {len(identity)}.")
        if 0 < ram_bytes < block_bytes:
            raise ConfigError(f"A RAM tier for blocks of {block_bytes} bytes needs at least so many, not {ram_bytes}.")
        self.block_bytes = block_bytes
        ram_slots = ram_bytes // block_bytes
        queue_slots = max(QUEUE_BLOCKS, queue_bytes // block_bytes) if ssd else 0
        self._clock = clock
        self._lock = threading.Condition()
        self._arena = Arena(block_bytes, ram_slots + queue_slots)
        self._ram = Ram(self._arena, ram_slots, Lru(), self._leaves_ram, clock) if ram_slots else None
        self._ssd: Ssd | None = None
        self._readers: Readers | None = None
        if ssd is not None:
            disk = disk or OsDisk()
            self._ssd = Ssd(
                disk, *ssd, block_bytes, identity, self._arena, queue_slots, self._lock, clock, self._drop_from_ram
            )  # fmt: skip
            self._readers = Readers(
                disk, self._ssd.index, self._arena, self._ram, block_bytes, self._lock, self._progressed,
                stall_seconds=stall_seconds,
            )  # fmt: skip
        self._progress = self._seen = 0
        self._ram_written = self._ram_read = 0
        self._copied_seconds = 0.0
        self._closed = False

    # Tiers

    def where(self, key: bytes) -> Tier | None:
        with self._lock:
            if self._ram is not None and key in self._ram:
                return Tier.RAM
            if self._ssd is not None:
                if key in self._ssd.pending:
                    return Tier.RAM
                if key in self._ssd.index.blocks:
                    return Tier.SSD
            return None

    def demote(self, names: Sequence[BlockName], blocks: Bytes) -> None:
        with self._lock:
            if self._closed:
                return
            for name, block in zip(names, blocks, strict=True):
                if self._ram is None:
                    self._sink(name, block)
                elif name.key in self._ram:
                    self._ram.sink(name.key)
                elif (slot := self._ram.reserve(copy=False)) is not None:
                    begun = time.perf_counter()
                    self._arena.view(slot)[:] = block
                    self._copied_seconds += time.perf_counter() - begun
                    self._ram.name(name, slot, copy=False)
                    self._ram_written += 1
                else:  # all of RAM is on its way up
                    self._sink(name, block)

    def persist(self, names: Sequence[BlockName], blocks: Bytes) -> None:
        with self._lock:
            if self._ssd is not None and not self._closed:
                for name, block in zip(names, blocks, strict=True):
                    self._ssd.index.policy.missed(name.key)
                    self._ssd.index.policy.rose(name.key)
                    self._persist(name, block)

    def persist_from_ram(self, names: Sequence[BlockName]) -> None:
        """`persist` for blocks that have gone down to RAM meanwhile; others are passed over. Nothing is copied."""
        with self._lock:
            if self._ssd is None or self._ram is None or self._closed:
                return
            for name in names:
                if (slot := self._ram.find(name.key)) is not None:
                    self._ssd.index.policy.missed(name.key)
                    self._ssd.index.policy.rose(name.key)
                    self._ssd.enqueue(name, slot)

    def wants(self, key: bytes) -> bool:
        with self._lock:
            return self._ssd is not None and self._ssd.wants(key)

    def seconds(self, keys: Sequence[bytes]) -> float:
        with self._lock:
            if self._ssd is None or self._readers is None:
                return 0.0
            sizes: list[int] = []
            last = None
            for key in keys:
                placed = self._ssd.index.blocks.get(key)
                if placed is None or key in self._ssd.pending or (self._ram is not None and key in self._ram):
                    last = None
                elif last is not None and last.segment is placed.segment and placed.offset - last.offset >= 0:
                    sizes[-1] += placed.offset - last.offset
                    last = placed
                else:
                    sizes.append(placed.length)
                    last = placed
            return self._readers.seconds(sizes) if sizes else 0.0

    def load(self, keys: Sequence[bytes]) -> StoreLoad:
        """Blocks up to the first that no tier has. Those in RAM are ready at once."""
        with self._lock:
            found = self._find(keys)
            load = StoreLoad(len(found), self._lock, self._arena.release, lambda: self._stalled(load))
            on_disk = []
            for index, (key, slot) in enumerate(found):
                if slot is not None:
                    self._arena.hold(slot)
                    load.arrive(index, self._arena.view(slot), Tier.RAM, slot)
                    self._ram_read += 1
                elif self._ssd is not None:
                    on_disk.append((index, self._ssd.index.blocks[key]))
            for key, _ in reversed(found):  # the beginning of a prefix last, so that it goes last
                if self._ssd is not None:
                    self._ssd.index.policy.hit(key)
                    self._ssd.index.policy.rose(key)
                if self._ram is not None and key in self._ram:
                    self._ram.rise(key)
            if on_disk and self._readers is not None:
                self._readers.submit(load, on_disk)
            return load

    def wait(self, seconds: float) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._progress != self._seen, max(0.0, seconds))
            self._seen = self._progress

    def hold(self, keys: Sequence[bytes], until: float) -> None:
        with self._lock:
            for key in keys:
                if self._ram is not None:
                    self._ram.hold(key, until)
                if self._ssd is not None:
                    self._ssd.index.policy.hold(key, until)

    def forget(self, owner: bytes) -> int:
        """Nothing of the owner's is found from here on; its files are overwritten behind, which `flush` waits for."""
        with self._lock:
            gone = self._ram.forget(owner) if self._ram is not None else set()
            if self._ssd is not None:
                gone |= self._ssd.forget(owner)
            return len(gone)

    def flush(self) -> None:
        """A disk that does not answer is waited for a minute."""
        if self._ssd is not None:
            self._ssd.flush(FLUSH_SECONDS)

    def close(self) -> None:
        """Loads under way end as they are; their blocks stay good until they are closed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._ssd is not None and self._readers is not None:
            self._write_ram()
            self._ssd.flush(CLOSE_SECONDS)
            self._ssd.stop(CLOSE_SECONDS)
            self._readers.stop(1.0)

    # Documents

    def put_document(self, owner: bytes, name: bytes, data: bytes) -> None:
        """Keep a small byte string of an owner on SSD, written behind; it replaces the one of the same name. All of them may
        take a sixteenth of the SSD's bytes, beyond which the oldest go; one that is larger is dropped and counted."""
        if self._ssd is not None and not self._closed:
            with self._lock:
                self._ssd.put_document(owner, document_key(owner, name), pack_document(name, data))

    def documents(self) -> Iterator[tuple[bytes, bytes, bytes, float]]:
        """Owner, name, bytes and age in seconds of every document that has been written, newest first. Reads as it goes."""
        if self._ssd is not None:
            for owner, payload, written in self._ssd.documents():
                yield (owner, *unpack_document(payload), max(0.0, time.time() - written / 1e9))

    # Numbers

    def stats(self) -> StoreStats:
        with self._lock:
            size, tiers = self.block_bytes, {}
            if self._ram is not None:
                copied = self._ram_written * size
                tiers[Tier.RAM] = TierStats(
                    len(self._ram), len(self._ram) * size, self._ram_written, self._ram_read, copied, self._ram_read * size,
                    copied / self._copied_seconds if self._copied_seconds else None,
                )  # fmt: skip
            if self._ssd is None or self._readers is None:
                return StoreStats(tiers, {}, 0, 0, 0, 0, 0)
            index = self._ssd.index
            tiers[Tier.SSD] = TierStats(
                len(index.blocks), len(index.blocks) * size, self._ssd.written, self._readers.blocks, self._ssd.written_bytes,
                self._readers.bytes, self._readers.times.bandwidth,
            )  # fmt: skip
            return StoreStats(
                tiers, fault_counts(index.faults), self._ssd.dropped, self._ssd.write_errors, len(index.documents),
                index.document_bytes, sum(segment.end for segment in index.segments.values()),
            )  # fmt: skip

    # Helpers; the lock is held

    def _persist(self, name: BlockName, block: Bytes) -> None:
        if self._ssd is None or not self._ssd.wants(name.key):
            return
        slot = self._ram.find(name.key) if self._ram is not None else None
        if slot is not None:
            self._ssd.enqueue(name, slot)
            return
        slot = self._arena.take() if self._ssd.room() else None
        if slot is None:
            self._ssd.dropped += 1
            return
        self._arena.view(slot)[:] = block
        self._ssd.enqueue(name, slot)
        self._arena.release(slot)

    def _leaves_ram(self, name: BlockName, slot: int) -> None:
        if self._ssd is not None and self._ssd.index.policy.sank(name.key):
            self._ssd.enqueue(name, slot)

    def _sink(self, name: BlockName, block: Bytes) -> None:
        """A block for which RAM has no room goes on to SSD."""
        if self._ssd is not None and self._ssd.index.policy.sank(name.key):
            self._persist(name, block)

    def _write_ram(self) -> None:
        """What is in RAM alone is written down, as far as the time to close allows. Takes the lock itself."""
        until = time.monotonic() + CLOSE_SECONDS
        with self._lock:
            for name, slot in self._ram.items() if self._ram is not None else []:
                if self._ssd is None or not self._ssd.wants(name.key):
                    continue
                if not self._lock.wait_for(self._ssd.room, max(0.0, until - time.monotonic())):
                    return
                self._ssd.enqueue(name, slot)

    def _drop_from_ram(self, owner: bytes) -> None:
        if self._ram is not None:
            self._ram.forget(owner)

    def _find(self, keys: Sequence[bytes]) -> list[tuple[bytes, int | None]]:
        """Leading blocks that are somewhere: their slots, or None for those on disk."""
        found: list[tuple[bytes, int | None]] = []
        for key in keys:
            slot = self._ram.find(key) if self._ram is not None else None
            if slot is None and self._ssd is not None:
                pending = self._ssd.pending.get(key)
                slot = pending.slot if pending is not None else None
                if slot is None and key not in self._ssd.index.blocks:
                    break
            elif slot is None:
                break
            found.append((key, slot))
        return found

    def _progressed(self) -> None:
        self._progress += 1
        self._lock.notify_all()

    def _stalled(self, load: StoreLoad) -> bool:
        return self._readers is not None and self._readers.stalled(load)
