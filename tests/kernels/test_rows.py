"""Norms, activations, rotation, argmax, noise and block copies: each right, and each row on its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from obole.errors import ConfigError
from obole.kernels.dispatch import load_ops
from obole.kernels.reference.ops import philox4x32
from tests.kernels.support import ISAS_HERE, REFERENCE, activations, native, same_bits

ALL = [native(2, isa) for isa in ISAS_HERE]
SIZES = (1, 8, 15, 16, 64, 100, 576, 896)
every_isa = pytest.mark.parametrize("ops", ALL, ids=ISAS_HERE)


def close(got, expected, rtol=2e-6, atol=1e-7):
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)


@every_isa
@pytest.mark.parametrize("n", SIZES)
def test_rms_norm(ops, n):
    weight = torch.linspace(-1, 2, n)
    for rows in (0, 1, 5, 300):
        x = activations(rows, n)
        got = ops.rms_norm(x, weight, 1e-6)
        close(got, REFERENCE.rms_norm(x, weight, 1e-6))
        for r in range(0, rows, 37):
            assert same_bits(ops.rms_norm(x[r : r + 1], weight, 1e-6)[0], got[r])


@every_isa
def test_rms_norm_of_heads_in_a_fused_view(ops):
    fused = activations(9, 7 * 40).unflatten(1, (7, 40))
    view, weight = fused[:, 2:5], torch.linspace(0.5, 1.5, 40)
    got = ops.rms_norm(view, weight, 1e-5)
    assert got.shape == (9, 3, 40)
    assert got.is_contiguous()
    close(got, REFERENCE.rms_norm(view, weight, 1e-5))
    assert same_bits(got[:, 1], ops.rms_norm(fused[:, 3], weight, 1e-5))


@every_isa
@pytest.mark.parametrize("n", SIZES)
def test_add_and_add_rms_norm(ops, n):
    x, residual, weight = activations(20, n), activations(20, n, seed=1), torch.linspace(-1, 2, n)
    total = residual + x
    mine = residual.clone()
    normed = ops.add_rms_norm(x, mine, weight, 1e-5)
    assert same_bits(mine, total)
    assert same_bits(normed, ops.rms_norm(total, weight, 1e-5))
    plain = residual.clone()
    assert ops.add_(plain, x) is None
    assert same_bits(plain, total)


@every_isa
@pytest.mark.parametrize(("silu", "name"), [(True, "silu_mul"), (False, "gelu_tanh_mul")])
def test_gated_activations(ops, silu, name):
    for n in (1, 17, 64, 333):
        x = activations(6, 2 * n)
        got = getattr(ops, name)(x)
        close(got, getattr(REFERENCE, name)(x), rtol=3e-6, atol=1e-6)
        assert same_bits(getattr(ops, name)(x[3:4]), got[3:4])
    wide = torch.linspace(-100, 100, 4001)
    got = getattr(ops, name)(torch.cat([wide, torch.ones(4001)])[None])[0]
    x = wide.double()
    slope = x if silu else 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)  # (1 + tanh(u)) / 2 = sigmoid(2u)
    exact = x * torch.sigmoid(slope)
    assert float((got.double() - exact).abs().max()) < 1e-5
    relative = ((got.double() - exact) / exact).abs()[(exact.abs() > 1e-30)]
    assert float(relative.max()) < 1e-4  # the exponent of exp is rounded to float32: relative error grows with |x|
    assert getattr(ops, name)(torch.tensor([[math.nan, 1.0]])).isnan().all()


@every_isa
@pytest.mark.parametrize("dim", [2, 8, 24, 64, 128])
def test_rope(ops, dim):
    angle = torch.arange(50)[:, None] / torch.pow(10000.0, torch.arange(dim // 2) / (dim // 2))
    cos, sin = angle.cos().contiguous(), angle.sin().contiguous()
    fused = activations(12, 5 * dim).unflatten(1, (5, dim))
    positions = torch.tensor([0, 49, 3, 3, 7, 1, 2, 48, 30, 20, 10, 5], dtype=torch.int32)
    mine, theirs = fused.clone(), fused.clone()
    ops.rope_(mine[:, 1:4], positions, cos, sin)
    REFERENCE.rope_(theirs[:, 1:4], positions, cos, sin)
    assert same_bits(mine, theirs)
    assert same_bits(mine[:, 0], fused[:, 0])
    assert same_bits(mine[:, 4], fused[:, 4])


@pytest.mark.parametrize("ops", [*ALL, REFERENCE], ids=[*ISAS_HERE, "reference"])
def test_argmax(ops):
    nan, inf = math.nan, math.inf
    cases = [
        ([1.0, 3.0, 3.0, 2.0], 1), ([nan, 1.0, nan, 1.0], 1), ([nan, -inf], 1), ([-inf, -inf], 0), ([nan, nan], 0),
        ([inf, inf, nan], 0), ([-0.0, 0.0], 0), ([5.0], 0), ([nan, nan, -1.0], 2),
    ]  # fmt: skip
    for values, expected in cases:
        for pad in (0, 1, 14, 40):
            row = torch.tensor([[*values, *[nan] * pad]])
            assert ops.argmax(row).tolist() == [expected], (values, pad)
            front = torch.tensor([[*[nan] * pad, *values]])
            if not all(map(math.isnan, values)):
                assert ops.argmax(front).tolist() == [expected + pad]
    x = activations(40, 1000).round()  # many ties
    assert ops.argmax(x).dtype == torch.int64
    assert ops.argmax(x).tolist() == np.argmax(x.numpy(), axis=1).tolist()


PUBLISHED = (  # Random123, kat_vectors, philox4x32 10: counter, key, words
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_philox_agrees_with_the_published_vectors(counter, key, words):
    assert philox4x32([np.array([c], dtype=np.uint64) for c in counter], key)[0].tolist() == list(words)


@pytest.mark.parametrize("ops", [*ALL, REFERENCE], ids=[*ISAS_HERE, "reference"])
def test_gumbel_of_the_published_words(ops):
    u = (np.array(PUBLISHED[0][2], dtype=np.float64) + 0.5) / 2**32
    np.testing.assert_allclose(ops.gumbel(0, 0, 4).numpy(), -np.log(-np.log(u)), rtol=1.2e-7)


@every_isa
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**33), ids=st.lists(st.integers(0, 2**20), max_size=40))
def test_gumbel_is_a_function_of_seed_position_and_id(ops, seed, position, ids):
    wanted = torch.tensor(ids, dtype=torch.int64)
    got = ops.gumbel(seed, position, wanted)
    assert same_bits(
        got, torch.cat([torch.empty(0), *(ops.gumbel(seed, position, wanted[i : i + 1]) for i in range(len(ids)))])
    )
    close(got, REFERENCE.gumbel(seed, position, wanted), rtol=1.2e-7, atol=1e-9)


@every_isa
def test_gumbel_over_a_vocabulary(ops):
    everything = ops.gumbel(7, 3, 49152)
    assert same_bits(everything, ops.gumbel(7, 3, torch.arange(49152)))
    assert same_bits(everything[[5, 49151]], ops.gumbel(7, 3, torch.tensor([5, 49151])))
    close(everything, REFERENCE.gumbel(7, 3, 49152), rtol=1.2e-7, atol=1e-9)
    # mean and variance of the Gumbel distribution: Euler's constant and pi^2 / 6
    assert abs(float(everything.mean()) - 0.5772) < 0.03
    assert abs(float(everything.var()) - math.pi**2 / 6) < 0.05
    assert not same_bits(everything, ops.gumbel(8, 3, 49152))
    assert not same_bits(everything, ops.gumbel(7, 4, 49152))
    assert not same_bits(everything, ops.gumbel(7 + 2**32, 3, 49152))


def test_all_instruction_sets_give_the_same_bits():
    x, weight = activations(30, 200), torch.linspace(-1, 1, 200)
    for run in (
        lambda ops: ops.rms_norm(x, weight, 1e-6),
        lambda ops: ops.silu_mul(x * 10),
        lambda ops: ops.gelu_tanh_mul(x * 10),
        lambda ops: ops.gumbel(1, 2, 10000),
    ):
        results = [run(ops) for ops in ALL]
        assert all(same_bits(r, results[0]) for r in results)


def test_wrong_shapes_are_refused():
    ops, x = ALL[0], torch.zeros(4, 32)
    calls = (
        lambda: ops.rms_norm(x, torch.ones(31), 1e-6),
        lambda: ops.rms_norm(x.T, torch.ones(4), 1e-6),
        lambda: ops.rms_norm(x.double(), torch.ones(32), 1e-6),
        lambda: ops.add_(x, torch.zeros(3, 32)),
        lambda: ops.add_rms_norm(x, torch.zeros(4, 31), torch.ones(32), 1e-6),
        lambda: ops.silu_mul(torch.zeros(2, 3)),
        lambda: ops.gelu_tanh_mul(x.double()),
        lambda: ops.rope_(torch.zeros(4, 2, 8), torch.zeros(3, dtype=torch.int32), torch.ones(9, 4), torch.ones(9, 4)),
        lambda: ops.rope_(torch.zeros(4, 2, 8), torch.zeros(4, dtype=torch.int32), torch.ones(9, 5), torch.ones(9, 5)),
        lambda: ops.argmax(torch.zeros(4)),
        lambda: ops.argmax(torch.zeros(4, 0)),
        lambda: ops.gumbel(0, 0, torch.zeros(3)),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"needs?\b"):
            call()


def test_the_choice_of_implementation(monkeypatch):
    assert load_ops("reference", 1).name == "reference"
    assert load_ops("native", 2, "portable").name == "native portable"
    assert load_ops("native", 2, "portable").threads == 2
    monkeypatch.setenv("OBOLE_ISA", "portable")
    assert load_ops("auto", 1).name == "native portable"
    monkeypatch.setenv("OBOLE_ISA", "mmx")
    with pytest.raises(ConfigError, match="'mmx'"):
        load_ops("auto", 1)
    with pytest.raises(ConfigError, match="kernels"):
        load_ops("fast", 1)
    with pytest.raises(ConfigError, match="threads"):
        load_ops("native", 0)


@every_isa
@pytest.mark.parametrize("n", [1, 15, 16, 64, 100, 554, 4099])
def test_confidence_is_the_softmax_at_the_argmax(ops, n):
    logits = activations(9, n + 3)[:, :n]
    if n > 1:
        logits[4, n // 2] = math.nan
    logits[5, : n // 2] = -math.inf
    best = ops.argmax(logits)
    got = ops.confidence(logits, best)
    close(got, REFERENCE.confidence(logits, best), rtol=1e-5)
    known = torch.where(logits.isnan(), -math.inf, logits).double()
    if n > 1:
        close(got.double(), known.softmax(1).amax(1), rtol=1e-5)
    for r in range(9):
        assert same_bits(ops.confidence(logits[r : r + 1], best[r : r + 1])[0], got[r])
    assert same_bits(got, native(1, "portable").confidence(logits, best))
    with pytest.raises(ValueError, match="confidence"):
        ops.confidence(logits, best[:3])
