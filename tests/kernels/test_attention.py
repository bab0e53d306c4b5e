"""Attention over the paged cache: right against the reference, exact against itself, blind to what it may not see."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from obole.kernels.ops import KV, KV_FORMATS, Ops, has_scales
from tests.kernels.support import ISAS_HERE, REFERENCE, native, same_bits

BLOCK = 16
DTYPES = list(KV_FORMATS.values())
QUANTISED = [torch.int8, torch.float8_e4m3fn]


@dataclass
class Cache:
    """Sequences with their keys and values in a pool whose unused places hold NaN."""

    q: list[torch.Tensor]  # (length, H, hd) for each sequence
    kv: KV
    table: torch.Tensor


def unwritten(blocks, kv_heads, dim, dtype) -> KV:
    """NaN everywhere: as numbers, as codes where the format has one, and as scales."""
    shapes = (blocks, kv_heads, dim, BLOCK), (blocks, kv_heads, BLOCK, dim)
    if not has_scales(dtype):
        return KV(*(torch.full(shape, torch.nan, dtype=dtype) for shape in shapes))
    codes = [torch.full(shape, 127, dtype=torch.int8).view(dtype) for shape in shapes]  # 127 is NaN in e4m3
    return KV(*codes, *(torch.full((blocks, kv_heads, BLOCK), torch.nan) for _ in range(2)))


def build(lengths, *, heads=6, kv_heads=2, dim=64, dtype=torch.float32, seed=0, order=0, ops: Ops = REFERENCE) -> Cache:
    """`order` shuffles which blocks the sequences get; the contents are the same for all orders."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))

    counts = [-(-n // BLOCK) for n in lengths]
    total = sum(counts) + 3
    ids = np.random.default_rng(order).permutation(total)[: sum(counts)]
    kv = unwritten(total, kv_heads, dim, dtype)
    table = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32)
    queries = []
    for s, n in enumerate(lengths):
        mine = torch.from_numpy(ids[sum(counts[:s]) : sum(counts[: s + 1])].astype(np.int32))
        table[s, : len(mine)] = mine
        where = torch.arange(n)
        slots = mine[where // BLOCK] * BLOCK + (where % BLOCK).int()
        ops.kv_write(normal(n, kv_heads, dim), normal(n, kv_heads, dim), kv, slots)
        queries.append(normal(n, heads, dim))
    return Cache(queries, kv, table)


def attend(ops: Ops, cache: Cache, chunks, *, scale=0.125, window=None, softcap=None) -> torch.Tensor:
    """`chunks`: (sequence, first position, rows), each an entry of the batch."""
    q = torch.cat([cache.q[s][at : at + n] for s, at, n in chunks])
    starts = torch.tensor([0, *np.cumsum([n for _, _, n in chunks])], dtype=torch.int32)
    positions = torch.tensor([at for _, at, _ in chunks], dtype=torch.int32)
    table = cache.table[[s for s, _, _ in chunks]].contiguous()
    return ops.attention(q, cache.kv, table, starts, positions, scale, window, softcap)


@pytest.mark.parametrize("isa", ISAS_HERE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(6, 2, 64), (3, 3, 24), (8, 1, 256), (14, 2, 8), (4, 2, 80), (2, 1, 520)]
)
def test_agrees_with_the_reference(isa, dtype, heads, kv_heads, dim):
    cache = build([37, 5, 290], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    chunks = [(0, 30, 7), (1, 0, 5), (2, 286, 4)]
    for window, softcap in ((None, None), (9, None), (None, 3.0), (20, 3.0)):
        got = attend(native(2, isa), cache, chunks, window=window, softcap=softcap)
        expected = attend(REFERENCE, cache, chunks, window=window, softcap=softcap)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ops", [native(), REFERENCE], ids=["native", "reference"])
def test_agrees_with_plain_softmax(ops):
    cache = build([300], heads=2, kv_heads=1, dim=32)
    blocks = cache.table[0, : -(-300 // BLOCK)].long()
    k = cache.kv.keys[blocks, 0].transpose(1, 2).reshape(-1, 32)[:300].double()
    v = cache.kv.values[blocks, 0].reshape(-1, 32)[:300].double()
    expected = torch.softmax(cache.q[0][299].double() @ k.T * 0.125, dim=1) @ v
    got = attend(ops, cache, [(0, 299, 1)])
    torch.testing.assert_close(got[0].reshape(2, 32), expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS_HERE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 16, 40])
def test_bits_do_not_depend_on_chunks_threads_or_neighbours(isa, dtype, window):
    lengths = [270, 33, 17]
    cache = build(lengths, dtype=dtype)
    one, two = native(1, isa), native(2, isa)
    alone = [torch.cat([attend(one, cache, [(s, p, 1)], window=window) for p in range(n)]) for s, n in enumerate(lengths)]
    assert not torch.cat(alone).isnan().any()
    for ops in (one, two):
        for s, n in enumerate(lengths):
            assert same_bits(attend(ops, cache, [(s, 0, n)], window=window), alone[s])
            for step in (7, 16, 64):
                parts = [(s, p, min(step, n - p)) for p in range(0, n, step)]
                whole = torch.cat([attend(ops, cache, [part], window=window) for part in parts])
                assert same_bits(whole, alone[s])
        mixed = [(2, 10, 7), (0, 269, 1), (1, 0, 33), (0, 100, 64), (2, 0, 0)]
        expected = torch.cat([alone[s][p : p + n] for s, p, n in mixed])
        assert same_bits(attend(ops, cache, mixed, window=window), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_segments_run_apart(dtype):
    # one query over many segments: with one thread in one go, with several in pieces
    cache = build([1500], heads=3, kv_heads=1, dtype=dtype)
    results = [attend(native(threads), cache, [(0, 1499, 1)], window=w) for w in (None, 700) for threads in (1, 2, 3)]
    assert all(same_bits(r, results[0]) for r in results[1:3])
    assert all(same_bits(r, results[3]) for r in results[4:])
    assert not same_bits(results[0], results[3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_instruction_sets_give_the_same_bits(dtype):
    cache = build([300, 20], dim=72, dtype=dtype)
    chunks = [(0, 280, 20), (1, 0, 20)]
    for window, softcap in ((None, None), (30, 20.0)):
        results = [attend(native(1, isa), cache, chunks, window=window, softcap=softcap) for isa in ISAS_HERE]
        assert all(same_bits(r, results[0]) for r in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_layout_of_blocks(dtype):
    chunks = [(0, 250, 20), (1, 40, 1)]
    results = [attend(native(), build([270, 41], order=order, dtype=dtype), chunks) for order in range(4)]
    assert all(same_bits(r, results[0]) for r in results)


def test_blocks_outside_the_window_are_never_read():
    cache = build([600])
    window = 50
    before = attend(native(), cache, [(0, 590, 10)], window=window)
    cache.table[0, : (590 - window + 1) // BLOCK] = -1
    assert same_bits(attend(native(), cache, [(0, 590, 10)], window=window), before)


@pytest.mark.parametrize("isa", ISAS_HERE)
def test_infinite_scores_and_values_stay_in_their_rows(isa):
    cache = build([40])
    clean = attend(native(1, isa), cache, [(0, 0, 40)])
    cache.q[0][39] = torch.inf
    dirty = attend(native(1, isa), cache, [(0, 0, 40)])
    assert same_bits(dirty[:39], clean[:39])
    assert not dirty[39].isfinite().all()


def test_large_scores():
    cache = build([64])
    cache.q[0] *= 1000
    got, expected = attend(native(), cache, [(0, 0, 64)]), attend(REFERENCE, cache, [(0, 0, 64)])
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("isa", ISAS_HERE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_queries_that_read_the_same_keys(isa, dtype):
    # up to four queries read them as they are stored, more share a copy: alone or among others, the bits are the same
    cache = build([530], heads=40, kv_heads=1, dim=48, dtype=dtype)
    ops = native(1, isa)
    whole = attend(ops, cache, [(0, 515, 1)]).view(40, 48)
    for heads in (1, 2, 3, 4, 5, 6, 7, 8, 31, 32, 33):
        fewer = Cache([q[:, :heads] for q in cache.q], cache.kv, cache.table)
        assert same_bits(attend(ops, fewer, [(0, 515, 1)]).view(heads, 48), whole[:heads])


def pools(dtype, blocks=5, kv_heads=2, dim=24) -> KV:
    kv = unwritten(blocks, kv_heads, dim, dtype)
    for tensor in kv:
        if tensor is not None:
            tensor.zero_()
    return kv


@pytest.mark.parametrize("ops", [native(1, isa) for isa in ISAS_HERE], ids=ISAS_HERE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_write_puts_rows_where_the_slots_say(ops, dtype):
    rng = np.random.default_rng(0)
    fused = torch.from_numpy(rng.standard_normal((6, 5 * 24)).astype(np.float32)).unflatten(1, (5, 24))
    fused[0, 1, 0] = torch.nan
    fused[1, 1, :4] = torch.tensor([1e-42, torch.inf, -0.0, 3.4e38])
    fused[2, 1, :4] = torch.tensor([1e-42, 1e30, -0.0, -3.4e38])
    k, v = fused[:, 1:3], fused[:, 3:]
    slots = torch.tensor([5, 31, 0, 16, 79, 40], dtype=torch.int32)
    written = [pools(dtype), pools(dtype)]
    ops.kv_write(k, v, written[0], slots)
    REFERENCE.kv_write(k, v, written[1], slots)
    for got, expected in zip(*written, strict=True):
        if got is not None:
            torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
    kv = written[0]
    if not has_scales(dtype):
        torch.testing.assert_close(kv.keys[1, :, :, 15], k[1].to(dtype), rtol=0, atol=0)
        torch.testing.assert_close(kv.values[4, :, 15], v[4].to(dtype), rtol=0, atol=0)
        return
    step = 1 / 254 if dtype is torch.int8 else 1 / 16  # of the largest number, or of the number itself
    for stored, scales, given in (
        (kv.keys[1, 1, :, 0], kv.key_scales[1, 1, 0], k[3, 1]),
        (kv.values[4, 0, 15], kv.value_scales[4, 0, 15], v[4, 0]),
    ):
        size = given.abs().amax() if dtype is torch.int8 else given.abs().clamp(min=given.abs().amax() / 448 / 64)
        assert ((stored.float() * scales - given).abs() <= size * step * 1.0001).all()
        assert stored.float().abs().amax() == (127 if dtype is torch.int8 else 448)
    assert kv.key_scales[0, 0, 5].isnan()
    assert kv.key_scales[1, 0, 15].isnan()
    assert (kv.keys[1, 0, :, 15].float() == 0).all()


@pytest.mark.parametrize("ops", [native(1, isa) for isa in ISAS_HERE], ids=ISAS_HERE)
@pytest.mark.parametrize("dtype", QUANTISED)
def test_every_code_and_what_lies_between(ops, dtype):
    """Vectors whose largest number makes the scale a power of two: each other number, over its scale, is what is rounded."""
    top = 127.0 if dtype is torch.int8 else 448.0
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite() & (codes.abs() <= top)].unique()
    middles = (codes[1:] + codes[:-1]) / 2
    beside = [torch.nextafter(x, torch.tensor(to)) for x in (codes, middles) for to in (-torch.inf, torch.inf)]
    values = torch.cat([codes, middles, *beside, torch.tensor([1e-45, -1e-45, -0.0])])
    values = torch.cat([values[values.abs() <= top], torch.tensor([top])])
    for scale in (1.0, 2.0**-110, 2.0**100):
        kv = pools(dtype, blocks=1, kv_heads=1, dim=len(values))
        ops.kv_write(
            (values * scale).view(1, 1, -1), (values * -scale).view(1, 1, -1), kv, torch.tensor([3], dtype=torch.int32)
        )
        assert kv.key_scales[0, 0, 3] == kv.value_scales[0, 0, 3] == scale
        given = values * scale / scale  # without what is lost where the product is no normal number
        for stored, wanted in ((kv.keys[0, 0, :, 3], given), (kv.values[0, 0, 3], -given)):
            expected = wanted.round().to(dtype) if dtype is torch.int8 else wanted.to(dtype)
            assert (stored.view(torch.uint8) == expected.view(torch.uint8)).all()


@pytest.mark.parametrize("ops", [*(native(1, isa) for isa in ISAS_HERE), REFERENCE], ids=[*ISAS_HERE, "reference"])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_vectors_of_zeros_and_of_almost_nothing(ops, dtype):
    cache = build([40], heads=2, kv_heads=2, dim=24, dtype=dtype)
    slots = cache.table[0, 1:2] * BLOCK + torch.arange(3, dtype=torch.int32)
    rows = torch.zeros(3, 2, 24)
    rows[1] = 1e-45
    rows[2, 0] = 1e-37
    ops.kv_write(rows, rows, cache.kv, slots)
    block = cache.table[0, 1]
    assert (cache.kv.key_scales[block, :, :3] == 0).all()
    assert (cache.kv.value_scales[block, :, :3] == 0).all()
    assert (cache.kv.keys[block, :, :, :3].view(torch.uint8) == 0).all()
    got, expected = attend(ops, cache, [(0, 39, 1)]), attend(REFERENCE, cache, [(0, 39, 1)])
    assert got.isfinite().all()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ops", [*(native(1, isa) for isa in ISAS_HERE), REFERENCE], ids=[*ISAS_HERE, "reference"])
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("heads", [1, 6])
def test_what_is_not_finite_shows_in_every_row_that_sees_it_and_in_no_other(ops, dtype, bad, heads):
    cache = build([40], heads=heads, kv_heads=1, dim=24, dtype=dtype)
    clean = attend(ops, cache, [(0, 0, 40)])
    slot = cache.table[0, 1:2] * BLOCK + 4
    row = torch.ones(1, 1, 24)
    for k, v in ((row * bad, row), (row, row * bad)):
        ops.kv_write(k, v, cache.kv, slot)
        dirty = attend(ops, cache, [(0, 0, 40)])
        assert same_bits(dirty[:20], clean[:20])
        assert dirty[20:].isnan().all()


@pytest.mark.parametrize("ops", [native(1, isa) for isa in ISAS_HERE], ids=ISAS_HERE)
@pytest.mark.parametrize("size", [1e-30, 1e18])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_very_small_and_very_large_vectors(ops, dtype, size):
    kv = pools(dtype, blocks=2, kv_heads=1)
    rng = np.random.default_rng(1)
    rows = torch.from_numpy(rng.standard_normal((32, 1, 24)).astype(np.float32)) * size
    ops.kv_write(rows, rows, kv, torch.arange(32, dtype=torch.int32))
    cache = Cache(
        [torch.from_numpy(rng.standard_normal((32, 2, 24)).astype(np.float32)) / size], kv, torch.tensor([[0, 1]]).int()
    )
    got, expected = attend(ops, cache, [(0, 0, 32)]), attend(REFERENCE, cache, [(0, 0, 32)])
    torch.testing.assert_close(got / size, expected / size, rtol=1e-5, atol=1e-5)


def test_no_rows():
    cache = build([5])
    assert attend(native(), cache, [(0, 0, 0)]).shape == (0, 6 * 64)


def test_what_does_not_fit_is_refused():
    ops = native()
    cache = build([20])
    kv = cache.kv
    coded = build([20], dtype=torch.int8).kv
    good = [
        cache.q[0], kv, cache.table, torch.tensor([0, 20], dtype=torch.int32), torch.tensor([0], dtype=torch.int32), 0.125,
        None, None,
    ]  # fmt: skip
    ops.attention(*good)

    def replaced(index, value):
        return [value if i == index else x for i, x in enumerate(good)]

    bad_pools = [
        kv._replace(keys=kv.keys.transpose(2, 3)), kv._replace(values=kv.values.bfloat16()),
        kv._replace(values=kv.values[:-1]), KV(kv.keys.half(), kv.values.half()), KV(coded.keys, coded.values),
        coded._replace(key_scales=coded.key_scales[:-1]), coded._replace(value_scales=coded.value_scales.double()),
        coded._replace(value_scales=coded.value_scales.transpose(1, 2).contiguous()),
    ]  # fmt: skip
    bad = [
        (0, cache.q[0][:, :, :32]), (0, cache.q[0].double()), (0, cache.q[0][:, :5]), *((1, pool) for pool in bad_pools),
        (2, cache.table.long()), (2, cache.table[:, :1].contiguous()),
        (3, torch.tensor([0, 19], dtype=torch.int32)), (3, torch.tensor([1, 20], dtype=torch.int32)),
        (3, torch.tensor([0, 20])), (4, torch.tensor([-1], dtype=torch.int32)),
        (4, torch.tensor([100], dtype=torch.int32)), (6, 0),
    ]  # fmt: skip
    for index, value in bad:
        with pytest.raises(ValueError, match=r"attention needs|row_starts|position of a sequence"):
            ops.attention(*replaced(index, value))
    with pytest.raises(ValueError, match="kv_write needs"):
        ops.kv_write(cache.q[0], cache.q[0], kv, torch.zeros(20, dtype=torch.int32))
