"""What finding a draft costs: updating and matching the suffix index after contexts of any length, against a plain scan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from obole.bench.drive import check_repeat
from obole.bench.samples import Report, Samples, silent
from obole.bench.workloads import library_words
from obole.errors import InvalidRequest
from obole.speculate.proposal import LONGEST_DRAFT
from obole.speculate.suffix import SuffixIndex

Tokens = np.ndarray[Any, np.dtype[np.int32]]

STEPS = 2000  # tokens appended and matched one by one
SCANS = 20


@dataclass(frozen=True, slots=True)
class LookupRow:
    """`step_microseconds`: of one token more, read and matched; `scan_microseconds`: of the same match found by a scan over the
    context. `bytes_per_token`: that the index has allocated.
    """

    context: int
    build_seconds: Samples
    bytes_per_token: float
    step_microseconds: Samples
    scan_microseconds: Samples


def lookup(contexts: Sequence[int], repeat: int = 3, report: Report = silent) -> list[LookupRow]:
    """A row for each context. The text is that of Python's standard library, each of its different words a token.

    Raises `InvalidRequest` for a context longer than the library.
    """
    check_repeat(repeat)
    tokens = library_tokens(max(contexts) + STEPS)
    measured = []
    for i, context in enumerate(contexts):
        repetitions = []
        for round_ in range(repeat):
            report(f"looking up in {context:,}", i * repeat + round_, len(contexts) * repeat)
            repetitions.append(_measure(tokens, context))
        builds, sizes, steps, scans = zip(*repetitions, strict=True)
        measured.append(LookupRow(context, Samples.of(builds), sizes[0] / context, Samples.of(steps), Samples.of(scans)))
    return measured


def library_tokens(count: int) -> Tokens:
    """The first words of the standard library, numbered in the order in which they first appear: (count,)."""
    numbers: dict[str, int] = {}
    tokens = np.fromiter((numbers.setdefault(word, len(numbers)) for word in library_words(count)), np.int32)
    if tokens.size < count:
        raise InvalidRequest(
            "contexts", f"Python's standard library has {tokens.size:,} words here, but {count:,} are needed: ask for less."
        )
    return tokens


def scan(tokens: Tokens) -> tuple[int, int] | None:
    """(length, place) of the longest suffix that occurs before, by comparing all places at once; the place is that of the token
    that followed it the last time. None if the last token is new."""
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    if not ends.size:
        return None
    length = 1
    while True:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[-1 - length]]
        if not longer.size:
            return length, int(ends[-1]) + 1
        ends, length = longer, length + 1


def _measure(tokens: Tokens, context: int) -> tuple[float, int, float, float]:
    """Seconds to build the index, its bytes, microseconds of a step and of a scan."""
    index = SuffixIndex()
    build = _seconds(lambda: index.extend(tokens[:context]))
    size = index.nbytes
    following = [[token] for token in tokens[context : context + STEPS].tolist()]

    def steps() -> None:
        for token in following:
            index.extend(token)
            index.match(LONGEST_DRAFT)

    def scans() -> None:
        for more in range(SCANS):
            scan(tokens[: context + more])

    return build, size, _seconds(steps) / STEPS * 1e6, _seconds(scans) / SCANS * 1e6


def _seconds(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
