"""Names of cached blocks: a hash chain over everything that the contents of a block depend on. No torch."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from collections.abc import Sequence as Items

from blake3 import blake3

from obole.config import BLOCK_SIZE

Value = str | bytes | int | float | bool | None | Items["Value"] | Mapping[str, "Value"]

_TOKENS = struct.Struct(f"<{BLOCK_SIZE}i")


def canonical(value: Value) -> bytes:
    """Encode plain data so that different data never give the same bytes: kind, length, contents; mappings by sorted name.

    Raises TypeError for anything that is not plain data: an identity must not depend on an object's address or `repr`.
    """
    if value is None:
        kind, body = b"n", b""
    elif isinstance(value, bool):  # before int, which it also is
        kind, body = b"b", b"\x01" if value else b"\x00"
    elif isinstance(value, int):
        kind, body = b"i", str(value).encode()
    elif isinstance(value, float):
        kind, body = b"f", struct.pack("<d", value)
    elif isinstance(value, str):
        kind, body = b"s", value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes):
        kind, body = b"y", value
    elif isinstance(value, Mapping):
        kind, body = b"m", b"".join(canonical(name) + canonical(value[name]) for name in sorted(value))
    elif isinstance(value, list | tuple):
        kind, body = b"l", b"".join(map(canonical, value))
    else:
        raise TypeError(f"A cache identity holds plain data, not {type(value).__name__}.")
    return kind + struct.pack("<Q", len(body)) + body


def root_key(identity: bytes, tenant: str) -> bytes:
    """Key before the first token. `identity`: `canonical` encoding of all that fixes the contents beside the tokens."""
    return blake3(canonical([identity, tenant])).digest()


def block_key(parent: bytes, tokens: Items[int]) -> bytes:
    """Key of the block of these 16 tokens after the block, or root, `parent`. Both parts have a fixed length."""
    return blake3(parent + _TOKENS.pack(*tokens)).digest()


def extend_keys(keys: list[bytes], root: bytes, tokens: list[int], count: int) -> None:
    """Append to `keys` until it names the first `count` full blocks of `tokens`."""
    parent = keys[-1] if keys else root
    for start in range(len(keys) * BLOCK_SIZE, count * BLOCK_SIZE, BLOCK_SIZE):
        parent = block_key(parent, tokens[start : start + BLOCK_SIZE])
        keys.append(parent)


def group_suffix(group: int) -> bytes:
    """Appended to a block's key: all cache groups share one ledger, and hold different layers of the same tokens."""
    return struct.pack("<H", group)


def owner_tag(tenant: str) -> bytes:
    """16 bytes that stand for a tenant, by which its blocks are found when they are to be deleted."""
    return blake3(canonical(["owner", tenant])).digest(16)
