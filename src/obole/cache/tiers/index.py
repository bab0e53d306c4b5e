"""What the log on disk holds, in memory: which record of which segment is the one for a key. The store's lock guards it."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from obole.cache.tiers.policy import LogPolicy
from obole.cache.tiers.record import Fault, Header, Kind, Queue
from obole.cache.tiers.segments import Scan


@dataclass(slots=True, eq=False)
class Segment:
    """`sealed`: complete, so that it never changes but by deletion. `mine`: appended to by this process."""

    number: int
    path: Path
    queue: Queue
    created: int
    end: int
    sealed: bool
    mine: bool = False
    damaged: bool = False  # parts of it could not be read, so nobody knows all that is in it
    readers: int = 0  # reads of it that are under way or waiting
    records: list[Placed] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Placed:
    """A record in its place, whether it is served or not."""

    kind: Kind
    key: bytes
    owner: bytes
    written: int
    length: int
    segment: Segment
    offset: int


class Index:
    """Blocks and documents by key, segments by number, and what had to be refused, by reason."""

    def __init__(self, block_bytes: int, identity: bytes, policy: LogPolicy, document_bytes: int) -> None:
        self.policy = policy
        self.identity = identity
        self.blocks: dict[bytes, Placed] = {}
        self.documents: dict[bytes, Placed] = {}
        self.segments: dict[int, Segment] = {}
        self.forgotten: dict[bytes, int] = {}  # owner: nothing of its that was written until then is served
        self.faults: Counter[Fault] = Counter()
        self.document_bytes = 0
        self._block_bytes = block_bytes
        self._most_document_bytes = document_bytes
        self._ages: list[tuple[int, int, Placed]] = []  # a heap of documents, the oldest first; some are served no more
        self._serial = itertools.count()

    def open(self, found: Scan, path: Path, *, mine: bool = False) -> Segment:
        """A segment with the records that a scan found."""
        segment = Segment(found.number, path, found.queue, found.created, found.end, found.sealed, mine)
        self.segments[found.number] = segment
        self.extend(segment, found)
        return segment

    def extend(self, segment: Segment, found: Scan) -> None:
        """Records that a later scan found behind those that are known."""
        for offset, header in found.records:
            self.add(segment, offset, header)
        segment.end, segment.sealed = found.end, found.sealed
        segment.damaged |= bool(found.faults)
        self.faults.update(found.faults)

    def add(self, segment: Segment, offset: int, header: Header) -> Placed:
        """A record that is on disk. It is served unless it must not be, or another one is already."""
        placed = Placed(header.kind, header.key, header.owner, header.written, header.length, segment, offset)
        if placed.kind not in (Kind.BLOCK, Kind.DOCUMENT):
            return placed
        segment.records.append(placed)
        segment.end = max(segment.end, offset)
        if placed.written <= self.forgotten.get(placed.owner, -1):
            return placed
        if header.identity != self.identity or (placed.kind is Kind.BLOCK and placed.length != self._block_bytes):
            self.faults[Fault.IDENTITY] += 1
        elif placed.kind is Kind.BLOCK:
            self.blocks.setdefault(placed.key, placed)
        else:
            self._add_document(placed)
        return placed

    def move(self, old: Placed, segment: Segment, offset: int, header: Header) -> None:
        """A record was written again elsewhere."""
        self.drop(old)
        self.add(segment, offset, header)

    def live(self, placed: Placed) -> bool:
        table = self.blocks if placed.kind is Kind.BLOCK else self.documents
        return table.get(placed.key) is placed

    def drop(self, placed: Placed) -> None:
        """Serve a record no more."""
        if not self.live(placed):
            return
        if placed.kind is Kind.BLOCK:
            del self.blocks[placed.key]
        else:
            del self.documents[placed.key]
            self.document_bytes -= placed.length

    def close(self, segment: Segment) -> None:
        """A segment is gone."""
        for placed in segment.records:
            self.drop(placed)
        self.segments.pop(segment.number, None)

    def forget(self, owner: bytes, until: int) -> set[bytes]:
        """Serve nothing of an owner that was written until then. Returns the keys of its blocks."""
        self.forgotten[owner] = max(until, self.forgotten.get(owner, until))
        gone = [p for p in (*self.blocks.values(), *self.documents.values()) if p.owner == owner and p.written <= until]
        for placed in gone:
            self.drop(placed)
            self.policy.forget(placed.key)
        return {placed.key for placed in gone if placed.kind is Kind.BLOCK}

    def _add_document(self, placed: Placed) -> None:
        """The newest of a name wins; where all together are too large the oldest go."""
        other = self.documents.get(placed.key)
        if other is not None and (other.written, other.offset) > (placed.written, placed.offset):
            return
        if other is not None:
            self.drop(other)
        self.documents[placed.key] = placed
        self.document_bytes += placed.length
        heapq.heappush(self._ages, (placed.written, next(self._serial), placed))
        while self.document_bytes > self._most_document_bytes:
            self.drop(heapq.heappop(self._ages)[2])
        if len(self._ages) > 2 * len(self.documents) + 64:
            self._ages = [entry for entry in self._ages if self.live(entry[2])]
            heapq.heapify(self._ages)
