"""The record beside a file that was checked when it was fetched: its BLAKE3 digest and its size.

A later change of the file is then noticed without the network: the size at once, the contents when they are digested.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from obole.errors import ModelError

SUFFIX = ".blake3"
PIECE = 16 << 20  # bytes digested at a time, by all processors


class Record(NamedTuple):
    digest: str  # hexadecimal
    size: int  # bytes


def record_path(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)


def read_record(path: Path) -> Record | None:
    """The record of the file at `path`; None if there is none, or one that cannot be read."""
    try:
        digest, size = record_path(path).read_text().split()
        return Record(digest, int(size))
    except (OSError, ValueError):
        return None


def write_record(path: Path) -> None:
    """Take the file at `path` for verified."""
    record_path(path).write_text(f"{file_digest(path).hex()} {path.stat().st_size}\n")


def file_digest(path: Path) -> bytes:
    """BLAKE3 (32 bytes) of a file's contents, with all processors."""
    try:
        digest, buffer = blake3(max_threads=blake3.AUTO), bytearray(PIECE)
        with path.open("rb", buffering=0) as file:  # a map of the file would count as our memory, all of it
            while size := file.readinto(buffer):
                digest.update(memoryview(buffer)[:size])
        return digest.digest()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error}).") from None


def checked_digest(path: Path) -> bytes:
    """The digest of a file. Raises `ModelError` if a record says that it was another one when the file was verified."""
    digest, record = file_digest(path), read_record(path)
    if record is not None and record.digest != digest.hex():
        raise ModelError(f"{path}: the file has changed since it was verified; delete it, and it will be fetched again.")
    return digest
