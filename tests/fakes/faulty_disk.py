"""A disk in memory that fails on demand: errors, delays, hangs, a full disk, lost power. For the tests of the SSD tier."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from obole.cache.tiers.io import Buffer, Listed

PAGE = 512  # of what reaches the platter in one piece


@dataclass(eq=False)
class File:
    """`data`: what every process sees; `durable`: what has reached the platter; `dirty`: pages in which they differ."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    dirty: set[int] = field(default_factory=set)
    named: bool = False  # its name has reached the platter
    modified: float = 0.0
    holder: int | None = None  # descriptor that has the lock


class FaultyDisk:
    """Implements `obole.cache.tiers.io.Disk`. Several stores may share one, as processes share a folder.

    `failing`: errno to raise, by operation. After `writes_left` writes nothing at all works any more. `hanging` blocks reads
    while it is clear.
    """

    def __init__(self) -> None:
        self.files: dict[Path, File] = {}
        self.removed: list[tuple[Path, File]] = []  # removed, and not known to the platter yet
        self.failing: dict[str, int] = {}
        self.writes_left: int | None = None
        self.latency = 0.0  # seconds of each read and write
        self.space: int | None = None  # bytes of all files together
        self.hanging = threading.Event()
        self.hanging.set()
        self.reads: list[int] = []  # bytes asked for in each read
        self._handles: dict[int, tuple[Path, File]] = {}
        self._next = 100
        self._folders: set[Path] = set()
        self._lock = threading.RLock()

    # Disk

    def create(self, path: Path) -> int:
        self._may("create", path)
        with self._lock:
            if path in self.files:
                raise FileExistsError(errno.EEXIST, "exists", str(path))
            if path.parent not in self._folders:
                raise FileNotFoundError(errno.ENOENT, "no such folder", str(path))
            self.files[path] = File(modified=time.time())
            fd = self._handle(path)
            self.files[path].holder = fd
            return fd

    def open(self, path: Path, *, write: bool = False) -> int:  # noqa: ARG002
        self._may("open", path)
        with self._lock:
            if path not in self.files:
                raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
            return self._handle(path)

    def close(self, fd: int) -> None:
        with self._lock:
            _, file = self._handles.pop(fd)
            if file.holder == fd:
                file.holder = None

    def lock(self, fd: int) -> bool:
        with self._lock:
            _, file = self._handles[fd]
            if file.holder is None:
                file.holder = fd
            return file.holder == fd

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        path, file = self._handles[fd]
        self._may("read", path)
        self.hanging.wait()
        time.sleep(self.latency)
        done = 0
        with self._lock:
            for buffer in buffers:
                view = memoryview(buffer).cast("B")
                part = file.data[offset + done : offset + done + len(view)]
                view[: len(part)] = part
                done += len(part)
        self.reads.append(sum(memoryview(buffer).nbytes for buffer in buffers))
        return done

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        path, file = self._handles[fd]
        data = b"".join(bytes(memoryview(buffer)) for buffer in buffers)
        time.sleep(self.latency)
        try:
            self._may("write", path)
        except OSError:
            self._put(file, data[: len(data) // 2], offset)  # some of it had been written when it failed
            raise
        with self._lock:
            room = None if self.space is None else self.space - sum(self._used(other) for other in self.files.values())
            new = sum(1 for page in _pages(offset, len(data)) if not any(file.data[page * PAGE : (page + 1) * PAGE])) * PAGE
            if room is not None and new > room:
                raise OSError(errno.ENOSPC, "full")
            self._put(file, data, offset)

    def resize(self, fd: int, size: int) -> None:
        path, file = self._handles[fd]
        self._may("resize", path)
        with self._lock:
            old = len(file.data)
            del file.data[size:]
            file.data.extend(bytes(max(0, size - old)))
            file.dirty.update(_pages(min(old, size), abs(old - size)))

    def size(self, fd: int) -> int:
        return len(self._handles[fd][1].data)

    def sync(self, fd: int) -> None:
        path, file = self._handles[fd]
        self._may("sync", path)
        with self._lock:
            file.durable = bytearray(file.data)
            file.dirty.clear()

    def list(self, folder: Path) -> list[Listed]:
        self._may("list", folder)
        with self._lock:
            if folder not in self._folders:
                raise FileNotFoundError(errno.ENOENT, "no such folder", str(folder))
            return [Listed(p.name, len(f.data), f.modified) for p, f in self.files.items() if p.parent == folder and p.name]

    def remove(self, path: Path) -> None:
        self._may("remove", path)
        with self._lock:
            if path not in self.files:
                raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
            self.removed.append((path, self.files.pop(path)))

    def make_folder(self, path: Path) -> None:
        self._may("make_folder", path)
        self._folders.add(path)

    def sync_folder(self, path: Path) -> None:
        self._may("sync_folder", path)
        with self._lock:
            for name, file in self.files.items():
                file.named |= name.parent == path
            self.removed = [(name, file) for name, file in self.removed if name.parent != path]

    # What happens to it

    def vanish(self, folder: Path) -> None:
        """The folder is gone, with all that was in it; open files stay readable, as unlinked ones do."""
        with self._lock:
            self._folders.discard(folder)
            for path in [path for path in self.files if path.parent == folder]:
                del self.files[path]

    def killed(self) -> FaultyDisk:
        """The disk as the next process finds it after a `kill -9`: all that was written, no locks. This one is dead."""
        with self._lock:
            after = FaultyDisk()
            after._folders = set(self._folders)
            after.files = {
                path: File(bytearray(f.data), bytearray(f.durable), set(f.dirty), f.named, f.modified)
                for path, f in self.files.items()
            }
            self.writes_left = 0
        self.hanging.set()
        return after

    def power_cut(self, chance: random.Random) -> FaultyDisk:
        """The disk after the power failed: of what was not synced, any part is there, in any order."""
        with self._lock:
            after = FaultyDisk()
            after._folders = set(self._folders)
            names = [*self.files.items(), *((p, f) for p, f in self.removed if chance.random() < 0.5)]
            for path, file in names:
                if file.named or chance.random() < 0.7:
                    data = self._survivor(file, chance)
                    after.files[path] = File(data, bytearray(data), set(), True, file.modified)
            self.writes_left = 0
        self.hanging.set()
        return after

    # Helpers

    def segments(self) -> list[Path]:
        return sorted(path for path in self.files if path.suffix == ".seg")

    def contents(self) -> bytes:
        return b"".join(bytes(file.data) for file in self.files.values())

    def _survivor(self, file: File, chance: random.Random) -> bytearray:
        size = len(file.data) if chance.random() < 0.8 else len(file.durable)
        data = bytearray(file.durable[:size].ljust(size, b"\0"))
        keep = chance.choice([0.0, 0.5, 0.9, 1.0])
        for page in file.dirty:
            if chance.random() < keep:
                part = file.data[page * PAGE : (page + 1) * PAGE]
                data[page * PAGE : page * PAGE + len(part)] = part
        return data[:size]

    def _put(self, file: File, data: bytes, offset: int) -> None:
        with self._lock:
            file.data.extend(bytes(max(0, offset + len(data) - len(file.data))))
            file.data[offset : offset + len(data)] = data
            file.dirty.update(_pages(offset, len(data)))
            file.modified = time.time()

    def _used(self, file: File) -> int:
        return sum(PAGE for start in range(0, len(file.data), PAGE) if any(file.data[start : start + PAGE]))

    def _handle(self, path: Path) -> int:
        self._next += 1
        self._handles[self._next] = (path, self.files[path])
        return self._next

    def _may(self, operation: str, path: Path) -> None:
        code = errno.EIO if self.writes_left == 0 else self.failing.get(operation)
        if code is not None:
            raise OSError(code, os.strerror(code), str(path))
        if operation == "write" and self.writes_left is not None:
            self.writes_left -= 1


def _pages(offset: int, length: int) -> Iterator[int]:
    yield from range(offset // PAGE, -(-(offset + length) // PAGE))
