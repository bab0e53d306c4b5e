"""The tensors behind the ledger."""

from __future__ import annotations

import pytest
import torch

from obole.cache.pool import KVPool
from obole.cache.spec import CacheSpec, LayerSpec, StateKind, group_layers
from obole.errors import ModelError

FULL = LayerSpec(StateKind.FULL, 2, 8)
SLIDING = LayerSpec(StateKind.SLIDING, 2, 8, window=20)
MIXED = CacheSpec((SLIDING, SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL))


def make_pool(spec: CacheSpec = MIXED, blocks: int = 5) -> KVPool:
    return KVPool(spec, group_layers(spec), blocks, torch.float32)


def test_every_layer_has_its_own_place():
    pool = make_pool()
    places = [pool.layer(i) for i in range(len(MIXED.layers))]
    assert len({(keys.data_ptr(), group) for keys, _, group in places}) == len(MIXED.layers)
    assert {group for _, _, group in places} == set(range(len(group_layers(MIXED))))
    for keys, values, _ in places:
        assert keys.shape == (5, 2, 8, 16)
        assert values.shape == (5, 2, 16, 8)


def test_bytes_are_those_of_the_tensors():
    pool = make_pool()
    assert pool.nbytes == 5 * KVPool.bytes_per_block(MIXED, group_layers(MIXED), torch.float32)
    assert pool.nbytes == sum(t.nbytes for i in (3, 6) for t in pool.layer(i)[:2])  # the full group uses every slot


@pytest.mark.parametrize("copies", [[], [(0, 1)], [(0, 1), (0, 2)], [(0, 1), (1, 2)], [(0, 1), (3, 0), (1, 4)]])
def test_copies_happen_one_after_the_other_in_all_layers(copies):
    pool = make_pool()
    contents = list(range(5))
    for i in range(len(MIXED.layers)):
        for tensor in pool.layer(i)[:2]:
            for block in range(5):
                tensor[block] = block
    pool.copy(copies)
    for source, target in copies:
        contents[target] = contents[source]
    for i in range(len(MIXED.layers)):
        for tensor in pool.layer(i)[:2]:
            assert [set(tensor[block].flatten().tolist()) for block in range(5)] == [{float(c)} for c in contents]


def test_layers_of_different_shapes_are_refused():
    spec = CacheSpec((FULL, LayerSpec(StateKind.FULL, 4, 8)))
    with pytest.raises(ModelError, match="must agree"):
        make_pool(spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_blocks_as_bytes(dtype):
    """Gathered and laid in again elsewhere, every layer finds what it had, and nothing else has changed."""
    pool = KVPool(MIXED, group_layers(MIXED), 300, dtype)
    tensors = pool._keys + pool._values
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
