"""The few file operations that the SSD tier needs, as a protocol, so that a test can put a failing disk in their place."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Buffer = bytes | bytearray | memoryview | Any  # whatever has bytes to read or room to write them; numpy arrays among them
_PIECES = 1024  # buffers in one call; Linux takes no more


@dataclass(frozen=True, slots=True)
class Listed:
    name: str
    size: int  # bytes
    modified: float  # seconds since 1970


class Disk(Protocol):
    """Every method may raise OSError, and may take as long as it likes. Files are named by descriptors once open."""

    def create(self, path: Path) -> int:
        """Open a new file for reading and writing, locked. FileExistsError where there is one already."""

    def open(self, path: Path, *, write: bool = False) -> int:
        """Open an existing file."""

    def close(self, fd: int) -> None: ...

    def lock(self, fd: int) -> bool:
        """Take the only lock on a file, until it is closed or its process ends. False where somebody else has it."""

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Fill the buffers one after the other from one place of the file; fewer bytes only at its end."""

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        """Write the buffers one after the other to one place of the file, all of them."""

    def resize(self, fd: int, size: int) -> None: ...

    def size(self, fd: int) -> int: ...

    def sync(self, fd: int) -> None:
        """Return when the contents and the size of the file would survive a power cut."""

    def list(self, folder: Path) -> list[Listed]:
        """The files of a folder."""

    def remove(self, path: Path) -> None: ...

    def make_folder(self, path: Path) -> None:
        """With those above it; nothing happens where there is one."""

    def sync_folder(self, path: Path) -> None:
        """Return when the names in the folder would survive a power cut."""


class OsDisk:
    """The operating system's files. The kernel is told of no access pattern: reads are large and in order already."""

    def create(self, path: Path) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return fd

    def open(self, path: Path, *, write: bool = False) -> int:
        return os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        os.close(fd)

    def lock(self, fd: int) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def read(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        left = [view for view in map(_octets, buffers) if len(view)]
        done = 0
        while left:
            count = os.preadv(fd, left[:_PIECES], offset + done)
            if count == 0:
                break
            done += count
            left = _rest(left, count)
        return done

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
        left = [view for view in map(_octets, buffers) if len(view)]
        while left:
            count = os.pwritev(fd, left[:_PIECES], offset)
            if count == 0:
                raise OSError(errno.EIO, "The disk took nothing.")
            offset += count
            left = _rest(left, count)

    def resize(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def list(self, folder: Path) -> list[Listed]:
        found = []
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    if entry.is_file(follow_symlinks=False):
                        about = entry.stat(follow_symlinks=False)
                        found.append(Listed(entry.name, about.st_size, about.st_mtime))
                except FileNotFoundError:  # gone since it was listed
                    continue
        return found

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def sync_folder(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _octets(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _rest(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of the buffers after the first `count` bytes."""
    for i, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[i + 1 :]]
        count -= len(view)
    return []
