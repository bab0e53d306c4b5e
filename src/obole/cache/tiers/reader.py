"""Threads that read blocks from the log: neighbours in one go, checked where they are read, delivered in order."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from obole.cache.tiers.bandwidth import ReadTimes
from obole.cache.tiers.index import Index, Placed
from obole.cache.tiers.interface import BlockName, Bytes
from obole.cache.tiers.io import Buffer, Disk
from obole.cache.tiers.load import StoreLoad
from obole.cache.tiers.log import mismatch
from obole.cache.tiers.ram import Arena, Ram
from obole.cache.tiers.record import HEADER, Fault, digest, extent, unpack
from obole.types import Tier

RUN_BYTES = 2 << 20  # of one read
GAP_BYTES = 256 << 10  # between records of one read: cheaper to read over than to begin anew
STALL_SECONDS = 5.0  # a read that takes longer is not waited for
_FIRST_GUESS = (1e-3, 500e6)  # seconds and bytes a second, until a read has been measured


@dataclass(slots=True, eq=False)
class Run:
    """Blocks `first` and following of a load, which lie one behind the other in one segment."""

    load: StoreLoad
    first: int
    places: list[Placed]
    begun: float | None = None

    @property
    def size(self) -> int:
        return self.places[-1].offset + extent(self.places[-1].length) - self.places[0].offset


def runs(load: StoreLoad, places: Sequence[tuple[int, Placed]]) -> list[Run]:
    """Split blocks, (place in the load, place on disk), into reads."""
    found: list[Run] = []
    for index, placed in places:
        last = found[-1] if found else None
        if last is not None and last.first + len(last.places) == index and last.places[-1].segment is placed.segment:
            gap = placed.offset - last.places[-1].offset - extent(last.places[-1].length)
            if 0 <= gap <= GAP_BYTES and last.size + gap + extent(placed.length) <= RUN_BYTES:
                last.places.append(placed)
                continue
        found.append(Run(load, index, [placed]))
    return found


class Readers:
    """A few threads and a queue of runs. The store's lock guards the queue, the RAM tier and the loads."""

    def __init__(
        self, disk: Disk, index: Index, arena: Arena, ram: Ram | None, block_bytes: int, lock: threading.Condition,
        progress: Callable[[], None], threads: int = 4, stall_seconds: float = STALL_SECONDS,
    ) -> None:  # fmt: skip
        self._disk = disk
        self._index = index
        self._arena = arena
        self._ram = ram
        self._block_bytes = block_bytes
        self._lock = lock
        self._progress = progress
        self._stall_seconds = stall_seconds
        self._queue: deque[Run] = deque()
        self._busy: set[Run] = set()
        self._stopping = False
        self.times = ReadTimes(*_FIRST_GUESS)
        self.blocks = 0
        self.bytes = 0
        self._threads = [threading.Thread(target=self._work, name=f"obole-read-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, load: StoreLoad, places: Sequence[tuple[int, Placed]]) -> None:
        """The lock is held."""
        for run in runs(load, places):
            run.places[0].segment.readers += 1
            self._queue.append(run)
        self._lock.notify_all()

    def seconds(self, sizes: Sequence[int]) -> float:
        """Estimate of the time until reads of these sizes are done, behind those that wait already; the lock is held."""
        now = time.monotonic()
        waiting = sum(self.times.seconds(run.size) for run in self._queue if not run.load.closed)
        under_way = [now - run.begun for run in self._busy if run.begun is not None]
        stuck = sum(max(0.0, age - 0.1) for age in under_way)  # a disk that does not answer now will not do so soon
        wanted = sum(self.times.seconds(size) for size in sizes)
        return (waiting + wanted) / max(1, len(self._threads)) + stuck

    def stalled(self, load: StoreLoad) -> bool:
        """Whether a load waits for a read that takes too long."""
        if not self._busy:
            return False
        late = time.monotonic() - self._stall_seconds
        with self._lock:
            stuck = [run for run in self._busy if run.begun is not None and run.begun < late]
            mine = any(run.load is load and run.first <= load.ready < run.first + len(run.places) for run in stuck)
            if (mine or len(stuck) == len(self._threads)) and load.ready < load.failed:
                self._index.faults[Fault.TIMEOUT] += 1
                load.fail(load.ready)
                return True
        return False

    def stop(self, seconds: float) -> None:
        """End the threads; one that the disk does not let go of is left behind."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._queue and not self._stopping:
                    self._lock.wait()
                if self._stopping:
                    return
                run = self._queue.popleft()
                if run.load.closed or run.first >= run.load.failed:
                    run.places[0].segment.readers -= 1
                    continue
                run.begun = time.monotonic()
                self._busy.add(run)
                slots = [self._ram.reserve(copy=True) if self._ram is not None else None for _ in run.places]
            views: list[Bytes] = []
            faults: list[Fault | None]
            try:
                views = self._room(slots)
                faults = self._read(run, views)
            except FileNotFoundError:
                faults = [Fault.VANISHED] * len(slots)
            except (OSError, MemoryError):
                faults = [Fault.IO_ERROR] * len(slots)
            with self._lock:
                self._busy.discard(run)
                run.places[0].segment.readers -= 1
                self._deliver(run, views, slots, faults)
                self._progress()

    def _room(self, slots: Sequence[int | None]) -> list[Bytes]:
        """Where to read each block to: its slot, or memory of the load's own."""
        missing = slots.count(None)
        extra = iter(np.empty((missing, self._block_bytes), np.uint8) if missing else ())
        return [next(extra) if slot is None else self._arena.view(slot) for slot in slots]

    def _read(self, run: Run, views: Sequence[Bytes]) -> list[Fault | None]:
        """Read a run in one go and check it: what is wrong with each of its blocks."""
        begun = time.perf_counter()
        headers = [bytearray(HEADER) for _ in views]
        buffers: list[Buffer] = []
        end = run.places[0].offset
        for placed, header, view in zip(run.places, headers, views, strict=True):
            if placed.offset > end:
                buffers.append(bytearray(placed.offset - end))
            buffers += [header, view]
            end = placed.offset + HEADER + placed.length
        fd = self._disk.open(run.places[0].segment.path)
        try:
            got = run.places[0].offset + self._disk.read(fd, buffers, run.places[0].offset)
        finally:
            self._disk.close(fd)
        faults = [
            Fault.TRUNCATED if placed.offset + HEADER + placed.length > got else self._check(placed, header, view)
            for placed, header, view in zip(run.places, headers, views, strict=True)
        ]
        self.times.add(run.size, time.perf_counter() - begun)
        return faults

    def _check(self, placed: Placed, data: bytearray, view: Bytes) -> Fault | None:
        header = unpack(data, placed.segment.number, placed.offset)
        if isinstance(header, Fault):
            return header
        fault = mismatch(header, placed, self._index.identity)
        if fault is None and digest(view) != header.checksum:
            return Fault.CHECKSUM
        return fault

    def _deliver(self, run: Run, views: Sequence[Bytes], slots: Sequence[int | None], faults: Sequence[Fault | None]) -> None:
        counted: Counter[Fault] = Counter()
        moved = self._moved(run) if Fault.VANISHED in faults else []
        for i, (placed, slot, fault) in enumerate(zip(run.places, slots, faults, strict=True)):
            index = run.first + i
            if fault is not None:
                if slot is not None and self._ram is not None:
                    self._ram.give_back(slot)
                if moved:
                    continue
                counted[fault] += 1
                self._index.drop(placed)
                run.load.fail(index)
                continue
            self.blocks += 1
            self.bytes += placed.length
            if slot is not None and self._ram is not None:
                self._arena.hold(slot)  # for the load
                if self._index.live(placed):
                    self._ram.name(BlockName(placed.key, placed.owner), slot, copy=True)
                else:  # forgotten meanwhile
                    self._ram.give_back(slot)
            run.load.arrive(index, views[i], Tier.SSD, slot)
        self._index.faults.update(counted)
        if moved:
            self.submit(run.load, moved)

    def _moved(self, run: Run) -> list[tuple[int, Placed]]:
        """Where the blocks of a run are now, if all were written again while it waited."""
        now = [self._index.blocks.get(placed.key) for placed in run.places]
        found = [(run.first + i, placed) for i, placed in enumerate(now) if placed is not None]
        return found if len(found) == len(now) and all(p not in run.places for _, p in found) else []
