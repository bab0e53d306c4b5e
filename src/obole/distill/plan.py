"""What is done in step n of a training, as a function of n: nothing of it has to be saved to go on after an interruption."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from obole.distill.recipe import LEAST_K, Recipe, ground_truth

SPAN, ROLL, ORDER = range(3)  # streams of random numbers: keys, beside the seed, of generators that know nothing of each other


def span_and_roll(recipe: Recipe, step: int) -> tuple[int, int]:
    """k from 2 to k_max and the roll from 0 to P - 1, both uniform and independent of each other, for a whole step."""
    k = int(np.random.default_rng((recipe.seed, SPAN, step)).integers(LEAST_K, recipe.k_max, endpoint=True))
    p = ground_truth(recipe.slots, recipe.regions, k)
    return k, int(np.random.default_rng((recipe.seed, ROLL, step)).integers(p))


def places(recipe: Recipe, count: int, step: int) -> torch.Tensor:
    """(batch,) int64: which of `count` rows step `step` reads. All are read once before any is read again."""
    first = step * recipe.batch
    drawn = [_order(recipe.seed, count, n // count)[n % count] for n in range(first, first + recipe.batch)]
    return torch.tensor(np.array(drawn, dtype=np.int64))


@lru_cache(maxsize=2)  # a batch may end one round and begin another
def _order(seed: int, count: int, round_: int) -> np.ndarray:
    return np.random.default_rng((seed, ORDER, round_)).permutation(count)
