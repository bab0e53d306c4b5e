"""Repeated measurements of one thing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

Report: TypeAlias = Callable[[str, int, int], None]  # (what is being done, done, total)


def silent(_stage: str, _done: int, _total: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Samples:
    """The values of all repetitions, in the order in which they were measured; at least one."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Samples:
        return cls(tuple(values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def lowest(self) -> float:
        return min(self.values)

    @property
    def highest(self) -> float:
        return max(self.values)
