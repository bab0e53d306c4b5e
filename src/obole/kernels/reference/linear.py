"""The product of packed weights and activations: the arithmetic that every kernel reproduces.

Activations are quantised per row and group of 32 inputs: scale_a = amax / 127, a = round(x * (127 / amax)) to nearest, ties
to even. A group whose amax is below 2^-100 counts as zeros; one with a NaN or an infinity has the scale NaN and codes 0.
For each row and column, over the groups in order (with scales per 16 inputs: over their halves in order):

    acc = fma(float(sum(code * a) - zero * sum(a)), scale_w * scale_a, acc)
    acc = fma(float(sum(a)) * scale_a, minimum_w, acc)                          where there is a minimum

Unquantised weights: acc = fma(w[k], x[k], acc) in float32, over the inputs in order. A bias is added last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from obole.kernels.formats import GROUP, Codes, values

TINY = 2.0**-100


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    in_features: int
    out_features: int
    nbytes: int
    parts: tuple[Codes | torch.Tensor, ...]  # a tensor: unquantised, float32 (N, K)
    biases: tuple[torch.Tensor | None, ...]

    def rows(self) -> torch.Tensor:
        """All rows of the matrix as float32 (N, K)."""
        return torch.cat([p if isinstance(p, torch.Tensor) else torch.from_numpy(values(p)) for p in self.parts])


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c, rounded once: the product is exact in float64 (the sum is rounded there first, which hardly ever shows)."""
    return (a.double() * b.double() + c.double()).float()


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(R, K) -> codes float64 (R, G, 32), scales float32 (R, G)."""
    groups = x.reshape(x.shape[0], -1, GROUP)
    amax = groups.abs().amax(dim=2)
    finite = groups.isfinite().all(dim=2)
    dead = ~finite | (amax < TINY)
    inverse = 127.0 / torch.where(dead, 1.0, amax)
    codes = torch.where(dead[:, :, None], 0.0, (groups * inverse[:, :, None]).round())
    scales = torch.where(finite, torch.where(dead, 0.0, amax / 127.0), torch.nan)
    return codes.double(), scales


def product(x: torch.Tensor, w: Codes) -> torch.Tensor:
    """(R, K) x (N, K) -> (R, N). Sums of integers are exact in float64 in any order."""
    codes, scales = quantize(x)
    code, scale = torch.from_numpy(w.code), torch.from_numpy(w.scale)
    minimum = None if w.minimum is None else torch.from_numpy(w.minimum)
    halves = scale.shape[2]
    acc = torch.zeros(x.shape[0], code.shape[0])
    for g in range(code.shape[1]):
        a = codes[:, g].reshape(x.shape[0], halves, -1)
        b = code[:, g].double().reshape(code.shape[0], halves, -1)
        for half in range(halves):
            total = a[:, half] @ b[:, half].T - w.zero * a[:, half].sum(dim=1, keepdim=True)
            acc = fma(total, scale[:, g, half] * scales[:, g, None], acc)
        if minimum is not None:
            acc = fma((a.sum(dim=(1, 2)).float() * scales[:, g])[:, None], minimum[:, g], acc)
    return acc


def product_float(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """(R, K) x (N, K) -> (R, N)."""
    acc = torch.zeros(x.shape[0], w.shape[0])
    for k in range(x.shape[1]):
        acc = fma(x[:, k, None], w[:, k], acc)
    return acc


def linear(x: torch.Tensor, w: ReferenceLinear) -> torch.Tensor:
    outputs = []
    for part, bias in zip(w.parts, w.biases, strict=True):
        out = product_float(x, part) if isinstance(part, torch.Tensor) else product(x, part)
        outputs.append(out if bias is None else out + bias)
    return torch.cat(outputs, dim=1)
