"""The log on disk: appending, making room, and keeping the index true to the folder. Everything here runs on the writer thread.

Files change only here; the index is changed under the store's lock, which is never held while the disk works. Other processes
may use the same folder: each appends only to segments that it has locked, all read all, and whoever needs room removes
segments that nobody appends to. What must not happen twice at a time (counting the bytes and taking some) is done under the
lock of the folder.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from obole.cache.tiers.index import Index, Placed, Segment
from obole.cache.tiers.io import Buffer, Disk, Listed
from obole.cache.tiers.record import HEADER, Fault, Header, Kind, Queue, digest, unpack
from obole.cache.tiers.segments import Scan, SegmentWriter, number_of, overwrite, scan, seal

FOLDER_LOCK = "lock"
FOLDER_LOCK_SECONDS = 2.0  # then it is done without: the budget may be passed by a segment, nothing else
FORGOTTEN = ".forgotten"
FORGOTTEN_SECONDS = 3600.0  # how long other processes are told what to forget
PATIENCE = 8
_SURVIVORS = 4 << 20  # bytes of records that are written again at a time


@dataclass(frozen=True, slots=True)
class Draft:
    """A record to be written."""

    header: Header
    payload: Buffer


class Log:
    """`forgotten(owner)` is called, under the lock, when another process had an owner's blocks deleted."""

    def __init__(
        self, disk: Disk, folder: Path, budget: int, segment_bytes: int, index: Index, lock: threading.Condition,
        clock: Callable[[], float], forgotten: Callable[[bytes], None],
    ) -> None:  # fmt: skip
        self._disk = disk
        self._folder = folder
        self._budget = budget
        self._segment_bytes = segment_bytes
        self._index = index
        self._lock = lock
        self._clock = clock
        self._forgotten = forgotten
        self._full = False  # the next segment takes the place of another one, whatever the budget says
        self._writers: dict[Queue, SegmentWriter] = {}
        self._scrubs: dict[bytes, int] = {}  # owners whose records are still to be overwritten, and until when written

    # Appending

    def append(self, drafts: Sequence[Draft]) -> None:
        """Write records and serve them from now on. Raises OSError; what was written before it is served."""
        start = 0
        while start < len(drafts):
            queue = self._queue(drafts[start])
            stop = start + 1
            while stop < len(drafts) and self._queue(drafts[stop]) is queue:
                stop += 1
            self._append(queue, drafts[start:stop], room=True)
            start = stop

    def _queue(self, draft: Draft) -> Queue:
        main = draft.header.kind is Kind.DOCUMENT or self._index.policy.main(draft.header.key)
        return Queue.MAIN if main else Queue.COPIES

    def _append(self, queue: Queue, drafts: Sequence[Draft], *, room: bool, replaces: Sequence[Placed] = ()) -> None:
        done = 0
        while done < len(drafts):
            writer = self._writers.get(queue)
            count = writer.room([draft.header.length for draft in drafts[done:]]) if writer else 0
            if writer is None or count == 0:
                self._roll(queue, room=room)
                if self._writers[queue].room([drafts[done].header.length]) == 0:
                    raise OSError(errno.EFBIG, "A record is larger than a segment.")
                continue
            batch = drafts[done : done + count]
            offsets = writer.append([draft.header for draft in batch], [draft.payload for draft in batch])
            with self._lock:
                segment = self._index.segments[writer.number]
                for i, (draft, offset) in enumerate(zip(batch, offsets, strict=True), done):
                    if replaces:
                        self._index.move(replaces[i], segment, offset, draft.header)
                    else:
                        self._index.add(segment, offset, draft.header)
                segment.end = writer.end
            done += count

    def _roll(self, queue: Queue, *, room: bool) -> None:
        """Complete the segment of a queue and begin another one."""
        self._finish(queue)
        if room:
            with self._folder_lock():
                self._make_room()
                if queue not in self._writers:  # else it was begun meanwhile, for survivors
                    self._begin(queue)
        else:
            self._begin(queue)

    def _begin(self, queue: Queue) -> None:
        writer = SegmentWriter(self._disk, self._folder, queue, self._segment_bytes)
        self._writers[queue] = writer
        with self._lock:
            found = Scan(writer.number, queue, writer.created, writer.end, False)
            self._index.open(found, writer.path, mine=True)

    def _finish(self, queue: Queue) -> None:
        writer = self._writers.pop(queue, None)
        if writer is None:
            return
        with self._lock:
            segment = self._index.segments.get(writer.number)
            if segment is not None:
                segment.mine = False
        writer.seal()
        if segment is not None:
            segment.sealed = True

    def sync(self) -> None:
        """Return when all records would survive a power cut."""
        for writer in self._writers.values():
            writer.sync()
        if self._writers:
            self._disk.sync_folder(self._folder)

    def close(self) -> None:
        for queue in list(self._writers):
            self._finish(queue)

    def abandon(self, *, full: bool) -> None:
        """Begin new segments after a failure. What the old ones hold is found by its headers.

        `full`: the disk has no room, whatever the budget says; the next segment then takes the place of another one.
        """
        self._full = full
        while self._writers:
            _, writer = self._writers.popitem()
            with self._lock:
                segment = self._index.segments.get(writer.number)
                if segment is not None:
                    segment.mine = False
            with contextlib.suppress(OSError):
                writer.abandon()

    # Making room

    def _make_room(self) -> None:
        """Give up segments until there is room for one more, and for one of survivors beside it."""
        skip: set[int] = set()
        given = 0
        full, self._full = self._full, False
        while True:
            listed = {n: file for file in self._disk.list(self._folder) if (n := number_of(file.name)) is not None}
            fits = sum(file.size for file in listed.values()) + 2 * self._segment_bytes <= self._budget
            if fits and not full:
                return
            victim = self._oldest({n: file for n, file in listed.items() if n not in skip})
            if victim is None and fits:
                return
            if victim is None:
                raise OSError(errno.ENOSPC, "All segments within the budget are being written to.")
            given += 1
            # If so many segments full of what must stay do not make room for one, too much is held: then it goes as well.
            if self._give_up(victim, honour_holds=given <= PATIENCE, rescue=not full):
                full = False
            else:
                skip.add(victim)

    def _oldest(self, listed: dict[int, Listed]) -> int | None:
        """The segment to give up next. Those that cannot be read count as the main queue's."""
        mine = {writer.number for writer in self._writers.values()}
        sizes, oldest = {Queue.COPIES: 0, Queue.MAIN: 0}, dict[Queue, tuple[int, int]]()
        with self._lock:
            for number, file in listed.items():
                segment = self._index.segments.get(number)
                queue = segment.queue if segment else Queue.MAIN
                sizes[queue] += file.size
                if number in mine:
                    continue
                created = segment.created if segment and segment.created else int(file.modified * 1e9)
                oldest[queue] = min(oldest.get(queue, (created, number)), (created, number))
        first = Queue.COPIES if self._index.policy.gives_copies(sizes[Queue.COPIES], sizes[Queue.MAIN]) else Queue.MAIN
        for queue in (first, Queue.COPIES, Queue.MAIN):
            if queue in oldest:
                return oldest[queue][1]
        return None

    def _give_up(self, number: int, *, honour_holds: bool, rescue: bool = True) -> bool:
        """Remove a segment, its survivors written again. False where another process appends to it.

        `rescue`: False on a disk that has no room for survivors.
        """
        with self._lock:
            segment = self._index.segments.get(number)
        path = segment.path if segment else self._folder / f"{number:016x}.seg"
        try:
            fd = self._disk.open(path, write=True)
        except FileNotFoundError:
            with self._lock:
                if segment is not None:
                    self._index.close(segment)
            return True
        try:
            if not self._disk.lock(fd):
                return False
            if segment is not None:
                if rescue:
                    self._rescue(fd, segment, honour_holds)
                with self._lock:
                    self._index.close(segment)
            with contextlib.suppress(FileNotFoundError):
                self._disk.remove(path)
            return True
        finally:
            self._disk.close(fd)

    def _rescue(self, fd: int, segment: Segment, honour_holds: bool) -> None:
        main = segment.queue is Queue.MAIN
        with self._lock:
            survivors = [
                placed for placed in segment.records if self._index.live(placed) and (
                    placed.kind is Kind.DOCUMENT
                    or self._index.policy.survives(placed.key, main, self._clock(), honour_holds=honour_holds)
                )
            ]  # fmt: skip
        drafts: list[Draft] = []
        placed_of: list[Placed] = []
        for placed in survivors:
            draft = read_record(self._disk, fd, placed, self._index.identity)
            if isinstance(draft, Fault):
                self._count(draft)
                continue
            drafts.append(draft)
            placed_of.append(placed)
            if sum(d.header.length for d in drafts) >= _SURVIVORS:
                self._append(Queue.MAIN, drafts, room=False, replaces=placed_of)
                drafts, placed_of = [], []
        self._append(Queue.MAIN, drafts, room=False, replaces=placed_of)

    # The folder as it is

    def refresh(self) -> None:
        """Make the index true to the folder: segments that came or went, grew or lost their writer, and owners to forget."""
        self._disk.make_folder(self._folder)
        files = self._disk.list(self._folder)
        listed = {n: file for file in files if (n := number_of(file.name)) is not None}
        self._lose(set(listed))
        self._heed(files)
        newest = sorted(listed.items(), key=lambda item: -item[1].modified)
        for number, file in newest:
            segment = self._index.segments.get(number)
            if segment is None or not (segment.sealed or segment.mine):
                try:
                    self._look(segment, self._folder / file.name)
                except FileNotFoundError:
                    continue
                except OSError:
                    self._count(Fault.IO_ERROR)
        for owner, until in list(self._scrubs.items()):
            self._scrub(owner, until)

    def _lose(self, there: set[int]) -> None:
        for queue, writer in list(self._writers.items()):
            if writer.number not in there:
                del self._writers[queue]
                writer.abandon()
        with self._lock:
            for segment in [s for s in self._index.segments.values() if s.number not in there]:
                self._index.close(segment)

    def _look(self, segment: Segment | None, path: Path) -> None:
        """Read what is new in a segment of somebody else's. One that nobody appends to any more is completed."""
        found = self._adopt(path) or scan(self._disk, path, start=segment.end if segment else 0, thorough=False)
        with self._lock:
            if segment is not None:
                found.records = [r for r in found.records if r[0] >= segment.end]
                self._index.extend(segment, found)
            else:
                segment = self._index.open(found, path)
            for placed in segment.records:
                until = self._index.forgotten.get(placed.owner, -1)
                if placed.written <= until:
                    self._scrubs[placed.owner] = until

    def _adopt(self, path: Path) -> Scan | None:
        """Complete a segment whose process ended before it did. None where there is nothing to do, or no right to."""
        fd = self._disk.open(path, write=True)
        try:
            if not self._disk.lock(fd):
                return None
            found = scan(self._disk, path)
            if not found.sealed:
                seal(self._disk, fd, found.number, found.end, found.records)
                found.sealed = True
            return found
        finally:
            self._disk.close(fd)

    @contextlib.contextmanager
    def _folder_lock(self) -> Iterator[None]:
        """No other process counts or takes bytes meanwhile; one that is stopped is waited for so long and no longer."""
        path = self._folder / FOLDER_LOCK
        try:
            fd = self._disk.open(path, write=True)
        except FileNotFoundError:
            self._disk.make_folder(self._folder)
            with contextlib.suppress(FileExistsError):
                self._disk.close(self._disk.create(path))
            fd = self._disk.open(path, write=True)
        try:
            give_up = time.monotonic() + FOLDER_LOCK_SECONDS
            while not self._disk.lock(fd) and time.monotonic() < give_up:
                time.sleep(0.01)
            yield
        finally:
            self._disk.close(fd)

    def _count(self, fault: Fault) -> None:
        with self._lock:
            self._index.faults[fault] += 1

    # Forgetting

    def forget(self, owner: bytes, until: int) -> None:
        """Overwrite everything of an owner that was written until then. Raises OSError; `refresh` then tries again.

        A file in the folder says so first: a process that ends half-way, and the others, have it from there.
        """
        self._scrubs[owner] = until
        with contextlib.suppress(FileExistsError):
            self._disk.close(self._disk.create(self._folder / f"{owner.hex()}-{until:016x}{FORGOTTEN}"))
        self._disk.sync_folder(self._folder)
        self.refresh()  # others may have written something of the owner's since the last look

    def _heed(self, files: Sequence[Listed]) -> None:
        """Forget what other processes, or this one before it ended, were told to."""
        for file in files:
            owner_hex, dash, rest = file.name.partition("-")
            if not (dash and rest.endswith(FORGOTTEN)):
                continue
            try:
                owner, until = bytes.fromhex(owner_hex), int(rest.removesuffix(FORGOTTEN), 16)
            except ValueError:
                continue
            if until > self._index.forgotten.get(owner, -1):
                with self._lock:
                    self._index.forget(owner, until)
                    self._forgotten(owner)
                self._scrubs[owner] = until
            if time.time() - until / 1e9 > FORGOTTEN_SECONDS and owner not in self._scrubs:
                with contextlib.suppress(FileNotFoundError):  # another process was quicker
                    self._disk.remove(self._folder / file.name)

    def _scrub(self, owner: bytes, until: int) -> None:
        with self._lock:
            segments = list(self._index.segments.values())
        for segment in segments:
            if segment.damaged and not segment.mine:
                self._give_up(segment.number, honour_holds=True)  # nobody knows whose the unreadable parts are
                continue
            places = [p for p in segment.records if p.owner == owner and p.written <= until]
            if not places:
                continue
            try:
                overwrite(self._disk, segment.path, segment.number, [(p.offset, p.length) for p in places])
            except FileNotFoundError:
                continue
            gone = {p.offset for p in places}
            with self._lock:
                segment.records = [p for p in segment.records if p.offset not in gone]
            for writer in self._writers.values():
                if writer.number == segment.number:
                    writer.records = [r for r in writer.records if r[0] not in gone]
        self._scrubs.pop(owner, None)


def read_record(disk: Disk, fd: int, placed: Placed, identity: bytes) -> Draft | Fault:
    """A record read back and checked."""
    data = bytearray(HEADER + placed.length)
    try:
        got = disk.read(fd, [data], placed.offset)
    except OSError:
        return Fault.IO_ERROR
    if got < len(data):
        return Fault.TRUNCATED
    header = unpack(data[:HEADER], placed.segment.number, placed.offset)
    payload = memoryview(data)[HEADER:]
    if isinstance(header, Fault):
        return header
    if fault := mismatch(header, placed, identity):
        return fault
    return Draft(header, payload) if digest(payload) == header.checksum else Fault.CHECKSUM


def mismatch(header: Header, placed: Placed, identity: bytes) -> Fault | None:
    """Why a valid header is not the one that was looked for."""
    if header.kind is Kind.DELETED:
        return Fault.DELETED
    if header.identity != identity:
        return Fault.IDENTITY
    same = (header.kind, header.key, header.owner, header.length) == (placed.kind, placed.key, placed.owner, placed.length)
    return None if same else Fault.MISPLACED
