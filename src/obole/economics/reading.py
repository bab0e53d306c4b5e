"""Lines of logs of any size: plain, compressed, or in archives. One line is held at a time."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from obole.errors import InvalidRequest

LONGEST_LINE = 256 << 20  # bytes
LARGEST_DOCUMENT = 64 << 20  # bytes
MAGIC: tuple[tuple[bytes, Callable[[IO[bytes]], IO[bytes]]], ...] = (
    (b"\x1f\x8b", lambda file: cast("IO[bytes]", gzip.GzipFile(fileobj=file))),
    (b"BZh", lambda file: cast("IO[bytes]", bz2.BZ2File(file))),
    (b"\xfd7zXZ\x00", lambda file: cast("IO[bytes]", lzma.open(file))),  # noqa: SIM115
)
FOREIGN = {b"PK\x03\x04": "a zip archive", b"\x28\xb5\x2f\xfd": "compressed by zstd", b"PAR1": "a Parquet table"}
TAR_MARK = (257, b"ustar")

Moved = Callable[[int], None]  # told how many bytes of a file have been read, as they lie on the disk


class Line(NamedTuple):
    """`file`: its name, within an archive that of the member; `number` counts from 1."""

    file: str
    number: int
    text: bytes


def read_json(path: Path, field: str) -> Any:
    """The contents of a file that is one JSON document; None for any other. Raises `InvalidRequest` if it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_DOCUMENT + 1)
        return json.loads(data) if len(data) <= LARGEST_DOCUMENT else None
    except OSError as error:
        raise InvalidRequest(field, f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError):
        return None


def lines(path: Path, moved: Moved = lambda _: None) -> Iterator[Line]:
    """The lines of a file, or of all files in a tar archive; "-" is standard input. Empty ones are left out.

    Raises `InvalidRequest` for what cannot be read, is damaged, or has a line that is too long, with the line's number.
    """
    if str(path) == "-":
        yield from _numbered("standard input", sys.stdin.buffer, lambda: None)
        return
    where = Place(str(path))
    try:
        with path.open("rb") as raw:
            yield from _opened(raw, where, lambda: moved(raw.tell()))
    except tarfile.TarError as error:
        raise InvalidRequest("trace", f"{path} is a damaged archive ({error}): make it anew.") from None
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise InvalidRequest("trace", f"{where} is damaged ({str(error).rstrip('.')}): copy or compress it anew.") from None
    except OSError as error:
        raise InvalidRequest("trace", f"{path} cannot be read: {error.strerror or error}.") from None


class Place:
    """How far the reading has come, for errors."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.number = 0

    def __str__(self) -> str:
        return f"{self.file}, after line {self.number}," if self.number else self.file


def _opened(raw: IO[bytes], where: Place, moved: Callable[[], None]) -> Iterator[Line]:
    start = raw.read(8)
    raw.seek(0)
    for magic, what in FOREIGN.items():
        if start.startswith(magic):
            raise InvalidRequest("trace", f"{where.file} is {what}, which is not read here: unpack it first.")
    inner = next((wrap(raw) for magic, wrap in MAGIC if start.startswith(magic)), raw)
    head = inner.read(TAR_MARK[0] + 5)
    inner.seek(0)
    if head[TAR_MARK[0] :] == TAR_MARK[1]:
        yield from _members(inner, where, moved)
    else:
        for line in _numbered(where.file, inner, moved):
            where.number = line.number
            yield line


def _members(inner: IO[bytes], where: Place, moved: Callable[[], None]) -> Iterator[Line]:
    archive = where.file
    with tarfile.open(fileobj=inner, mode="r|") as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is None or member.name.rpartition("/")[2].startswith("."):
                continue
            where.file, where.number = f"{archive}:{member.name}", 0
            for line in _numbered(where.file, file, moved):
                where.number = line.number
                yield line


def _numbered(name: str, file: IO[bytes], moved: Callable[[], None]) -> Iterator[Line]:
    number = 0
    while text := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(text) > LONGEST_LINE:
            raise InvalidRequest(
                "trace",
                f"Line {number} of {name} has more than {LONGEST_LINE >> 20} MiB: is this a log with one record a line?",
            )
        moved()
        if not text.isspace():
            yield Line(name, number, text)
