"""A strict reader of safetensors: one file, or a folder with shards and an index.

The header is read here and not by the `safetensors` library because a refusal must say which tensor is wrong and how
many bytes were wanted and found, and because the bytes are wanted as they lie in the file. The tests hold this reader
against the library: what that refuses, this refuses. Source: the format's description in huggingface/safetensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from obole.errors import ModelError
from obole.types import WeightTensor
from obole.weights.kinds import row_bytes
from obole.weights.mapped import map_file, parse_json, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes, as in the library
MAX_DIMS = 8
DTYPES = ("F32", "F16", "BF16")
SIZES = {"F32": 4, "F16": 2, "BF16": 2}


def read_safetensors(path: Path) -> Mapping[str, WeightTensor]:
    """The tensors of one file, by name; their bytes stay in its memory map.

    Raises `ModelError` for a header or data that are cut off, for holes, overlaps and trailing bytes, for a size that
    does not follow from shape and dtype, and for a dtype other than F32, F16 and BF16.
    """
    data = map_file(path)
    size = len(data)
    if size < 8:
        _fail(path, f"the file is cut off: the length of the header wants 8 bytes, but the file has {size}")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER:
        _fail(path, f"the header claims {length} bytes; at most {MAX_HEADER} are possible")
    if length > size - 8:
        _fail(path, f"the file is cut off: the header wants {length} bytes, but {size - 8} follow")
    header = parse_json(data[8 : 8 + length], f"{path}: the header")
    header.pop("__metadata__", None)
    entries = sorted(((*_entry(path, name, value), name) for name, value in header.items()), key=lambda e: (e[0], e[1]))
    _check_layout(path, entries, size - 8 - length)
    tensors: dict[str, WeightTensor] = {}
    for begin, end, dtype, shape, name in entries:
        rows = np.frombuffer(data, np.uint8, end - begin, 8 + length + begin).reshape(-1, row_bytes(dtype, shape[-1]))
        tensors[name] = WeightTensor(name, dtype, shape, rows)
    return MappingProxyType(tensors)


def shard_paths(folder: Path) -> tuple[Path, ...]:
    """The files that hold a folder's weights, in a fixed order. Raises `ModelError` if there are none or one is missing."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            _fail(folder, f"the folder holds neither {SINGLE} nor {INDEX}")
        return (folder / SINGLE,)
    shards = sorted(set(_weight_map(folder).values()))
    for shard in shards:
        if not (folder / shard).is_file():
            _fail(folder / INDEX, f"the shard {shard!r} is missing from the folder; download it again")
    return tuple(folder / shard for shard in shards)


def read_folder(folder: Path) -> Mapping[str, WeightTensor]:
    """All tensors of a folder. The index and the shards must agree on which tensor lies where, both ways."""
    paths = shard_paths(folder)
    if not (folder / INDEX).exists():
        return read_safetensors(paths[0])
    weight_map = _weight_map(folder)
    tensors: dict[str, WeightTensor] = {}
    for path in paths:
        for name, tensor in read_safetensors(path).items():
            if weight_map.get(name) != path.name:
                where = f"in {weight_map[name]!r}" if name in weight_map else "nowhere"
                _fail(path, f"tensor {name!r} is in this shard, but {INDEX} has it {where}; this shard is of another model")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            _fail(folder / INDEX, f"tensor {name!r} should be in {shard!r}, but that shard does not have it")
    return MappingProxyType(tensors)


def _weight_map(folder: Path) -> dict[str, str]:
    index = read_json(folder / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _fail(folder / INDEX, "there is no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors") or "\0" in shard:
            _fail(folder / INDEX, f"tensor {name!r} is said to be in {shard!r}, which is not the name of a safetensors file")
    return weight_map


def _entry(path: Path, name: str, value: Any) -> tuple[int, int, str, tuple[int, ...]]:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        _fail(path, f"the entry of tensor {name!r} must have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        _fail(path, f"the shape of tensor {name!r} is {_short(shape)}, not a list of at most {MAX_DIMS} whole numbers")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(path, f"the data_offsets of tensor {name!r} are {_short(offsets)}, not two whole numbers in order")
    if dtype not in DTYPES:
        _fail(path, f"tensor {name!r} has the dtype {_short(dtype)}, which is not supported ({', '.join(DTYPES)} are)")
    wanted, found = math.prod(shape) * SIZES[dtype], offsets[1] - offsets[0]
    if wanted != found:
        _fail(path, f"tensor {name!r} of shape {shape} and dtype {dtype} wants {wanted} bytes, but has {found}")
    if not shape or wanted == 0:
        _fail(path, f"tensor {name!r} has the shape {shape}, which holds no row")
    return offsets[0], offsets[1], dtype, tuple(shape)


def _check_layout(path: Path, entries: list[tuple[int, int, str, tuple[int, ...], str]], available: int) -> None:
    end, before = 0, ""
    for begin, stop, _, _, name in entries:
        if begin < end:
            _fail(path, f"the tensors {before!r} and {name!r} overlap")
        if begin > end:
            _fail(path, f"there is a hole of {begin - end} bytes before tensor {name!r}")
        end, before = stop, name
    if end > available:
        _fail(path, f"the file is cut off: the tensors want {end} bytes, but {available} follow the header; download it again")
    if end < available:
        _fail(path, f"there are {available - end} bytes after the last tensor: {end} wanted, {available} found")


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x < 2**63 for x in value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _fail(path: Path, message: str) -> NoReturn:
    raise ModelError(f"{path}: {message}.")
