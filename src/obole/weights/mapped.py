"""Opens a model file as a read-only memory map and tells apart what is no model file at all."""

from __future__ import annotations

import json
import mmap
import os
import stat
from pathlib import Path
from typing import Any

from obole.errors import ModelError

LFS_PREFIX = b"version https://git-lfs.github.com/spec/"
MAX_JSON = 64 << 20  # bytes; an index of 100,000 tensors takes about 10 MiB


def map_file(path: Path) -> mmap.mmap:
    """Map `path` for reading. Raises `ModelError` for a file that is missing, empty, or a Git-LFS pointer."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for ever
            raise ModelError(f"{path}: cannot be read, since it is not a regular file.")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ModelError(f"{path}: the file is empty (0 bytes); download it again.")
            if file.read(len(LFS_PREFIX)) == LFS_PREFIX:
                raise ModelError(
                    f"{path}: this is a Git-LFS pointer of {size} bytes, not the file itself; "
                    "run `git lfs pull` or download it again."
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file.") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({error}).") from None


def backing_map(data: Any) -> mmap.mmap | None:
    """The memory map that an array was cut from, if it was."""
    owner = data
    while owner is not None and not isinstance(owner, mmap.mmap):
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    return owner


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads(object_pairs_hook=...)`: raises `ValueError` for a key that occurs twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} occurs twice")
            seen.add(key)
    return result


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object from an untrusted file; `what` names it in the `ModelError` raised for anything else."""
    try:
        value = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{what} is not valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise ModelError(f"{what} must be a JSON object, not {type(value).__name__}.")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON file that holds an object."""
    with map_file(path) as data:
        if len(data) > MAX_JSON:
            raise ModelError(f"{path}: {len(data)} bytes are too many for this file (at most {MAX_JSON}).")
        return parse_json(data[:], str(path))
