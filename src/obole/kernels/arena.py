"""Memory for the intermediate results of recorded steps: a place is used again as soon as nothing refers to it.

A recorded operation holds a bare address. Operations run in the order in which they were recorded, so a place whose
tensors (and their views) are gone when a later operation is recorded can hold that one's result. All recordings share the
places, since only one runs at a time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

ALIGNMENT = 64

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def _references(memory: list[Bytes], index: int) -> int:
    return sys.getrefcount(memory[index])


_IDLE = _references([np.zeros(1, dtype=np.uint8)], 0)  # of a place that no tensor uses


@dataclass(frozen=True, slots=True)
class Place:
    """Which memory of the arena holds a result, and its form. Not a reference: between two runs others may use it."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Arena:
    def __init__(self) -> None:
        self._memory: list[Bytes] = []

    def take(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor in memory that no other living tensor uses; its contents are arbitrary."""
        size = math.prod(shape) * dtype.itemsize
        room = 1 << max(10, (size - 1).bit_length())  # powers of two, so that unequal results can share a place
        for index in range(len(self._memory)):
            # torch keeps a reference to the array for as long as any tensor or view of it lives
            if self._memory[index].nbytes == room and _references(self._memory, index) == _IDLE:
                return self.tensor(Place(index, tuple(shape), dtype))
        self._memory.append(_aligned(room))
        return self.tensor(Place(len(self._memory) - 1, tuple(shape), dtype))

    def place(self, tensor: torch.Tensor) -> Place:
        """Where a tensor that `take` has given lies. Raises ValueError for any other tensor."""
        for index, memory in enumerate(self._memory):
            if memory.ctypes.data == tensor.data_ptr() and tensor.is_contiguous():
                return Place(index, tuple(tensor.shape), tensor.dtype)
        raise ValueError("A recording can only return results of operations, whole.")

    def tensor(self, place: Place) -> torch.Tensor:
        count = math.prod(place.shape)
        if not count:
            return torch.empty(place.shape, dtype=place.dtype)
        return torch.frombuffer(self._memory[place.index], dtype=place.dtype, count=count).view(place.shape)


def _aligned(size: int) -> Bytes:
    memory = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]
