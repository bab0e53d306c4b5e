"""Tensors that differ from what lies in the file, made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from obole.kernels.formats import dequantize
from obole.types import WeightTensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class DerivedTensor(WeightTensor):
    """A `WeightTensor` whose `data` is computed at each access, so that only what is in use takes memory.

    Take `data` once and keep it for as long as needed.
    """

    __slots__ = ("_make",)
    _make: Callable[[], Bytes]

    def __init__(self, name: str, kind: str, shape: tuple[int, ...], make: Callable[[], Bytes]) -> None:
        # the base class is frozen, and its slot for `data` stays empty
        for key, value in (("name", name), ("kind", kind), ("shape", shape), ("_make", make)):
            object.__setattr__(self, key, value)

    @property
    def data(self) -> Bytes:
        data = self._make()
        data.flags.writeable = False
        return data


def renamed(tensor: WeightTensor, name: str) -> WeightTensor:
    return WeightTensor(name, tensor.kind, tensor.shape, tensor.data)


def unpermuted(tensor: WeightTensor, heads: int) -> WeightTensor:
    """Bring the rows of a query or key matrix (or bias) of a GGUF llama back into the half-split order of RoPE.

    llama.cpp's converter interleaves the two halves of each head: row 2i of a head was row i, row 2i+1 was row i + d/2.
    Source: `LlamaModel.permute` in llama.cpp's conversion/llama.py.
    """

    def make() -> Bytes:
        items = tensor.data if len(tensor.shape) == 2 else tensor.data.reshape(tensor.shape[0], -1)
        pairs = items.reshape(heads, tensor.shape[0] // heads // 2, 2, -1).swapaxes(1, 2)
        return np.ascontiguousarray(pairs).reshape(tensor.data.shape)

    return DerivedTensor(tensor.name, tensor.kind, tensor.shape, make)


def plus_one(tensor: WeightTensor) -> WeightTensor:
    """Gemma's norms multiply by 1 + weight: the effective weight, in float32."""

    def make() -> Bytes:
        values = dequantize(tensor) + np.float32(1)
        return values.view(np.uint8).reshape(-1, 4 * tensor.shape[-1])

    return DerivedTensor(tensor.name, "F32", tensor.shape, make)


def scaled(tensor: WeightTensor, factor: float) -> WeightTensor:
    """The tensor times a factor, in float32."""

    def make() -> Bytes:
        values = dequantize(tensor) * np.float32(factor)
        return values.view(np.uint8).reshape(tensor.shape[0], -1)

    return DerivedTensor(tensor.name, "F32", tensor.shape, make)
