"""The SSD tier: the log, its writer thread with a bounded queue, and what it does when the disk does not do its part."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from obole.cache.tiers.index import Index
from obole.cache.tiers.interface import BlockName
from obole.cache.tiers.io import Buffer, Disk
from obole.cache.tiers.log import Draft, Log, read_record
from obole.cache.tiers.policy import LogPolicy
from obole.cache.tiers.ram import Arena
from obole.cache.tiers.record import MAX_KEY, OWNER_BYTES, Fault, Header, Kind, digest, extent
from obole.errors import ConfigError

SEGMENT_BYTES = 64 << 20
MIN_SEGMENTS = 6  # one of each queue that is written, one for survivors, and some to give up
SEGMENTS = 64  # of the budget, unless they would be larger than that, or too small for
SMALLEST = 8  # records each
DOCUMENT_SHARE = 1 / 16  # of the budget
BATCH_BYTES = 4 << 20  # written at a time
REFRESH_SECONDS = 5.0  # between looks at what other processes did to the folder
REST_SECONDS = 10.0  # after a failed write, doubled with each one more
LONGEST_REST = 300.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
START_SECONDS = 30.0  # that opening waits for the folder to be read; the rest is read behind


@dataclass(slots=True, eq=False)
class Pending:
    """A block (in a slot, held by this) or document (in bytes) that waits to be written. `cancelled`: forgotten meanwhile."""

    kind: Kind
    name: BlockName
    written: int
    slot: int | None
    data: Buffer
    cancelled: bool = False


class Ssd:
    """The store's lock guards everything but the log, which is the writer's alone."""

    def __init__(
        self, disk: Disk, folder: Path, budget: int, block_bytes: int, identity: bytes, arena: Arena, queue_slots: int,
        lock: threading.Condition, clock: Callable[[], float], forgotten: Callable[[bytes], None],
    ) -> None:  # fmt: skip
        smallest = MIN_SEGMENTS * SMALLEST * extent(block_bytes)
        if budget < smallest:
            raise ConfigError(
                f"kv_ssd of {budget} bytes is too small for blocks of {block_bytes}: give it {smallest} bytes or more."
            )
        self._segment_bytes = max(min(SEGMENT_BYTES, budget // SEGMENTS), SMALLEST * extent(block_bytes))
        self.document_bytes = int(budget * DOCUMENT_SHARE)
        self.index = Index(block_bytes, identity, LogPolicy(budget // extent(block_bytes)), self.document_bytes)
        self.written = self.written_bytes = self.dropped = self.write_errors = 0
        self._disk = disk
        self._arena = arena
        self._lock = lock
        self._clock = clock
        self._identity = identity
        self._queue_slots = queue_slots
        self._forgotten = forgotten
        self._log = Log(disk, folder, budget, self._segment_bytes, self.index, lock, clock, self._told_to_forget)
        self._queue: deque[Pending] = deque()
        self.pending: dict[bytes, Pending] = {}  # blocks of the queue and of the batch being written
        self._waiting_slots = 0
        self._waiting_documents = 0
        self._forget: deque[tuple[bytes, int]] = deque()
        self._stamp = 0
        self._rest_until = 0.0
        self._failures = 0
        self._asked = self._synced = 0  # flushes
        self._stopping = False
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._work, name="obole-write", daemon=True)
        self._thread.start()
        self._started.wait(START_SECONDS)

    # The engine's thread, the lock held

    @property
    def resting(self) -> bool:
        return self._clock() < self._rest_until

    def wants(self, key: bytes) -> bool:
        return key not in self.index.blocks and key not in self.pending and not self.resting

    def room(self) -> bool:
        """Whether one more block may wait to be written; else it is to be dropped."""
        return self._waiting_slots < self._queue_slots

    def enqueue(self, name: BlockName, slot: int) -> None:
        """Write a block behind, from a slot that is held from now on until it is written. Dropped where the disk is behind."""
        if not self.wants(name.key):
            return
        _check(name)
        if not self.room():
            self.dropped += 1
            return
        self._arena.hold(slot)
        self._waiting_slots += 1
        pending = Pending(Kind.BLOCK, name, self._stamp_for(name.owner), slot, self._arena.view(slot))
        self.pending[name.key] = pending
        self._queue.append(pending)
        self._lock.notify_all()

    def put_document(self, owner: bytes, key: bytes, data: bytes) -> None:
        if self.resting or len(data) > min(self._segment_bytes // 2, self.document_bytes):
            self.dropped += 1
            return
        _check(BlockName(key, owner))
        self._waiting_documents += len(data)
        while self._waiting_documents > self.document_bytes:
            oldest = next((p for p in self._queue if p.kind is Kind.DOCUMENT), None)
            if oldest is None:  # all that wait are being written
                break
            self._queue.remove(oldest)
            self._waiting_documents -= len(oldest.data)
            self.dropped += 1
        self._queue.append(Pending(Kind.DOCUMENT, BlockName(key, owner), self._stamp_for(owner), None, data))
        self._lock.notify_all()

    def forget(self, owner: bytes) -> set[bytes]:
        """Serve nothing of an owner any more, and have it overwritten. Keys of its blocks, those waiting included."""
        until = self._stamp_for(owner)
        gone = self.index.forget(owner, until) | self._cancel(owner)
        self._forget.append((owner, until))
        self._lock.notify_all()
        return gone

    def _cancel(self, owner: bytes) -> set[bytes]:
        """Nothing of an owner that waits is written any more. The keys of its blocks."""
        gone = set()
        for pending in [*self._queue, *self.pending.values()]:
            if pending.name.owner == owner and not pending.cancelled:
                pending.cancelled = True
                if pending.kind is Kind.BLOCK:
                    gone.add(pending.name.key)
                    self.pending.pop(pending.name.key, None)
        return gone

    def _told_to_forget(self, owner: bytes) -> None:
        """Another process had an owner's blocks deleted; called by the log."""
        self._cancel(owner)
        self._forgotten(owner)

    def _stamp_for(self, owner: bytes) -> int:
        """Nanoseconds since 1970, never the same twice, and after all that the owner wanted forgotten, whatever clocks say."""
        self._stamp = max(self._stamp + 1, time.time_ns(), self.index.forgotten.get(owner, 0) + 1)
        return self._stamp

    # Waiting for the disk

    def flush(self, seconds: float) -> bool:
        """Wait until everything asked for so far is on disk, or is known to be lost. False where the time was too short."""
        with self._lock:
            self._asked += 1
            asked = self._asked
            self._lock.notify_all()
            return self._lock.wait_for(lambda: self._synced >= asked or not self._thread.is_alive(), seconds)

    def stop(self, seconds: float) -> None:
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        self._thread.join(seconds)

    def documents(self) -> Iterator[tuple[bytes, bytes, int]]:
        """Owner, payload and time of writing (nanoseconds since 1970) of every document on disk, newest first."""
        with self._lock:
            found = sorted(self.index.documents.values(), key=lambda placed: -placed.written)
        for placed in found:
            draft: Draft | Fault
            try:
                fd = self._disk.open(placed.segment.path)
                try:
                    draft = read_record(self._disk, fd, placed, self._identity)
                finally:
                    self._disk.close(fd)
            except FileNotFoundError:
                draft = Fault.VANISHED
            except OSError:
                draft = Fault.IO_ERROR
            if isinstance(draft, Fault):
                with self._lock:
                    self.index.faults[draft] += 1
                    self.index.drop(placed)
            else:
                yield placed.owner, bytes(draft.payload), placed.written

    # The writer's thread

    def _work(self) -> None:
        self._try(self._log.refresh)
        self._started.set()
        refreshed = time.monotonic()
        while True:
            with self._lock:
                if not (self._queue or self._forget or self._asked > self._synced or self._stopping):
                    self._lock.wait(max(0.2, refreshed + REFRESH_SECONDS - time.monotonic()))
                batch, forget, asked = self._take(), list(self._forget), self._asked
                self._forget.clear()
                done = not self._queue
                stopping = self._stopping and done and not batch
            if not self.resting and time.monotonic() - refreshed >= REFRESH_SECONDS:
                self._try(self._log.refresh)
                refreshed = time.monotonic()
            if batch:
                self._write(batch)
            for owner, until in forget:
                self._try(lambda owner=owner, until=until: self._log.forget(owner, until))  # type: ignore[misc]
            if done and asked > self._synced:
                if not self.resting:
                    self._try(self._log.sync)
                with self._lock:
                    self._synced = asked
                    self._lock.notify_all()
            if stopping:
                if not self.resting:
                    self._try(self._log.close)
                return

    def _take(self) -> list[Pending]:
        """What to write next: some MB, in the order in which it came."""
        batch: list[Pending] = []
        size = 0
        while self._queue and size < BATCH_BYTES:
            pending = self._queue.popleft()
            size += len(pending.data)
            batch.append(pending)
        return batch

    def _write(self, batch: list[Pending]) -> None:
        drafts = [
            Draft(Header(p.kind, len(p.data), p.written, self._identity, p.name.owner, digest(p.data), p.name.key), p.data)
            for p in batch
            if not p.cancelled
        ]
        good = not self.resting and self._try(lambda: self._log.append(drafts))
        with self._lock:
            self._lock.notify_all()  # there is room again
            for pending in batch:
                if self.pending.get(pending.name.key) is pending:
                    del self.pending[pending.name.key]
                if pending.slot is not None:
                    self._waiting_slots -= 1
                    self._arena.release(pending.slot)
                else:
                    self._waiting_documents -= len(pending.data)
            if good:
                self.written += sum(draft.header.kind is Kind.BLOCK for draft in drafts)
                self.written_bytes += sum(draft.header.length for draft in drafts)
            else:
                self.dropped += len(drafts)

    def _try(self, work: Callable[[], None]) -> bool:
        """Do something with the disk. Where it fails the tier rests, for longer each time."""
        try:
            work()
        except (OSError, MemoryError) as error:
            full = isinstance(error, OSError) and error.errno in _FULL and self._failures > 0  # still, after a rest
            with self._lock:
                self.write_errors += 1
                self._rest_until = self._clock() + min(LONGEST_REST, REST_SECONDS * 2**self._failures)
                self._failures = min(self._failures + 1, 10)
            self._log.abandon(full=full)
            return False
        self._failures = 0
        return True


def _check(name: BlockName) -> None:
    if len(name.owner) != OWNER_BYTES or not 0 < len(name.key) <= MAX_KEY:
        raise ValueError(f"A block has a key of 1 to {MAX_KEY} bytes and an owner of {OWNER_BYTES}, not {name}.")


def fault_counts(faults: Counter[Fault]) -> dict[str, int]:
    return {str(fault): count for fault, count in sorted(faults.items()) if count and fault is not Fault.BLANK}
