"""Products over tile registers: AMX where this machine has it, and always the same code over tiles emulated in C++."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from obole.errors import ConfigError
from obole.kernels import _native
from obole.kernels.cpu import EMULATED_AMX
from obole.kernels.dispatch import load_ops
from obole.types import WeightTensor
from tests.kernels.support import ISAS_HERE, QUANTISED, activations, native, same_bits, weights

BEST_PLAIN = next(isa for isa in ISAS_HERE if isa != "amx")
TILED = [EMULATED_AMX, *(isa for isa in ISAS_HERE if isa == "amx")]
WHOLE = 256  # inputs that every kind takes


def groups_of(kind: str) -> int:
    """Inputs that make no whole number of steps, where the kind allows it."""
    return 15 * 32 if not kind.endswith("_K") else 3 * WHOLE


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("isa", TILED)
def test_tiles_give_the_bits_of_the_other_instruction_sets(isa, kind):
    plain = native(1, BEST_PLAIN)
    bias = np.linspace(-1, 1, 37).astype(np.float32)
    for inputs, most in ((groups_of(kind), 33), (WHOLE, 300)):
        parts = [weights(kind, 37, inputs), weights(kind, 16, inputs, seed=1)]
        w = plain.pack_linear(parts, [bias, None])
        x = activations(most, inputs, seed=2)
        expected = plain.linear(x, w)
        for threads in (1, 2):
            ops = native(threads, isa)
            for rows in (*range(1, 34), 64, 100, 128, 129, 144, 257, 300):
                if rows <= most:
                    assert same_bits(ops.linear(x[-rows:], w), expected[-rows:]), (inputs, threads, rows)


@pytest.mark.parametrize("inputs", [32, 64, 96, 128, 160, 256, 288])
@pytest.mark.parametrize("isa", TILED)
def test_any_number_of_groups(isa, inputs):
    for kind in ("Q4_0", "Q5_1", "Q8_0"):
        tensor, x = weights(kind, 16, inputs), activations(18, inputs)
        w = native(1).pack_linear([tensor], [None])
        assert same_bits(native(1, isa).linear(x, w), native(1, BEST_PLAIN).linear(x, w))


@pytest.mark.parametrize("isa", TILED)
def test_sums_of_tiles_are_exact_at_their_largest(isa):
    for kind, code, value in (("Q8_0", 0x80, -128.0), ("Q8_0", 0x7F, 127.0), ("Q4_0", 0x00, -8.0), ("Q4_0", 0xFF, 7.0)):
        block = np.full(34 if kind == "Q8_0" else 18, code, dtype=np.uint8)
        block[:2] = np.array([1.0], dtype=np.float16).view(np.uint8)
        tensor = WeightTensor("w", kind, (16, 1024), np.tile(block, (16, 32)))
        ops = native(1, isa)
        w = ops.pack_linear([tensor], [None])
        for x in (-127.0, 127.0):
            assert ops.linear(torch.full((21, 1024), x), w).unique().tolist() == [1024 * x * value], (kind, code, x)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("isa", TILED)
def test_extreme_activations_stay_in_their_rows(isa, kind):
    x = activations(20, WHOLE)
    x[1] = 1e-42
    x[2] = 3e38
    x[3, 7] = torch.nan
    x[17, 200] = torch.inf
    x[18] = 0
    tensor = weights(kind, 20, WHOLE)
    w = native(1).pack_linear([tensor], [None])
    got, expected = native(2, isa).linear(x, w), native(1, BEST_PLAIN).linear(x, w)
    finite = torch.ones(20, dtype=torch.bool)
    finite[[3, 17]] = False
    assert same_bits(got[finite], expected[finite])
    assert not got[~finite].isfinite().any()


def test_the_check_before_amx_is_used():
    # the tiles, and every other instruction set, pass it
    for isa in (EMULATED_AMX, *ISAS_HERE):
        assert _native.same_products(isa, "portable")
    with pytest.raises(ValueError, match="mmx"):
        _native.same_products("mmx", "portable")


def test_amx_is_chosen_where_it_can_be_used_and_its_absence_is_explained(monkeypatch):
    refusal = _native.amx_refusal()
    assert (refusal is None) == _native.runs("amx")
    monkeypatch.setenv("OBOLE_ISA", "amx")
    if refusal is None:
        assert load_ops("auto", 1).name == "native amx"
    else:
        with pytest.raises(ConfigError, match=f"'amx' .{refusal}.; it has {', '.join(ISAS_HERE)}"):
            load_ops("auto", 1)
    monkeypatch.delenv("OBOLE_ISA")
    assert load_ops("auto", 1).name == f"native {ISAS_HERE[0]}"  # never the emulation
