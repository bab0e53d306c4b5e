"""A strict, lazy reader of GGUF files, versions 2 and 3, little-endian.

Every count, length, dimension and offset is compared with the size of the file before anything is allocated or looped
over, so that a hostile header costs no more than its own bytes. Source: the GGUF specification of ggml (docs/gguf.md).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from obole.errors import ModelError
from obole.kernels.formats import BLOCKS
from obole.types import WeightTensor
from obole.weights.kinds import GGML_TYPES, row_bytes
from obole.weights.mapped import map_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_KEY = 65535  # bytes, by the specification
MAX_DIMS = 4
MIN_ENTRY = 8 + 1 + 4 + 1  # length and one byte of the key, type, one byte of value
MIN_INFO = 8 + 1 + 4 + 8 + 4 + 8  # length and one byte of the name, dims, one dim, type, offset

# value type -> (name, format)
SCALARS = {
    0: ("UINT8", "<u1"), 1: ("INT8", "<i1"), 2: ("UINT16", "<u2"), 3: ("INT16", "<i2"), 4: ("UINT32", "<u4"),
    5: ("INT32", "<i4"), 6: ("FLOAT32", "<f4"), 7: ("BOOL", "<u1"), 10: ("UINT64", "<u8"), 11: ("INT64", "<i8"),
    12: ("FLOAT64", "<f8"),
}  # fmt: skip
UINT32, BOOL, STRING, ARRAY = 4, 7, 8, 9

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """`metadata`: bool, int, float, str, `list[str]`, or a read-only numpy array. `tensors`: by the names in the file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, WeightTensor]
    path: Path


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file; the tensors stay in its memory map.

    Raises `ModelError`, naming file and field, for anything that does not follow the specification, lies outside the
    file, overlaps, or has an encoding that obole does not know.
    """
    return _Reader(path, map_file(path)).read()


@dataclass(frozen=True, slots=True)
class _Info:
    name: str
    kind: str
    shape: tuple[int, ...]  # row-major
    row: int  # bytes
    offset: int  # from the start of the data

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row


class _Reader:
    """A cursor over the header."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size, self.pos = path, data, len(data), 0

    def read(self) -> GgufFile:
        num_tensors, num_keys = self._preamble()
        metadata: dict[str, Any] = {}
        types: dict[str, int] = {}
        for i in range(num_keys):
            key = self._string(f"key {i} of the metadata", MAX_KEY)
            if not key:
                self._fail(f"key {i} of the metadata is empty")
            if key in metadata:
                self._fail(f"the key {key!r} occurs twice")
            types[key] = self._u32(f"the type of {key!r}")
            metadata[key] = self._value(key, types[key])
        alignment = self._alignment(metadata, types)
        infos: dict[str, _Info] = {}
        for i in range(num_tensors):
            info = self._info(i)
            if info.name in infos:
                self._fail(f"the tensor {info.name!r} occurs twice")
            infos[info.name] = info
        start = -(-self.pos // alignment) * alignment
        self._check_layout(infos, start, alignment)
        tensors = {info.name: self._tensor(info, start) for info in infos.values()}
        return GgufFile(MappingProxyType(metadata), MappingProxyType(tensors), self.path)

    def _preamble(self) -> tuple[int, int]:
        magic = bytes(self.data[:4])
        if magic != MAGIC:
            self._fail(f"not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
        self.pos = 4
        version = self._u32("the version")
        if version not in VERSIONS:
            if _U32.unpack(version.to_bytes(4, "big"))[0] in (1, *VERSIONS):
                self._fail("big-endian GGUF files are not supported; convert it with `gguf-convert-endian`")
            self._fail(f"GGUF version {version} is not supported (versions 2 and 3 are); convert the model again")
        num_tensors, num_keys = self._u64("the number of tensors"), self._u64("the number of metadata keys")
        self._bound("the number of metadata keys", num_keys, MIN_ENTRY)
        self._bound("the number of tensors", num_tensors, MIN_INFO)
        return num_tensors, num_keys

    def _alignment(self, metadata: Mapping[str, Any], types: Mapping[str, int]) -> int:
        if "general.alignment" not in metadata:
            return DEFAULT_ALIGNMENT
        value = metadata["general.alignment"]
        if types["general.alignment"] != UINT32:
            self._fail("general.alignment must be of type UINT32")
        if value < 8 or value > MAX_ALIGNMENT or value & (value - 1):
            self._fail(f"general.alignment is {value}; it must be a power of two from 8 to {MAX_ALIGNMENT}")
        return int(value)

    def _value(self, key: str, value_type: int) -> Any:
        if value_type == STRING:
            return self._string(f"the value of {key!r}")
        if value_type == ARRAY:
            return self._array(key)
        if value_type not in SCALARS:
            self._fail(f"the value of {key!r} has the unknown type {value_type}")
        value = self._numbers(key, value_type, 1)[0]
        return value.item()

    def _array(self, key: str) -> Any:
        item_type = self._u32(f"the element type of {key!r}")
        count = self._u64(f"the length of {key!r}")
        if item_type == ARRAY:
            self._fail(f"the value of {key!r} is an array of arrays, which is not supported")
        if item_type == STRING:
            return self._strings(key, count)
        if item_type not in SCALARS:
            self._fail(f"the elements of {key!r} have the unknown type {item_type}")
        return self._numbers(key, item_type, count)

    def _numbers(self, key: str, value_type: int, count: int) -> np.ndarray[Any, Any]:
        dtype = np.dtype(SCALARS[value_type][1])
        self._bound(f"the length of {key!r}", count, dtype.itemsize)
        values = np.frombuffer(self.data, dtype, count, self.pos).copy()
        self.pos += values.nbytes
        if value_type == BOOL:
            if values.size and values.max() > 1:
                self._fail(f"{key!r} holds the byte {values.max()}, which is not a truth value")
            values = values.astype(np.bool_)
        values.flags.writeable = False
        return values

    def _strings(self, key: str, count: int) -> list[str]:
        """A vocabulary has hundreds of thousands of entries: this loop does nothing but what it must."""
        self._bound(f"the length of {key!r}", count, 8)
        data, pos, last, unpack = self.data, self.pos, self.size - 8, _U64.unpack_from
        result: list[str] = []
        append = result.append
        try:
            for _ in range(count):
                if pos > last:
                    self._fail(f"the file ends inside {key!r}, at entry {len(result)} of {count}")
                start = pos + 8
                pos = start + unpack(data, pos)[0]
                if pos > self.size:
                    self._fail(f"entry {len(result)} of {key!r} wants {pos - start} bytes, but {self.size - start} are left")
                append(data[start:pos].decode())
        except UnicodeDecodeError:
            self._fail(f"entry {len(result)} of {key!r} is not valid UTF-8")
        self.pos = pos
        return result

    def _info(self, index: int) -> _Info:
        name = self._string(f"the name of tensor {index}", MAX_KEY)
        if not name:
            self._fail(f"the name of tensor {index} is empty")
        num_dims = self._u32(f"the number of dimensions of {name!r}")
        if not 1 <= num_dims <= MAX_DIMS:
            self._fail(f"tensor {name!r} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
        dims = [self._u64(f"dimension {i} of {name!r}") for i in range(num_dims)]
        number = self._u32(f"the type of {name!r}")
        offset = self._u64(f"the offset of {name!r}")
        kind = GGML_TYPES.get(number)
        if kind not in BLOCKS:
            label = kind or f"number {number}"
            self._fail(f"tensor {name!r} has the type {label}, which is not supported ({', '.join(BLOCKS)} are)")
        if min(dims) < 1 or math.prod(dims) > self.size * 8:
            self._fail(f"tensor {name!r} has the dimensions {dims}, which cannot fit in a file of {self.size} bytes")
        try:
            row = row_bytes(kind, dims[0])
        except ValueError as error:
            self._fail(f"tensor {name!r} of type {kind}: {error}")
        return _Info(name, kind, tuple(reversed(dims)), row, offset)

    def _check_layout(self, infos: Mapping[str, _Info], start: int, alignment: int) -> None:
        """Tensors lie one after the other, so a wrong type or shape shows as an overlap or a hole."""
        end, before = 0, ""
        for info in sorted(infos.values(), key=lambda info: info.offset):
            if info.offset % alignment:
                self._fail(f"the offset {info.offset} of {info.name!r} is not a multiple of the alignment {alignment}")
            if info.offset < end:
                self._fail(f"the tensors {before!r} and {info.name!r} overlap")
            if info.offset >= end + alignment:
                self._fail(f"there is a hole of {info.offset - end} bytes before tensor {info.name!r}")
            end, before = info.offset + info.nbytes, info.name
            if start + end > self.size:
                self._fail(
                    f"the file is cut off: tensor {info.name!r} wants bytes up to {start + end}, but the file has {self.size}; "
                    "download it again"
                )

    def _tensor(self, info: _Info, start: int) -> WeightTensor:
        data = np.frombuffer(self.data, np.uint8, info.nbytes, start + info.offset).reshape(-1, info.row)
        return WeightTensor(info.name, info.kind, info.shape, data)

    def _string(self, what: str, longest: int | None = None) -> str:
        length = self._u64(f"the length of {what}")
        if longest is not None and length > longest:
            self._fail(f"{what} is {length} bytes long; at most {longest} are possible")
        self._bound(f"the length of {what}", length, 1)
        raw = self.data[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._fail(f"{what} is not valid UTF-8")

    def _u32(self, what: str) -> int:
        return int(_U32.unpack(self._take(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(_U64.unpack(self._take(8, what))[0])

    def _take(self, count: int, what: str) -> bytes:
        if self.size - self.pos < count:
            self._fail(f"the file of {self.size} bytes is cut off: {what} wants {count} bytes at {self.pos}")
        self.pos += count
        return self.data[self.pos - count : self.pos]

    def _bound(self, what: str, count: int, each: int) -> None:
        left = self.size - self.pos
        if count > left // each:
            self._fail(f"{what} is {count}, which wants at least {count * each} bytes, but the file has {left} left")

    def _fail(self, message: str) -> NoReturn:
        raise ModelError(f"{self.path}: {message}.")
