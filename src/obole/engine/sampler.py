"""The one verification rule: the token at a position is a pure function of (logits, params, seed, position).

No generator with a state: noise is counter-based (Philox keyed by the seed, counted by position and token id), and the
choice is the largest of logit / temperature + Gumbel noise over the tokens that the filters leave (Gumbel-max: an exact
draw from the softmax). So a token drafted, batched, recomputed or produced alone is the same token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from obole.types import Distribution, SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5  # temperatures below this are greedy: the limit of softmax(z / T) for T -> 0 is argmax
NOISE_SPAN = 27.0  # Gumbel noise from 32-bit uniforms lies within (-3.2, 22.9): a logit further below the best cannot win
DRAFTING, ACCEPTANCE = 0x243F6A8885A308D3, 0x13198A2E03707344  # purposes of noise: digits of pi
_LIMIT = float(np.finfo(np.float32).max)
_WORD = 2**64 - 1

Floats = np.ndarray[Any, np.dtype[np.float32]]
Doubles = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Noise = Callable[[int, int, Ints], Floats]  # (seed, position, token ids) -> Gumbel noise of each


def choose(
    logits: Floats,
    params: SamplingParams,
    seed: int,
    position: int,
    *,
    history: list[int],
    prompt_len: int,
    banned: frozenset[int] = frozenset(),
    noise: Noise,
    drafted: tuple[int, Distribution] | None = None,
    kept: list[Distribution] | None = None,
) -> int:
    """The token at `position`, which follows `history` (prompt and output so far, `position` tokens).

    `logits`: float32 (vocabulary,), not changed. `banned`: ids that may not come here (the stop tokens before
    `min_tokens`). Ties go to the lowest id; NaN counts as minus infinity. When no token is left (everything banned or
    minus infinity) the ban is void and the largest logit wins.

    `drafted`: a token that may be accepted in place of a draw, and what it was drawn from.
    `kept`: takes what this one is drawn from.
    """
    ids, scaled = candidates(logits, params, history, prompt_len, banned)
    if kept is not None:
        kept.append(normalised(ids, scaled))
    if drafted is not None:
        return accept_or_resample(*drafted, normalised(ids, scaled), seed, position, noise)
    return draw(ids, scaled, seed, position, noise)


def candidates(
    logits: Floats, params: SamplingParams, history: list[int], prompt_len: int, banned: frozenset[int]
) -> tuple[Ints, Doubles]:
    """Ids that may come, ascending, and their logits over the temperature; one id alone where nothing is left to chance."""
    z = adjust(logits, params, history, prompt_len, banned)
    if z.max() == -np.inf:
        z = np.where(np.isnan(logits), np.float32(-np.inf), logits)
        return _only(int(z.argmax()))
    if is_greedy(params):
        return _only(int(z.argmax()))
    scaled = z.astype(np.float64) / params.temperature
    ids = keep(scaled, params)
    kept = scaled[ids]
    near = kept >= kept.max() - NOISE_SPAN
    return ids[near], kept[near]


def draw(ids: Ints, scaled: Doubles, seed: int, position: int, noise: Noise) -> int:
    """One of the ids, with probabilities proportional to exp(scaled): a function of what is given alone."""
    if ids.size == 1:
        return int(ids[0])
    return int(ids[(scaled + noise(seed, position, ids)).argmax()])  # ids ascend, so argmax takes the lowest of equals


def normalised(ids: Ints, scaled: Doubles) -> Distribution:
    """The distribution that `draw` draws from."""
    weights = np.exp(scaled - scaled.max())
    return Distribution(ids, weights / weights.sum())


def accept_or_resample(token: int, proposed: Distribution, wanted: Distribution, seed: int, position: int, noise: Noise) -> int:
    """A token distributed as `wanted`, given one drawn from `proposed` by other noise: that one, as often as can be.

    It is accepted with probability min(1, wanted / proposed) of it; else one is drawn from the part of `wanted` that exceeds
    `proposed` (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).
    """
    chance, drawn = probability(wanted, token), probability(proposed, token)
    if chance > 0 and (chance >= drawn or uniform(derived_seed(seed, ACCEPTANCE), position, noise) * drawn < chance):
        return token
    rest = wanted.probabilities.copy()
    _, here, there = np.intersect1d(wanted.ids, proposed.ids, assume_unique=True, return_indices=True)
    rest[here] -= proposed.probabilities[there]
    left = rest > 0
    if not left.any():  # the two differ by rounding alone
        left, rest = wanted.probabilities > 0, wanted.probabilities
    return draw(wanted.ids[left], np.log(rest[left]), seed, position, noise)


def probability(distribution: Distribution, token: int) -> float:
    i = int(np.searchsorted(distribution.ids, token))
    found = i < distribution.ids.size and distribution.ids[i] == token
    return float(distribution.probabilities[i]) if found else 0.0


def uniform(seed: int, position: int, noise: Noise) -> float:
    """A number within (0, 1) from the Gumbel noise of token 0."""
    gumbel = float(noise(seed, position, np.zeros(1, dtype=np.int64))[0])
    return math.exp(-math.exp(-gumbel))


def _only(token: int) -> tuple[Ints, Doubles]:
    return np.array([token], dtype=np.int64), np.zeros(1)


def masked(logits: Floats, allowed: np.ndarray[Any, np.dtype[np.uint32]]) -> Floats:
    """A copy of the logits, minus infinity where the bit of a token is not set. Raises ValueError if none is set."""
    bits = np.unpackbits(allowed.view(np.uint8), bitorder="little", count=logits.size).view(bool)
    if not bits.any():
        raise ValueError("The constraint allows no token, yet it is not over.")
    return np.where(bits, logits, np.float32(-np.inf))


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of n: the request's own for the first, then well separated ones (SplitMix64)."""
    return seed & _WORD if index == 0 else _mixed((seed + index * 0x9E3779B97F4A7C15) & _WORD)


def derived_seed(seed: int, purpose: int) -> int:
    """The seed of noise that has nothing to do with that by which the sequence of this seed is sampled."""
    return _mixed((seed ^ purpose) & _WORD)


def _mixed(z: int) -> int:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature < GREEDY_BELOW or params.top_p == 0.0 or params.top_k == 1


def is_plain_greedy(params: SamplingParams) -> bool:
    """Whether the choice is the plain argmax of the logits, whatever came before."""
    return is_greedy(params) and not params.logit_bias and not has_penalties(params)


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def adjust(logits: Floats, params: SamplingParams, history: list[int], prompt_len: int, banned: frozenset[int]) -> Floats:
    """Penalties, bias, bans: float32 (vocabulary,), a copy, no NaN, finite where not minus infinity."""
    z = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    with np.errstate(over="ignore"):  # overflow to infinity is clipped below
        if params.repetition_penalty != 1.0:  # CTRL (arXiv 1909.05858, section 4.1), over prompt and output
            seen = np.unique(np.asarray(history, dtype=np.int64))
            before = z[seen].astype(np.float64)  # the penalty may be beyond float32
            after = np.where(before > 0, before / params.repetition_penalty, before * params.repetition_penalty)
            z[seen] = np.where(before == -np.inf, before, np.clip(after, -_LIMIT, _LIMIT)).astype(np.float32)
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:  # OpenAI's, over the output
            seen, counts = np.unique(np.asarray(history[prompt_len:], dtype=np.int64), return_counts=True)
            z[seen] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts.astype(np.float32)
        for token, bias in params.logit_bias.items():
            z[token] += np.float32(bias)
    if banned:
        z[list(banned)] = -np.inf
    return np.minimum(z, np.float32(_LIMIT), out=z)


def keep(scaled: Doubles, params: SamplingParams) -> Ints:
    """Ids that top-k, then top-p, then min-p leave, ascending; never empty."""
    ids = np.flatnonzero(scaled > -np.inf)
    if 0 < params.top_k < ids.size:
        ids = _largest(scaled, ids, params.top_k)
    if params.top_p >= 1.0 and params.min_p <= 0.0:
        return ids
    p = np.exp(scaled[ids] - scaled[ids].max())
    if params.top_p < 1.0:
        # tokens below (1 - top_p) / n of the mass cannot be needed: all of them together weigh less than 1 - top_p
        total = p.sum()
        may = np.flatnonzero(p >= (1.0 - params.top_p) * total / p.size)
        order = may[np.argsort(-p[may], kind="stable")]  # equal probabilities: lowest id first
        before = np.cumsum(p[order]) - p[order]
        chosen = np.sort(order[: max(1, int(np.count_nonzero(before < params.top_p * total)))])
        ids, p = ids[chosen], p[chosen]
    if params.min_p > 0.0:
        ids = ids[p >= params.min_p * p.max()]
    return ids


def _largest(scaled: Doubles, ids: Ints, k: int) -> Ints:
    """The k ids with the largest values, ascending; of equal values at the edge the lowest ids."""
    values = scaled[ids]
    edge = np.partition(values, ids.size - k)[ids.size - k]
    above = ids[values > edge]
    equal = ids[values == edge][: k - above.size]
    return np.sort(np.concatenate([above, equal]))


def token_logprob(logits: Floats, token: int, top: int) -> TokenLogprob:
    """The model's own log-probability of `token` and of the `top` most likely tokens, before penalties and filters.

    Values are finite: what would be minus infinity is the smallest float32.
    """
    z = np.minimum(np.where(np.isnan(logits), np.float32(-np.inf), logits), np.float32(_LIMIT)).astype(np.float64)
    largest = z.max()
    if not np.isfinite(largest):
        return TokenLogprob(token, -_LIMIT)
    normaliser = largest + np.log(np.exp(z - largest).sum())
    best = _ranked(z, min(top, z.size)) if top else ()
    return TokenLogprob(token, _finite(z[token] - normaliser), tuple((int(i), _finite(z[i] - normaliser)) for i in best))


def confidence(logits: Floats, best: int, highest: float, token: int) -> float:
    """The model's own probability of `token`, before penalties and filters: within [0, 1]; NaN counts as minus infinity.

    `highest`: that of `best`, the likeliest token.
    """
    if token == best:
        return highest
    rest = float(logits[token]) - float(logits[best])
    return 0.0 if math.isnan(rest) else highest * math.exp(rest)


def _ranked(z: Doubles, k: int) -> list[int]:
    ids = _largest(z, np.arange(z.size), k) if k < z.size else np.arange(z.size)
    return [int(i) for i in ids[np.argsort(-z[ids], kind="stable")]]


def _finite(value: float) -> float:
    return float(max(value, -_LIMIT))
