"""Energy that a machine spent: Intel's and AMD's RAPL counters under /sys, and NVIDIA's by NVML, each only where it is there.

RAPL: https://docs.kernel.org/power/powercap/powercap.html; counters of packages, in microjoules, that start anew at a limit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")
NVML = "libnvidia-ml.so.1"


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter. `read`: joules so far; `range_`: joules at which it starts anew, 0 for never."""

    name: str
    read: Callable[[], float]
    range_: float = 0.0


@dataclass(slots=True)
class Meter:
    """What the counters moved by. Long stretches must be looked at once in a while (`look`), or a counter starts anew twice."""

    counters: list[Counter]
    joules: dict[str, float] = field(default_factory=dict)
    _last: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for counter in self.counters:
            with suppress(OSError, ValueError):
                self._last[counter.name] = counter.read()
                self.joules[counter.name] = 0.0

    def look(self) -> dict[str, float]:
        """Joules since the beginning by counter; one that can no longer be read keeps what it had."""
        for counter in self.counters:
            if counter.name in self._last:
                with suppress(OSError, ValueError):
                    now = counter.read()
                    moved = now - self._last[counter.name]
                    self.joules[counter.name] += moved + counter.range_ if moved < 0 else moved
                    self._last[counter.name] = now
        return dict(self.joules)


def meter(powercap: Path = POWERCAP, nvml: str = NVML) -> Meter:
    """All counters of this machine that can be read; none where there are none, or only root may read them."""
    return Meter([*rapl(powercap), *gpus(nvml)])


def rapl(folder: Path) -> list[Counter]:
    """Packages; the domains within one (cores, memory) are part of it."""
    found = []
    for path in sorted(folder.glob("intel-rapl:*")) if folder.is_dir() else ():
        if path.name.count(":") != 1:
            continue
        with suppress(OSError, ValueError):
            name = (path / "name").read_text().strip() or path.name
            range_ = int((path / "max_energy_range_uj").read_text()) / 1e6
            counter = Counter(f"{path.name.partition(':')[2]} {name}", _microjoules(path / "energy_uj"), range_)
            counter.read()
            found.append(counter)
    return found


def _microjoules(path: Path) -> Callable[[], float]:
    return lambda: int(path.read_text()) / 1e6


def gpus(name: str) -> list[Counter]:
    """NVIDIA's, by the driver's library; those that do not count energy are left out."""
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return []
    count = ctypes.c_uint()
    if library.nvmlInit_v2() != 0 or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    found = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
            counter = Counter(f"gpu {index}", _millijoules(library, handle))
            with suppress(OSError):
                counter.read()
                found.append(counter)
    return found


def _millijoules(library: Any, handle: ctypes.c_void_p) -> Callable[[], float]:
    def read() -> float:
        value = ctypes.c_ulonglong()
        if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value)) != 0:
            raise OSError("no energy counter")
        return value.value / 1e3

    return read
