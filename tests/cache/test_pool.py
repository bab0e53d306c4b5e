"""The tensors behind the ledger."""

from __future__ import annotations

import pytest
import torch

from obole.cache.pool import KVPool, bytes_per_token
from obole.cache.spec import CacheSpec, LayerSpec, StateKind, group_layers
from obole.errors import ModelError
from obole.kernels.ops import KV_FORMATS

FULL = LayerSpec(StateKind.FULL, 2, 8)
SLIDING = LayerSpec(StateKind.SLIDING, 2, 8, window=20)
MIXED = CacheSpec((SLIDING, SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL))


FORMATS = pytest.mark.parametrize("name", KV_FORMATS)


def make_pool(spec: CacheSpec = MIXED, blocks: int = 5, name: str = "float32") -> KVPool:
    return KVPool(spec, group_layers(spec), blocks, KV_FORMATS[name])


def tensors_of(pool: KVPool, layer: int) -> list[torch.Tensor]:
    return [tensor for tensor in pool.layer(layer)[0] if tensor is not None]


def test_every_layer_has_its_own_place():
    pool = make_pool()
    places = [pool.layer(i) for i in range(len(MIXED.layers))]
    assert len({(kv.keys.data_ptr(), group) for kv, group in places}) == len(MIXED.layers)
    assert {group for _, group in places} == set(range(len(group_layers(MIXED))))
    for kv, _ in places:
        assert kv.keys.shape == (5, 2, 8, 16)
        assert kv.values.shape == (5, 2, 16, 8)
        assert kv.key_scales is kv.value_scales is None


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_codes_have_scales(name):
    for kv, _ in map(make_pool(name=name).layer, range(len(MIXED.layers))):
        assert kv.keys.dtype == kv.values.dtype == KV_FORMATS[name]
        assert kv.key_scales.shape == kv.value_scales.shape == (5, 2, 16)
        assert kv.key_scales.dtype == kv.value_scales.dtype == torch.float32


@FORMATS
def test_bytes_are_those_of_the_tensors(name):
    pool = make_pool(name=name)
    groups = group_layers(MIXED)
    assert pool.nbytes == 5 * KVPool.bytes_per_block(MIXED, groups, KV_FORMATS[name])
    assert pool.nbytes == sum(t.nbytes for i in (3, 6) for t in tensors_of(pool, i))  # the full group uses every slot
    for_each = {"float32": 64, "bfloat16": 32, "int8": 24, "fp8": 24}  # bytes of a token's key and value of one head
    assert bytes_per_token(2, 8, KV_FORMATS[name]) == 2 * for_each[name]
    assert pool.nbytes == 5 * 16 * 2 * bytes_per_token(2, 8, KV_FORMATS[name])


@FORMATS
@pytest.mark.parametrize("copies", [[], [(0, 1)], [(0, 1), (0, 2)], [(0, 1), (1, 2)], [(0, 1), (3, 0), (1, 4)]])
def test_copies_happen_one_after_the_other_in_all_layers(name, copies):
    pool = make_pool(name=name)
    contents = list(range(5))
    for i in range(len(MIXED.layers)):
        for tensor in tensors_of(pool, i):
            for block in range(5):
                tensor[block] = block
    pool.copy(copies)
    for source, target in copies:
        contents[target] = contents[source]
    for i in range(len(MIXED.layers)):
        for tensor in tensors_of(pool, i):
            assert [set(tensor[block].float().flatten().tolist()) for block in range(5)] == [{float(c)} for c in contents]


def test_layers_of_different_shapes_are_refused():
    spec = CacheSpec((FULL, LayerSpec(StateKind.FULL, 4, 8)))
    with pytest.raises(ModelError, match="must agree"):
        make_pool(spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_blocks_as_bytes(dtype):
    """Gathered and laid in again elsewhere, every layer finds what it had, and nothing else has changed."""
    pool = KVPool(MIXED, group_layers(MIXED), 300, dtype)
    tensors = pool._tensors
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 251 + number)
    before = [tensor.clone() for tensor in tensors]
    sources, targets = list(range(140, 0, -1)), list(range(150, 290))
    contents = pool.gather(sources)
    assert contents.shape == (140, pool.block_bytes)
    assert pool.block_bytes == KVPool.bytes_per_block(MIXED, group_layers(MIXED), dtype)
    pool.scatter(targets, list(contents))
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[targets], old[sources])
        others = [block for block in range(300) if block not in targets]
        assert torch.equal(tensor[others], old[others])
    assert (pool.gather(targets) == contents).all()
    assert pool.gather([]).shape == (0, pool.block_bytes)
