"""Small named byte strings of an owner, kept beside its blocks: what a document's record holds. Pure functions."""

from __future__ import annotations

import struct

from blake3 import blake3

_LENGTH = struct.Struct("<I")


def document_key(owner: bytes, name: bytes) -> bytes:
    """Key of the record; owners have a fixed length, so no two (owner, name) share one."""
    return blake3(owner + name).digest()


def pack_document(name: bytes, data: bytes) -> bytes:
    return _LENGTH.pack(len(name)) + name + data


def unpack_document(payload: bytes) -> tuple[bytes, bytes]:
    """Name and bytes."""
    (length,) = _LENGTH.unpack_from(payload)
    return payload[_LENGTH.size : _LENGTH.size + length], payload[_LENGTH.size + length :]
