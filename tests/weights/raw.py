"""GGUF files written byte by byte, so that any field can hold anything."""

from __future__ import annotations

import struct

UINT8, UINT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 6, 7, 8, 9, 10


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u64(len(raw) if length is None else length) + raw


def key(name: str | bytes, kind: int, payload: bytes) -> bytes:
    return text(name) + u32(kind) + payload


def array(kind: int, count: int, payload: bytes) -> bytes:
    return u32(kind) + u64(count) + payload


def info(name: str = "t", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0, num_dims: int | None = None) -> bytes:
    return text(name) + u32(len(dims) if num_dims is None else num_dims) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def header(num_tensors: int, num_keys: int, magic: bytes = b"GGUF", version: int = 3) -> bytes:
    return magic + u32(version) + u64(num_tensors) + u64(num_keys)


def gguf(keys: tuple[bytes, ...] = (), infos: tuple[bytes, ...] = (), data: bytes = b"", alignment: int = 32) -> bytes:
    head = header(len(infos), len(keys)) + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data
