"""A recorded function computes what calling it computes, again and again, whatever else was recorded beside it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from obole.kernels.arena import Arena
from obole.kernels.dispatch import load_ops
from obole.types import WeightTensor

OPS = load_ops("native", 2)


def matrix(rows: int, columns: int, seed: int) -> object:
    values = np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)
    return OPS.pack_linear([WeightTensor("w", "F32", (rows, columns), values.view(np.uint8))], [None])


class Chain:
    """Products, norms and views, with results that die at different times."""

    def __init__(self, rows: int, seed: int) -> None:
        self.x = torch.zeros(rows, 48)
        self.weights = [matrix(48, 48, seed + i) for i in range(6)]
        self.norm = torch.ones(48)

    def __call__(self) -> tuple[torch.Tensor, ...]:
        residual = OPS.linear(self.x, self.weights[0])
        early = OPS.linear(self.x, self.weights[1]).view(-1, 3, 16)[:, :2]  # only a view of this result stays alive
        for w in self.weights[2:]:
            residual = OPS.linear(OPS.rms_norm(residual, self.norm, 1e-5), w)
        normed = OPS.rms_norm(early, self.norm[:16], 1e-5)
        OPS.add_(residual[:, :32], normed.view(-1, 32))
        return residual, OPS.argmax(residual)


def test_replaying_equals_calling():
    chains = [Chain(rows, seed) for rows, seed in ((1, 0), (3, 10), (16, 20))]
    recordings = [OPS.record(chain) for chain in chains]
    for round_ in range(5):
        gc.collect()
        for chain, recording in zip(chains, recordings, strict=True):
            chain.x.copy_(torch.randn(chain.x.shape, generator=torch.Generator().manual_seed(round_)))
            replayed = [t.clone() for t in recording.replay()]
            for got, expected in zip(replayed, chain(), strict=True):
                assert torch.equal(got, expected)


def test_a_replay_says_what_took_how_long():
    spent = OPS.record(Chain(2, 0)).replay_timed()
    assert set(spent) == {"linear", "norm", "add", "argmax"}
    assert all(nanoseconds > 0 for nanoseconds in spent.values())


def test_only_results_can_be_returned():
    x = torch.zeros(2, 48)
    with pytest.raises(ValueError, match="results"):
        OPS.record(lambda: (x,))
    with pytest.raises(ValueError, match="results"):
        OPS.record(lambda: (OPS.linear(x, matrix(48, 48, 0))[1:],))
    assert OPS.linear(x, matrix(48, 48, 0)).shape == (2, 48)  # and nothing is recorded any more


def test_memory_is_used_again_only_when_no_view_is_left():
    arena = Arena()
    first = arena.take((4, 8))
    view = first[1:].view(-1)
    address = first.data_ptr()
    del first
    assert arena.take((4, 8)).data_ptr() != address
    del view
    assert arena.take((3, 10)).data_ptr() == address
    assert address % 64 == 0
