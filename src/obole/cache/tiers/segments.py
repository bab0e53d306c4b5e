"""Segment files: append-only, found whole again after any crash. Writing, scanning, and overwriting what must be forgotten.

    segment header (64 bytes) | record | record | ... | summary record | trailer (64 bytes)

A segment is as large as it may become from the start (the rest is a hole in the file), so that its full size counts at once
for everybody who keeps to the budget. When it is full it gets its summary and trailer and is cut to length.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from obole.cache.tiers.io import Buffer, Disk
from obole.cache.tiers.record import (
    HEADER,
    SEGMENT_HEADER,
    TRAILER,
    Fault,
    Header,
    Kind,
    Queue,
    digest,
    extent,
    find_header,
    pack,
    pack_segment,
    pack_trailer,
    unpack,
    unpack_segment,
    unpack_trailer,
)

SUFFIX = ".seg"
_SEARCH_BYTES = 1 << 20
_PLACE = slice(32, 40)  # where a header keeps its own offset
_NOBODY = bytes(16)
_NOTHING = bytes(32)


def segment_name(number: int) -> str:
    return f"{number:016x}{SUFFIX}"


def number_of(name: str) -> int | None:
    """The number in the name of a segment file; None for any other file."""
    stem, dot, suffix = name.partition(".")
    if dot + suffix != SUFFIX or len(stem) != 16:
        return None
    try:
        return int(stem, 16)
    except ValueError:
        return None


@dataclass(slots=True)
class Scan:
    """What a segment file turned out to hold. `end`: where its last record ends."""

    number: int
    queue: Queue
    created: int
    end: int
    sealed: bool
    records: list[tuple[int, Header]] = field(default_factory=list)
    faults: Counter[Fault] = field(default_factory=Counter)


class SegmentWriter:
    """The one segment of a queue that is being appended to. Owned by the writer thread, locked against other processes."""

    def __init__(self, disk: Disk, folder: Path, queue: Queue, size: int) -> None:
        self.number = int.from_bytes(os.urandom(8))
        self.path = folder / segment_name(self.number)
        self.created = time.time_ns()
        self.queue = queue
        self.size = size
        self.end = SEGMENT_HEADER
        self.records: list[tuple[int, Header]] = []
        self._disk = disk
        self._fd = disk.create(self.path)
        try:
            disk.write(self._fd, [pack_segment(self.number, queue, self.created)], 0)
            disk.resize(self._fd, size)
        except OSError:
            self.abandon()
            with contextlib.suppress(OSError):
                disk.remove(self.path)  # else each attempt on a full disk would leave a file behind
            raise

    def room(self, lengths: Sequence[int]) -> int:
        """How many of these payloads, in order, fit beside the summary."""
        end = self.end + TRAILER + HEADER
        for i, length in enumerate(lengths):
            end += extent(length)
            if end + HEADER * (len(self.records) + i + 2) > self.size:
                return i
        return len(lengths)

    def append(self, headers: Sequence[Header], payloads: Sequence[Buffer]) -> list[int]:
        """Write records one after the other; their offsets. What a call that raises has written is overwritten."""
        offsets, buffers, end = [], [], self.end
        for header, payload in zip(headers, payloads, strict=True):
            offsets.append(end)
            padding = extent(header.length) - HEADER - header.length
            buffers += [pack(header, self.number, end), payload, bytes(padding)]
            end += extent(header.length)
        self._disk.write(self._fd, buffers, self.end)
        self.end = end
        self.records += zip(offsets, headers, strict=True)
        return offsets

    def sync(self) -> None:
        self._disk.sync(self._fd)

    def seal(self) -> None:
        """Summary, trailer, cut to length, on disk. Raises OSError; the segment can be read all the same."""
        try:
            seal(self._disk, self._fd, self.number, self.end, self.records)
        finally:
            self.abandon()

    def abandon(self) -> None:
        self._disk.close(self._fd)


def seal(disk: Disk, fd: int, number: int, end: int, records: Sequence[tuple[int, Header]]) -> None:
    payload = b"".join(pack(header, number, offset) for offset, header in records)
    header = Header(Kind.SUMMARY, len(payload), time.time_ns(), _NOTHING, _NOBODY, digest(payload), b"")
    padding = bytes(extent(len(payload)) - HEADER - len(payload))
    disk.write(fd, [pack(header, number, end), payload, padding, pack_trailer(number, end)], end)
    disk.resize(fd, end + extent(len(payload)) + TRAILER)
    disk.sync(fd)


def scan(disk: Disk, path: Path, *, start: int = 0, thorough: bool = True) -> Scan:
    """Read the headers of a segment, from `start` on. OSError as the disk has it.

    Thorough: what follows a damaged header is searched for the next good one. Else the scan ends at the first place where
    nothing good stands, which in a segment that somebody is appending to is where the next record will come.
    """
    fd = disk.open(path)
    try:
        return _scan(disk, fd, number_of(path.name) or 0, start, thorough)
    finally:
        disk.close(fd)


def _scan(disk: Disk, fd: int, named: int, start: int, thorough: bool) -> Scan:
    size = disk.size(fd)
    about = unpack_segment(_read(disk, fd, 0, SEGMENT_HEADER))
    faults: Counter[Fault] = Counter()
    if about is Fault.VERSION:
        faults[Fault.VERSION] += 1
        return Scan(named, Queue.MAIN, 0, size, True, [], faults)
    if isinstance(about, Fault):  # the records have checksums of their own, so the name will do
        about = named, Queue.MAIN, 0
    if about[0] != named:  # another file under this name
        faults[Fault.MISPLACED] += 1
        return Scan(named, Queue.MAIN, 0, size, True, [], faults)
    found = Scan(*about, max(start, SEGMENT_HEADER), False, [], faults)
    summary = unpack_trailer(_read(disk, fd, max(0, size - TRAILER), TRAILER), found.number)
    if summary is not None and _from_summary(disk, fd, summary, found, start):
        return found
    _walk(disk, fd, size, thorough, found)
    return found


def _from_summary(disk: Disk, fd: int, place: int, found: Scan, start: int) -> bool:
    header = unpack(_read(disk, fd, place, HEADER), found.number, place)
    if isinstance(header, Fault) or header.kind is not Kind.SUMMARY:
        return False
    payload = _read(disk, fd, place + HEADER, header.length)
    if digest(payload) != header.checksum:
        return False
    for at in range(0, len(payload), HEADER):
        packed = payload[at : at + HEADER]
        offset = int.from_bytes(packed[_PLACE], "little")
        record = unpack(packed, found.number, offset)
        if not isinstance(record, Fault) and offset >= start:
            found.records.append((offset, record))
    found.end, found.sealed = place, True
    return True


def _walk(disk: Disk, fd: int, size: int, thorough: bool, found: Scan) -> None:
    offset = found.end
    while offset + HEADER <= size:
        header = unpack(_read(disk, fd, offset, HEADER), found.number, offset)
        if isinstance(header, Fault):
            if not thorough:
                return
            following = _search(disk, fd, size, found.number, offset + 1)
            if following < 0:
                if header is not Fault.BLANK:
                    found.faults[header] += 1
                return
            found.faults[header] += 1
            offset = following
        elif header.kind is Kind.SUMMARY:
            offset += extent(header.length)
        elif offset + HEADER + header.length > size:
            found.faults[Fault.TRUNCATED] += 1
            return
        else:
            found.records.append((offset, header))
            offset = found.end = offset + extent(header.length)


def _search(disk: Disk, fd: int, size: int, number: int, start: int) -> int:
    """The next good header at or after `start`, or -1."""
    base = start
    while base < size:
        data = _read(disk, fd, base - base % 64, _SEARCH_BYTES + HEADER)
        begin, at = base - base % 64, base % 64
        while 0 <= (at := find_header(data, at)) < _SEARCH_BYTES:
            if not isinstance(unpack(data[at : at + HEADER], number, begin + at), Fault):
                return begin + at
            at += 1
        base = begin + _SEARCH_BYTES
    return -1


def overwrite(disk: Disk, path: Path, number: int, places: Sequence[tuple[int, int]]) -> None:
    """Put zeros where records were, (offset, length of the payload), and wait until it is so on disk.

    The summary goes as well: it named them. Raises OSError; calling again does no harm.
    """
    fd = disk.open(path, write=True)
    try:
        for offset, length in places:
            header = Header(Kind.DELETED, length, 0, _NOTHING, _NOBODY, bytes(16), b"")
            disk.write(fd, [pack(header, number, offset), bytes(extent(length) - HEADER)], offset)
        summary = unpack_trailer(_read(disk, fd, max(0, disk.size(fd) - TRAILER), TRAILER), number)
        if summary is not None:
            disk.resize(fd, summary)
        disk.sync(fd)
    finally:
        disk.close(fd)


def _read(disk: Disk, fd: int, offset: int, length: int) -> bytes:
    data = bytearray(length)
    return bytes(data[: disk.read(fd, [data], offset)])
