"""Small sizes for benchmarks whose numbers, not speeds, are looked at."""

from __future__ import annotations

import pytest

from obole.bench import machine


@pytest.fixture(autouse=True)
def _small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "BUFFER", (1 << 20, 1 << 20))
    monkeypatch.setattr(machine, "BURST", 0.001)
