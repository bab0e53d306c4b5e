"""What sizes and times of a stream give away: how well a simple classifier tells secrets apart that it has not seen.

The attack is that of "Remote Timing Attacks on Efficient Language Model Inference" (Carlini and Nasr 2024, arXiv 2410.17175):
who sees packets but not their content learns from their sizes and times what drafts, caches and topics do to them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Reads = Sequence[tuple[float, int]]  # seconds after the request, and bytes

FOLDS = 5
REPEATS = 5  # shuffles of the folds, so that the figure does not hang on one of them
PENALTY = 1.0  # of the squared weights, features being of unit variance
STEPS = 30  # of Newton's method, which converges long before
SHARES = (10, 50, 90)
EARLY = 4  # reads whose sizes and gaps count one by one
GUESSES = 2000  # labels drawn anew, for what chance alone would give


def features(reads: Reads) -> Floats:
    """One stream as numbers: counts, logarithms of bytes and seconds, their distribution, and the first of them."""
    times, sizes = np.array([at for at, _ in reads]), np.array([float(count) for _, count in reads])
    gaps = np.diff(times) if len(times) > 1 else np.zeros(1)
    tiny = 1e-6
    found = [
        len(reads), np.log(sizes.sum()), np.log(times[0] + tiny), np.log(times[-1] + tiny), np.log(times[-1] - times[0] + tiny),
        sizes.std(), gaps.std(), sizes.max(), gaps.max(),
        *np.percentile(sizes, SHARES), *np.log(np.percentile(gaps, SHARES) + tiny),
        float(np.mean(sizes > 1.5 * np.median(sizes))),
    ]  # fmt: skip
    found += [*_padded(sizes), *_padded(np.log(gaps + tiny))]
    return np.array(found, float)


def _padded(values: Floats) -> list[float]:
    kept = [float(value) for value in values[:EARLY]]
    return kept + [0.0] * (EARLY - len(kept))


def auc(scores: Floats, labels: Floats) -> float:
    """Share of pairs of a positive and a negative in which the positive one scores higher; ties count half."""
    above = scores[labels == 1][:, None] - scores[labels == 0][None, :]
    return float(np.mean((above > 0) + 0.5 * (above == 0)))


def fit(x: Floats, labels: Floats) -> Floats:
    """Weights of a logistic regression with a ridge, the last one the constant, by Newton's method."""
    design = np.column_stack([x, np.ones(len(x))])
    ridge = np.diag([PENALTY] * x.shape[1] + [1e-6])
    weights = np.zeros(design.shape[1])
    for _ in range(STEPS):
        likely = 1 / (1 + np.exp(-np.clip(design @ weights, -30, 30)))
        slope = design.T @ (likely - labels) + ridge @ weights
        bend = (design.T * (likely * (1 - likely))) @ design + ridge
        change = np.linalg.solve(bend, slope)
        weights -= change
        if np.abs(change).max() < 1e-9:
            break
    return weights


def cross_validated(x: Floats, labels: Floats, folds: Sequence[Mask]) -> float:
    """Mean AUC over folds (boolean masks of what is held out), each scored by what was fitted to the others."""
    found = []
    for held in folds:
        middle, width = x[~held].mean(axis=0), x[~held].std(axis=0)
        scaled = np.clip((x - middle) / np.where(width > 1e-12, width, 1.0), -10, 10)
        weights = fit(scaled[~held], labels[~held])
        found.append(auc(scaled[held] @ weights[:-1] + weights[-1], labels[held]))
    return float(np.mean(found))


def folds_of(labels: Floats, seed: int) -> list[Mask]:
    """Masks of `FOLDS` parts with both labels in each, as evenly as may be, `REPEATS` times over."""
    draws = np.random.default_rng(seed)
    count = int(min(FOLDS, (labels == 0).sum(), (labels == 1).sum()))
    masks: list[Mask] = []
    for _ in range(REPEATS):
        part = np.empty(len(labels), int)
        for label in (0, 1):
            places = draws.permutation(np.flatnonzero(labels == label))
            part[places] = np.arange(len(places)) % count
        masks += [part == number for number in range(count)]
    return masks


def told_apart(streams: Sequence[Reads], labels: Sequence[int], seed: int = 0) -> float:
    """How well an observer tells streams with one label from those with others: the AUC, 0.5 for nothing at all. Of more than
    two labels the mean over one against the rest. At least two streams of each label."""
    x, given = np.array([features(reads) for reads in streams]), np.array(labels)
    kinds = sorted(set(labels))
    chosen = kinds[1:] if len(kinds) == 2 else kinds
    found = []
    for kind in chosen:
        mask = (given == kind).astype(float)
        found.append(cross_validated(x, mask, folds_of(mask, seed)))
    return float(np.mean(found))


def chance(count: int, others: int, seed: int = 0) -> float:
    """Which AUC scores without any meaning stay below in 95 of 100 cases, for so many streams with a label and without it."""
    draws = np.random.default_rng(seed)
    labels = np.array([1.0] * count + [0.0] * others)
    return float(np.percentile([auc(draws.random(len(labels)), labels) for _ in range(GUESSES)], 95))


def bytes_of(reads: Reads) -> int:
    return sum(count for _, count in reads)
