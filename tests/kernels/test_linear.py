"""Products and embeddings: right against the reference, exact against themselves."""

from __future__ import annotations

import gc

import gguf
import numpy as np
import pytest
import torch

from obole.errors import ModelError
from obole.types import WeightTensor
from tests.kernels.support import (
    ISAS_HERE,
    KINDS,
    QUANTISED,
    REFERENCE,
    activations,
    native,
    same_bits,
    weights,
)

INPUTS = 512


def oracle(tensor: WeightTensor) -> np.ndarray:
    return gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.kind]).reshape(tensor.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", [*ISAS_HERE, "reference"])
def test_embed_gives_exactly_the_values_of_the_file(kind, implementation):
    ops = REFERENCE if implementation == "reference" else native(2, implementation)
    tensor = weights(kind, 37, INPUTS)
    w = ops.pack_linear([tensor], [None])
    ids = torch.tensor([36, 0, 16, 15, 36, 5], dtype=torch.int32)
    expected = oracle(tensor)
    np.testing.assert_array_equal(ops.embed(ids, w, 1.0).numpy(), expected[ids.numpy()])
    np.testing.assert_array_equal(ops.embed(ids, w, 24.25).numpy(), expected[ids.numpy()] * np.float32(24.25))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", ISAS_HERE)
def test_linear_agrees_with_the_reference(kind, isa):
    ops = native(2, isa)
    bias = np.linspace(-1, 1, 50).astype(np.float32)
    for tensor, b in ((weights(kind, 50, INPUTS), bias), (weights(kind, 16, 256, seed=1), None)):
        x = activations(11, tensor.shape[1])
        got = ops.linear(x, ops.pack_linear([tensor], [b]))
        expected = REFERENCE.linear(x, REFERENCE.pack_linear([tensor], [b]))
        # the reference emulates the fused product by rounding twice, which may show in the last place of a sum
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=float(expected.abs().max()) * 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_is_near_the_product_of_the_dequantised_weights(kind):
    tensor, x = weights(kind, 40, INPUTS), activations(5, INPUTS)
    exact = x.double() @ torch.from_numpy(oracle(tensor)).double().T
    ops = native()
    error = ops.linear(x, ops.pack_linear([tensor], [None])).double() - exact
    size = (x.double().norm(dim=1)[:, None] * torch.from_numpy(oracle(tensor)).double().norm(dim=1)).clamp(min=1e-30)
    assert float((error / size).abs().max()) < (0.01 if kind in QUANTISED else 1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", ISAS_HERE)
def test_bits_do_not_depend_on_rows_threads_or_neighbours(kind, isa):
    tensor, x = weights(kind, 83, INPUTS), activations(128, INPUTS)
    one, two = native(1, isa), native(2, isa)
    w = one.pack_linear([tensor], [None])
    alone = torch.cat([one.linear(x[r : r + 1], w) for r in range(len(x))])
    for rows in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 128):
        assert same_bits(one.linear(x[:rows], w), alone[:rows])
        assert same_bits(two.linear(x[-rows:], w), alone[-rows:])
    order = torch.from_numpy(np.random.default_rng(0).permutation(128))
    assert same_bits(two.linear(x[order], w), alone[order])


@pytest.mark.parametrize("kind", KINDS)
def test_all_instruction_sets_give_the_same_bits(kind):
    tensor, x = weights(kind, 30, INPUTS), activations(9, INPUTS)
    results = [ops.linear(x, ops.pack_linear([tensor], [None])) for ops in (native(1, isa) for isa in ISAS_HERE)]
    for result in results[1:]:
        assert same_bits(result, results[0])


def test_integer_sums_are_exact_at_their_largest():
    # every code and every activation at the end of its range, in matrices whose products are known
    for kind, code, value in (("Q8_0", 0x80, -128.0), ("Q8_0", 0x7F, 127.0), ("Q4_0", 0x00, -8.0), ("Q4_0", 0xFF, 7.0)):
        width = 34 if kind == "Q8_0" else 18
        block = np.full(width, code, dtype=np.uint8)
        block[:2] = np.array([1.0], dtype=np.float16).view(np.uint8)
        tensor = WeightTensor("w", kind, (16, 4096), np.tile(block, (16, 128)))
        for isa in ISAS_HERE:
            ops = native(1, isa)
            out = ops.linear(torch.full((3, 4096), -127.0), ops.pack_linear([tensor], [None]))
            assert out.unique().tolist() == [4096 * -127.0 * value], (kind, isa)


@pytest.mark.parametrize("isa", ISAS_HERE)
def test_fused_parts_of_different_kinds_equal_their_own_products(isa):
    ops = native(2, isa)
    parts = [weights("Q5_0", 48, INPUTS), weights("Q8_0", 17, INPUTS, seed=1), weights("F16", 33, INPUTS, seed=2)]
    biases = [np.ones(48, np.float32), None, np.full(33, -2.0, np.float32)]
    x = activations(9, INPUTS)
    fused = ops.pack_linear(parts, biases)
    assert (fused.in_features, fused.out_features) == (INPUTS, 98)
    single = [ops.linear(x, ops.pack_linear([p], [b])) for p, b in zip(parts, biases, strict=True)]
    assert same_bits(ops.linear(x, fused), torch.cat(single, dim=1))
    ids = torch.tensor([97, 0, 48, 64, 65], dtype=torch.int32)
    rows = np.concatenate([oracle(p) for p in parts])
    np.testing.assert_array_equal(ops.embed(ids, fused, 1.0).numpy(), rows[ids.numpy()])


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 48, 100])
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "F16"])
def test_packed_in_pieces_it_is_the_same_and_every_piece_is_told_of(kind, rows, monkeypatch):
    tensor = weights(kind, rows, 256)
    bias = np.arange(rows, dtype=np.float32)
    x = activations(3, 256)
    whole = native().linear(x, native().pack_linear([tensor], [bias]))
    monkeypatch.setattr("obole.kernels.cpu.PIECE_BYTES", 1)  # so that a piece is one block of 16 rows
    told: list[int] = []
    pieces = native().linear(x, native().pack_linear([tensor], [bias], told.append))
    assert torch.equal(whole, pieces)
    assert sum(told) == tensor.data.nbytes
    assert len(told) == -(-rows // 16)


@pytest.mark.parametrize("isa", ISAS_HERE)
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "F32"])
def test_extreme_activations(isa, kind):
    ops = native(2, isa)
    tensor = weights(kind, 20, 256)
    w, r = ops.pack_linear([tensor], [None]), REFERENCE.pack_linear([tensor], [None])
    x = torch.zeros(6, 256)
    x[1] = 1e-42  # denormal: counts as zero in quantised products
    x[2] = 3e38
    x[3, 7] = torch.nan
    x[4, 200] = torch.inf
    x[5] = activations(1, 256)[0]
    got, expected = ops.linear(x, w), REFERENCE.linear(x, r)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert not got[3:5].isfinite().any()  # an error in a row shows in that row
    assert got[[0, 1, 5]].isfinite().all()  # and in no other


def test_views_of_a_wider_tensor_and_zero_rows():
    ops = native()
    w = ops.pack_linear([weights("Q4_K", 48, 256)], [None])
    wide = activations(7, 900)
    view = wide[:, 100:356]
    assert same_bits(ops.linear(view, w), ops.linear(view.contiguous(), w))
    assert ops.linear(torch.empty(0, 256), w).shape == (0, 48)
    assert ops.embed(torch.empty(0, dtype=torch.int32), w, 1.0).shape == (0, 256)


def test_inputs_that_fill_no_group_of_float_weights():
    for kind in ("F32", "F16", "BF16"):
        tensor, x = weights(kind, 7, 13), activations(5, 13)
        expected = REFERENCE.linear(x, REFERENCE.pack_linear([tensor], [None]))
        for isa in ISAS_HERE:
            ops = native(2, isa)
            torch.testing.assert_close(ops.linear(x, ops.pack_linear([tensor], [None])), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_size_is_at_most_five_percent_over_the_file(kind):
    tensor = weights(kind, 64, INPUTS)
    w = native().pack_linear([tensor], [None])
    assert tensor.data.nbytes <= w.nbytes <= tensor.data.nbytes * 1.05


def test_the_source_is_not_needed_after_packing():
    ops = native()
    tensor, x = weights("Q4_1", 32, 64), activations(2, 64)
    w = ops.pack_linear([tensor], [None])
    before = ops.linear(x, w)
    tensor.data[:] = 0
    del tensor
    gc.collect()
    assert same_bits(ops.linear(x, w), before)


@pytest.mark.parametrize("ops", [native(), REFERENCE], ids=["native", "reference"])
def test_what_cannot_be_packed_is_refused_by_name(ops):
    good = weights("Q4_1", 32, 64)
    with pytest.raises(ModelError, match=r"'odd'.*IQ2_XS"):
        ops.pack_linear([WeightTensor("odd", "IQ2_XS", (32, 256), np.zeros((32, 74), np.uint8))], [None])
    with pytest.raises(ModelError, match="'short'"):
        ops.pack_linear([WeightTensor("short", "Q4_1", (32, 64), good.data[:, :-1])], [None])
    with pytest.raises(ModelError, match="'cut'"):
        ops.pack_linear([WeightTensor("cut", "Q4_1", (33, 64), good.data)], [None])
    with pytest.raises(ModelError, match="'flat'"):
        ops.pack_linear([WeightTensor("flat", "F32", (64,), np.zeros((1, 256), np.uint8))], [None])
    with pytest.raises(ModelError, match="differ"):
        ops.pack_linear([good, weights("Q4_1", 32, 96)], [None, None])
    with pytest.raises(ModelError, match="bias"):
        ops.pack_linear([good], [np.zeros(31, np.float32)])
    with pytest.raises(ModelError):
        ops.pack_linear([], [])


def test_wrong_activations_are_refused():
    ops = native()
    w = ops.pack_linear([weights("Q4_1", 32, 64)], [None])
    for x in (torch.zeros(2, 96), torch.zeros(64), torch.zeros(2, 64).double(), torch.zeros(64, 2).T):
        with pytest.raises(ValueError, match="linear needs"):
            ops.linear(x, w)
    with pytest.raises(ValueError, match="embed needs"):
        ops.embed(torch.zeros(2, dtype=torch.int64), w, 1.0)
    with pytest.raises(IndexError):
        ops.embed(torch.tensor([32], dtype=torch.int32), w, 1.0)


@pytest.mark.parametrize("isa", ISAS_HERE)
def test_adapters_count_in_the_rows_of_their_id_alone(isa):
    ops, rank, inputs, outputs = native(2, isa), 6, 96, 50
    parts = weights("F32", rank, inputs), weights("F32", outputs, rank)
    down, up = (ops.pack_linear([part], [None]) for part in parts)
    plain_down, plain_up = (REFERENCE.pack_linear([part], [None]) for part in parts)
    ids = torch.tensor([7, 3, 7, 7, 1, 7], dtype=torch.int32)
    x, before = activations(6, inputs), activations(6, outputs + 10, seed=1)
    out, expected = before.clone(), before[:, :outputs].clone()
    ops.adapt_(out[:, :outputs], x, down, up, ids, 7)
    REFERENCE.adapt_(expected, x, plain_down, plain_up, ids, 7)
    torch.testing.assert_close(out[:, :outputs], expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(out[ids == 7, :outputs], before[ids == 7, :outputs])
    assert same_bits(out[ids != 7], before[ids != 7])
    assert same_bits(out[:, outputs:], before[:, outputs:])
    for r in range(6):
        alone = before[r : r + 1, :outputs].clone()
        ops.adapt_(alone, x[r : r + 1], down, up, ids[r : r + 1], 7)
        assert same_bits(alone[0], out[r, :outputs])
    with pytest.raises(ValueError, match="adapt_"):
        ops.adapt_(before, x, down, up, ids, 7)
    with pytest.raises(ValueError, match="adapt_"):
        ops.adapt_(out[:, :outputs], x, down, down, ids, 7)
