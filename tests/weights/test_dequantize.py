"""Every encoding against the `gguf` package, on random blocks: all bit patterns, scales included."""

from __future__ import annotations

import os
import subprocess
import sys

import gguf
import numpy as np
import pytest

from obole.kernels.formats import BLOCKS, dequantize
from obole.types import WeightTensor
from obole.weights.kinds import row_bytes
from tests.fakes.checkpoints import random_quantized


@pytest.mark.parametrize("kind", BLOCKS)
def test_equals_the_reference(kind: str) -> None:
    quant = gguf.GGMLQuantizationType[kind]
    assert BLOCKS[kind] == gguf.GGML_QUANT_SIZES[quant]
    rng = np.random.default_rng(0)
    for data in (
        rng.integers(0, 256, (5, row_bytes(kind, 512)), dtype=np.uint8),
        random_quantized(rng, (5, 512), kind) if kind.startswith("Q") else np.zeros((5, row_bytes(kind, 512)), np.uint8),
    ):
        with np.errstate(all="ignore"):
            typed = {"F32": data.view(np.float32), "F16": data.view(np.float16)}.get(kind, data)
            wanted = gguf.quants.dequantize(typed, quant).reshape(5, 512)
        got = dequantize(WeightTensor("t", kind, (5, 512), data))
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got.view(np.uint32)[~np.isnan(wanted)], wanted.view(np.uint32)[~np.isnan(wanted)])
        np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))


def test_known_values() -> None:
    block = np.float16(0.5).tobytes() + bytes([0x80] + [0x8F] * 15)
    got = dequantize(WeightTensor("t", "Q4_0", (32,), np.frombuffer(block, np.uint8).reshape(1, -1)))
    assert got.tolist() == [-4.0] + [3.5] * 15 + [0.0] * 16


def test_rows_that_do_not_fill_blocks() -> None:
    with pytest.raises(ValueError, match="whole blocks of 256"):
        row_bytes("Q6_K", 128)


def test_reading_checkpoints_needs_no_torch() -> None:
    code = "import sys, obole.weights.checkpoint; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": os.pathsep.join(sys.path)}).returncode == 0
