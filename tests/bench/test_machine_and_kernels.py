"""The probes of the machine, and benchmarks of single operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from obole.bench import kernels as room
from obole.bench.kernels import DEFAULT_KINDS, Shape, kernels, random_weights
from obole.bench.machine import (
    KINDS,
    ReadBandwidth,
    isa_of,
    last_level_cache,
    products_per_second,
    roofs,
    this_machine,
)
from obole.errors import InvalidRequest
from obole.kernels import _native
from obole.kernels.cpu import ISAS
from obole.kernels.dispatch import load_ops
from obole.kernels.packing import BLOCKS


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [0, 64, 192, (1 << 20) - 64, (3 << 20) + 64])
def test_the_probe_reads_every_byte_once(threads, size):
    memory = np.random.default_rng(size).integers(0, 256, size + 64, dtype=np.uint8)
    start = -memory.ctypes.data % 64
    data = memory[start : start + size]
    expected = np.bitwise_xor.reduce(data.view(np.uint64)) if size else 0
    assert _native.Probe(threads).read(data.ctypes.data, size) == expected


@pytest.mark.parametrize("isa", [*ISAS, "nonsense"])
@pytest.mark.parametrize("kind", [*KINDS, "nonsense"])
def test_products_are_counted(kind, isa):
    made = [_native.Probe(threads).multiply(kind, isa, 3) for threads in (1, 2)]
    assert made[1] == 2 * made[0]
    can = _native.runs(isa) and (kind in ("int8", "fp32") or (kind == "bf16" and isa in ("amx", "avx512vnni")))
    assert made[0] > 0 or not can or kind == "bf16"
    if not can:
        assert made[0] == 0


def test_probe_refuses_no_threads():
    with pytest.raises(ValueError, match="thread"):
        _native.Probe(0)


def test_the_machine():
    machine = this_machine()
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.memory_bytes > machine.cache_bytes == last_level_cache() > 1000
    assert isa_of("native portable") == "portable"
    assert isa_of("reference") in ISAS
    assert ReadBandwidth(2).measure() > 0
    assert products_per_second("bf16", "portable", 1) is None
    found = roofs(2, "portable", repeat=2)
    assert len(found.read_bandwidth_bytes_per_second.values) == 2
    assert found.int8_products_per_second > 0 < found.fp32_products_per_second


@pytest.mark.parametrize("implementation", ["native", "reference"])
def test_kernels(monkeypatch, implementation):
    monkeypatch.setattr(room, "MEASURED_SECONDS", 0.0005)
    monkeypatch.setattr(room, "VOCABULARY", 1000)
    monkeypatch.setattr(room, "last_level_cache", lambda: 1 << 16)
    found = kernels(load_ops(implementation, 2), ("Q4_0", "Q4_K"), (1, 3), Shape(48, 96), repeat=2, contexts=(20, 40))
    products = [r for r in found if r.operation.startswith("linear")]
    assert [(r.operation, r.shape, r.rows) for r in products] == [
        (f"linear {kind}", shape, n) for kind, shape in (("Q4_0", "48x96"), ("Q4_K", "48x256")) for n in (1, 3)
    ]
    for row in products:
        inputs = int(row.shape.split("x")[1])
        for i, us in enumerate(row.microseconds.values):
            assert row.products_per_second.values[i] == pytest.approx(row.rows * 48 * inputs / us * 1e6)
        assert row.bytes_per_second.median > 0
    attention = [r for r in found if r.operation.startswith("attention")]
    assert [r.operation for r in attention] == ["attention over 20", "attention over 40"]
    for row, context in zip(attention, (20, 40), strict=True):
        assert row.positions_per_second.values[0] == pytest.approx(context / row.microseconds.values[0] * 1e6)
    others = [r.operation for r in found[len(products) + len(attention) :]]
    assert others == 2 * ["rms_norm", "add_rms_norm", "rope", "kv_write", "silu_mul", "gelu_tanh_mul", "argmax"]
    assert all(len(r.microseconds.values) == 2 and r.microseconds.lowest > 0 for r in found)


@pytest.mark.parametrize("kind", BLOCKS)
def test_weights_of_every_kind_are_ordinary_numbers(kind):
    ops = load_ops("native", 1)
    w = ops.pack_linear([random_weights(kind, 32, 256)], [None])
    out = ops.linear(torch.ones(2, 256), w)
    assert torch.isfinite(out).all()
    assert out.abs().max() > 0
    assert kind in DEFAULT_KINDS or kind in ("F32", "F16")


@pytest.mark.parametrize(
    ("values", "field"),
    [({"kinds": ("Q9",)}, "kinds"), ({"rows": (0,)}, "shape"), ({"shape": Shape(0, 4)}, "shape"), ({"repeat": 0}, "repeat")],
)
def test_refusals(values, field):
    with pytest.raises(InvalidRequest) as refusal:
        kernels(load_ops("native", 1), **values)
    assert refusal.value.field == field
