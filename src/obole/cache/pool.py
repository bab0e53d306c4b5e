"""The block pool as tensors: where keys and values lie. The books about it are kept in `ledger.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from obole.cache.spec import CacheGroup, CacheSpec
from obole.config import BLOCK_SIZE
from obole.errors import ModelError
from obole.kernels.ops import KV, has_scales

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Rows = np.ndarray[Any, np.dtype[np.void]]

BATCH_BYTES = 1 << 20  # moved at a time between the pool and rows of bytes, so that what is in between stays in the caches


class KVPool:
    """For each slot, i.e. each layer of the largest group, the tensors of `KV` over all blocks.

    Keys (num_blocks, kv_heads, head_dim, 16): transposed, so that one block times a query is 16 lanes side by side;
    values (num_blocks, kv_heads, 16, head_dim); in int8 and fp8 also the scales of both, (num_blocks, kv_heads, 16). Layer
    `group.layers[i]` uses slot i, at the block ids of its group. The memory is not touched here, so the system provides a
    page when it is first written.
    """

    def __init__(self, spec: CacheSpec, groups: tuple[CacheGroup, ...], num_blocks: int, dtype: torch.dtype) -> None:
        heads, dim = _shape(spec)
        slots = max(len(group.layers) for group in groups)
        self.num_blocks = num_blocks
        self.dtype = dtype
        self._slots = [_slot(num_blocks, heads, dim, dtype) for _ in range(slots)]
        self._tensors = [tensor for slot in self._slots for tensor in slot if tensor is not None]  # each (num_blocks, ...)
        self._place = {layer: (slot, g) for g, group in enumerate(groups) for slot, layer in enumerate(group.layers)}

    @staticmethod
    def bytes_per_block(spec: CacheSpec, groups: tuple[CacheGroup, ...], dtype: torch.dtype) -> int:
        return max(len(group.layers) for group in groups) * BLOCK_SIZE * bytes_per_token(*_shape(spec), dtype)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def layer(self, index: int) -> tuple[KV, int]:
        """Keys and values of a layer, and its cache group."""
        slot, group = self._place[index]
        return self._slots[slot], group

    def copy(self, copies: list[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), one after the other: all layers of a group at once."""
        if not copies:
            return
        sources, targets = zip(*copies, strict=True)
        independent = len({*sources, *targets}) == len(set(sources)) + len(targets)
        for batch in [copies] if independent else [[copy] for copy in copies]:
            source, target = (torch.tensor(ids) for ids in zip(*batch, strict=True))
            for tensor in self._tensors:
                tensor[target] = tensor[source]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all tensors."""
        return self.nbytes // self.num_blocks

    def gather(self, blocks: Sequence[int]) -> Bytes:
        """Contents of whole blocks, (n, block_bytes): of each the parts of all tensors one after the other."""
        found = np.empty((len(blocks), self.block_bytes), dtype=np.uint8)
        ids, columns, step = np.array(blocks, dtype=np.int64), self._columns(), self._batch
        for first in range(0, len(blocks), step):
            chosen, part = ids[first : first + step], found[first : first + step]
            for column, rows in columns:
                part[:, column].view(rows.dtype)[:, 0] = rows[chosen]
        return found

    def scatter(self, blocks: Sequence[int], contents: Sequence[Bytes]) -> None:
        """Lay contents, each (block_bytes,) as `gather` gave them, into different blocks."""
        ids, columns, step = np.array(blocks, dtype=np.int64), self._columns(), self._batch
        for first in range(0, len(blocks), step):
            chosen, part = ids[first : first + step], np.stack(contents[first : first + step])
            for column, rows in columns:
                rows[chosen] = part[:, column].view(rows.dtype)[:, 0]

    @property
    def _batch(self) -> int:
        return max(1, BATCH_BYTES // self.block_bytes)

    def _columns(self) -> list[tuple[slice, Rows]]:
        """For each tensor, its part of a block's bytes, and its blocks as opaque elements: numpy moves these several times
        faster than torch does rows of bytes."""
        columns, start = [], 0
        for tensor in self._tensors:
            size = tensor.nbytes // self.num_blocks
            rows = tensor.view(torch.uint8).view(self.num_blocks, -1).numpy().view(f"V{size}")[:, 0]
            columns.append((slice(start, start + size), rows))
            start += size
        return columns


def bytes_per_token(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Of one layer: keys, values and their scales."""
    return 2 * kv_heads * (head_dim * dtype.itemsize + (torch.float32.itemsize if has_scales(dtype) else 0))


def _slot(num_blocks: int, heads: int, dim: int, dtype: torch.dtype) -> KV:
    keys = torch.empty(num_blocks, heads, dim, BLOCK_SIZE, dtype=dtype)
    values = torch.empty(num_blocks, heads, BLOCK_SIZE, dim, dtype=dtype)
    if not has_scales(dtype):
        return KV(keys, values)
    return KV(keys, values, *(torch.empty(num_blocks, heads, BLOCK_SIZE) for _ in range(2)))


def _shape(spec: CacheSpec) -> tuple[int, int]:
    shapes = {(layer.kv_heads, layer.head_dim) for layer in spec.layers}
    if len(shapes) != 1:
        raise ModelError(f"All layers must agree in (kv_heads, head_dim) to share a KV pool, but there are {sorted(shapes)}.")
    return shapes.pop()
