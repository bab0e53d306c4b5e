"""What changed between two runs, beyond noise: the ratio of medians with a bootstrap interval (Efron 1979)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from obole.errors import InvalidRequest

RESAMPLES = 4000
CONFIDENCE = 0.95  # for all figures of a comparison together
LEAST = 3  # values of each side, without which nothing is said about noise

BETTER, WORSE, SAME, UNSURE = "better", "worse", "same", "unsure"
HIGHER = ("per_second", "speed_up", "share_of_bandwidth", "tokens_per_pass", "goodput", "met")
LOWER = ("milliseconds", "microseconds", "seconds", "cost_percent", "distance")
NAMES = (
    "kind", "operation", "shape", "step", "rows", "sequences", "context", "prompt_tokens", "output_tokens", "requests",
)  # fmt: skip  # of a row: what it was measured with


@dataclass(frozen=True, slots=True)
class Change:
    """One figure before and now, the medians. `ratio` is that of now to before, between `low` and `high` with confidence;
    `verdict` is one of `BETTER`, `WORSE`, `SAME` and `UNSURE` (too few repetitions)."""

    row: str
    figure: str
    before: float
    now: float
    ratio: float
    low: float
    high: float
    verdict: str


def ratio_interval(before: Sequence[float], now: Sequence[float], confidence: float, seed: int = 0) -> tuple[float, float]:
    """Between which the ratio of the medians lies, by resampling both sides. Positive values."""
    draws = np.random.default_rng(seed)
    old, new = np.asarray(before, float), np.asarray(now, float)
    medians = [np.median(side[draws.integers(len(side), size=(RESAMPLES, len(side)))], axis=1) for side in (old, new)]
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(medians[1] / medians[0], [tail, 100 - tail])
    return float(low), float(high)


def direction(figure: str) -> int:
    """1 where higher is better, -1 where lower is, 0 for what is neither."""
    if figure.endswith(HIGHER):
        return 1
    return -1 if figure.endswith(LOWER) else 0


def verdict(sign: int, low: float, high: float, tolerance: float) -> str:
    """Of a figure whose ratio lies within these. Beyond noise and tolerance, both."""
    if sign > 0:
        low, high = 1 / high, 1 / low  # how many times as slow
    if low > 1 + tolerance:
        return WORSE
    return BETTER if high < 1 / (1 + tolerance) else SAME


def compare(before: Mapping[str, Any], now: Mapping[str, Any], tolerance: float = 0.0) -> list[Change]:
    """All figures that both documents of `obole bench` have, row by row. Raises `InvalidRequest` where there are none."""
    if before.get("benchmark") != now.get("benchmark"):
        raise InvalidRequest(
            "baseline", f"The baseline is of the benchmark {before.get('benchmark')}, this is {now.get('benchmark')}."
        )
    try:
        found = list(_pairs(before, now))
    except (KeyError, TypeError, AttributeError, ValueError):
        raise InvalidRequest("baseline", "The baseline is of another version: measure it anew.") from None
    if not found:
        raise InvalidRequest("baseline", "The baseline has no row in common with this run: measure both alike.")
    confidence = 1 - (1 - CONFIDENCE) / len(found)  # Bonferroni: many figures, one alarm
    return [_change(*one, confidence, tolerance) for one in found]


Pair = tuple[str, str, Sequence[float], Sequence[float]]


def _pairs(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Pair]:
    theirs = dict(_rows(before))
    for name, row in _rows(now):
        other = theirs.get(name)
        if other is None:
            continue
        for figure, values in row["repetitions"].items():
            old = other["repetitions"].get(figure)
            # a wall of seconds says again what requests a second say, and is fixed where requests come by themselves
            if direction(figure) and old and figure != "seconds" and _positive(old) and _positive(values):
                yield name, figure, [float(v) for v in old], [float(v) for v in values]


def _positive(values: Sequence[float | None]) -> bool:
    return bool(values) and all(value is not None and 0 < value < float("inf") for value in values)


def _rows(document: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Rows with repetitions, by what they were measured with."""
    open_loop = "arrivals" in document
    rows = [*document["rows"], *document.get("classes", ())]
    rows += [document[name] for name in ("long", "offline", "floor") if document.get(name)]
    for number, row in enumerate(rows):
        if "repetitions" not in row:
            continue
        kind = row.get("kind")
        if open_loop:
            yield str(kind), row
            continue
        parts = [
            f"{name} {row[name]:g}" if isinstance(row[name], float) else f"{name} {row[name]}" for name in NAMES if name in row
        ]
        if document["benchmark"] == "serve":  # the tokens that came are a result
            parts = [f"{row['concurrency']} at a time"] if "concurrency" in row else [f"part {number}"]
        yield ", ".join(part.removeprefix("kind ") for part in parts) or f"row {number}", row


def _change(row: str, figure: str, old: Sequence[float], new: Sequence[float], confidence: float, tolerance: float) -> Change:
    before, now = float(np.median(old)), float(np.median(new))
    if min(len(old), len(new)) < LEAST:
        return Change(row, figure, before, now, now / before, float("nan"), float("nan"), UNSURE)
    low, high = ratio_interval(old, new, confidence)
    return Change(row, figure, before, now, now / before, low, high, verdict(direction(figure), low, high, tolerance))


@dataclass(frozen=True, slots=True)
class Bits:
    """Whether answers are the same: None where it cannot be told, and `why` then says why not."""

    same: bool | None
    why: str = ""


def bits(before: Mapping[str, Any], now: Mapping[str, Any]) -> Bits:
    """Of two documents of the same benchmark: digests of answers, or whether drafts changed any."""
    if any(row.get("identical") is False for row in now.get("rows", ())):
        return Bits(False, "drafts changed an answer")
    if before.get("digest") != now.get("digest") and before.get("digest") and now.get("digest"):
        return Bits(False, "the weights are others")
    digests = [[row.get("answers_digest") for row in document.get("rows", ())] for document in (before, now)]
    if not all(map(all, digests)) or not all(digests):
        told = any("identical" in row for row in now.get("rows", ()))
        return Bits(True) if told else Bits(None, "this benchmark keeps no digest of answers")
    if any(row.get("errors") for document in (before, now) for row in document["rows"]):
        return Bits(None, "some requests failed")
    if before.get("command") != now.get("command") or before.get("repeat") != now.get("repeat"):
        return Bits(None, "the runs had other settings")
    return Bits(digests[0] == digests[1], "" if digests[0] == digests[1] else "answers have other tokens")
