"""What a record on disk looks like: a header of 192 bytes that says all about it, then its payload.

docs/cache.md has the table. The header's checksum covers everything before it, the payload's checksum included, and starts
from the number of the segment that the record was written to. So a record is valid at one place of one segment: what was
moved, mixed up or half written is noticed, and nobody can plant a header inside a payload without knowing that number.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from obole.cache.tiers.io import Buffer

VERSION = 1
ALIGN = 64
MAX_KEY = 64
OWNER_BYTES = 16

_MAGIC = b"obolerec"
_FIELDS = struct.Struct("<8sHBBIQQQ32s16s16s64s8x")  # 176 bytes, and 16 of checksum
HEADER = _FIELDS.size + 16

_SEGMENT_MAGIC = b"oboleseg"
_SEGMENT_FIELDS = struct.Struct("<8sHB5xQQ16x")  # 48 bytes, and 16 of checksum
SEGMENT_HEADER = _SEGMENT_FIELDS.size + 16

_END_MAGIC = b"oboleend"
_END_FIELDS = struct.Struct("<8sHB5xQ24x")
TRAILER = _END_FIELDS.size + 16


class Kind(enum.IntEnum):
    BLOCK = 1
    DOCUMENT = 2
    SUMMARY = 3  # the headers of all records before it, so that a start reads one record and not the whole segment
    DELETED = 4  # was overwritten with zeros because its owner wanted so; only its length is left


class Queue(enum.IntEnum):
    """Which of the two queues of the log a segment belongs to (`policy.LogPolicy`)."""

    COPIES = 1
    MAIN = 2


class Fault(enum.StrEnum):
    """Why something on disk cannot be served."""

    BLANK = "blank"  # nothing was ever written there
    HEADER = "header"  # the header's checksum is wrong
    CHECKSUM = "checksum"  # the payload's is
    VERSION = "version"
    IDENTITY = "identity"  # other weights, format, layout, shard
    TRUNCATED = "truncated"
    DELETED = "deleted"
    MISPLACED = "misplaced"  # a valid record, but not the one that was looked for
    VANISHED = "vanished"  # the segment is gone
    IO_ERROR = "io_error"
    TIMEOUT = "timeout"  # the disk did not answer


@dataclass(frozen=True, slots=True)
class Header:
    """`written`: nanoseconds since 1970; a record that is copied to another segment keeps it."""

    kind: Kind
    length: int  # of the payload, bytes
    written: int
    identity: bytes  # 32
    owner: bytes  # 16
    checksum: bytes  # 16, of the payload
    key: bytes  # up to 64


def extent(length: int) -> int:
    """Bytes from one record to the next."""
    return HEADER + -(-length // ALIGN) * ALIGN


def digest(payload: Buffer) -> bytes:
    return xxh3_128_digest(payload)


def pack(header: Header, number: int, offset: int) -> bytes:
    """A header for a place in segment `number`."""
    fields = _FIELDS.pack(
        _MAGIC, VERSION, header.kind, len(header.key), 0, header.length, header.written, offset,
        header.identity, header.owner, header.checksum, header.key,
    )  # fmt: skip
    return fields + xxh3_128_digest(fields, number)


def unpack(data: Buffer, number: int, offset: int) -> Header | Fault:
    """The header at a place in segment `number`, or what is wrong with it."""
    data = bytes(data)
    if len(data) < HEADER:
        return Fault.TRUNCATED
    magic, version, kind, key_length, _, length, written, place, identity, owner, checksum, key = _FIELDS.unpack_from(data)
    if magic != _MAGIC:
        return Fault.HEADER if any(data) else Fault.BLANK
    if version != VERSION:
        return Fault.VERSION
    if xxh3_128_digest(data[: _FIELDS.size], number) != data[_FIELDS.size : HEADER]:
        return Fault.HEADER
    if place != offset or key_length > MAX_KEY or kind not in Kind._value2member_map_:
        return Fault.HEADER
    return Header(Kind(kind), length, written, identity, owner, checksum, key[:key_length])


def find_header(data: bytes, start: int) -> int:
    """Where the next header may begin, at or after `start`; -1 if nowhere."""
    while (start := data.find(_MAGIC, start)) >= 0 and start % ALIGN:
        start += 1
    return start


def pack_segment(number: int, queue: Queue, created: int) -> bytes:
    fields = _SEGMENT_FIELDS.pack(_SEGMENT_MAGIC, VERSION, queue, number, created)
    return fields + xxh3_128_digest(fields)


def unpack_segment(data: bytes) -> tuple[int, Queue, int] | Fault:
    """Number, queue and time of creation (nanoseconds since 1970) of a segment."""
    if len(data) < SEGMENT_HEADER:
        return Fault.TRUNCATED
    magic, version, queue, number, created = _SEGMENT_FIELDS.unpack_from(data)
    if magic == _SEGMENT_MAGIC and version != VERSION:
        return Fault.VERSION
    if magic != _SEGMENT_MAGIC or xxh3_128_digest(data[: _SEGMENT_FIELDS.size]) != data[_SEGMENT_FIELDS.size : SEGMENT_HEADER]:
        return Fault.HEADER if any(data) else Fault.BLANK
    return number, Queue(queue), created


def pack_trailer(number: int, summary: int) -> bytes:
    """The last bytes of a segment that is complete: where its summary is."""
    fields = _END_FIELDS.pack(_END_MAGIC, VERSION, 0, summary)
    return fields + xxh3_128_digest(fields, number)


def unpack_trailer(data: bytes, number: int) -> int | None:
    """Where the summary is; None unless these are the last bytes of a complete segment."""
    if len(data) < TRAILER or data[:8] != _END_MAGIC:
        return None
    if xxh3_128_digest(data[: _END_FIELDS.size], number) != data[_END_FIELDS.size : TRAILER]:
        return None
    _, version, _, summary = _END_FIELDS.unpack_from(data)
    return int(summary) if version == VERSION else None
