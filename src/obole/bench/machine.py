"""What this machine is, and what it can do at most: reads of memory and products a second."""

from __future__ import annotations

import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from obole.bench.samples import Samples
from obole.engine.machine import total_memory, usable_processors
from obole.errors import ConfigError

try:
    from obole.kernels import _native
    from obole.kernels.cpu import ISAS
except ImportError as error:
    raise ConfigError(f"Benchmarks need the native module ({error}): install obole again.") from error

CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
DEFAULT_CACHE = 32 << 20  # bytes, where the system does not say
BUFFER = (256 << 20, 1 << 30)  # bytes read to measure the bandwidth: at least, at most
PASSES = 5
BURST = 0.02  # seconds of products measured at a time
KINDS = ("int8", "fp32", "bf16")


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    cores: int  # that this process may use
    memory_bytes: int
    cache_bytes: int  # of the last level


@dataclass(frozen=True, slots=True)
class Roofs:
    """Bytes and products (a multiplication and an addition) a second. `bf16` is None without such an instruction."""

    threads: int
    read_bandwidth_bytes_per_second: Samples
    int8_products_per_second: float
    fp32_products_per_second: float
    bf16_products_per_second: float | None


def this_machine() -> Machine:
    return Machine(_cpu_name(), usable_processors(), total_memory(), last_level_cache())


def last_level_cache() -> int:
    """Bytes of the largest cache that the first processor has."""
    sizes = []
    for path in CACHE.glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes, default=DEFAULT_CACHE)


class ReadBandwidth:
    """Measures how fast `threads` threads together read memory. Holds some hundred megabytes while it lives."""

    def __init__(self, threads: int) -> None:
        size = min(max(BUFFER[0], 4 * last_level_cache()), BUFFER[1])
        memory = np.full(size + 64, 1, dtype=np.uint8)  # written, so that every page is there
        start = -memory.ctypes.data % 64
        self._memory = memory[start : start + size]
        self._probe = _native.Probe(threads)
        self._probe.read(self._memory.ctypes.data, size)

    def measure(self) -> float:
        """Bytes a second: the median of some passes, each over more than the caches hold."""
        return Samples.of(self._pass() for _ in range(PASSES)).median

    def _pass(self) -> float:
        start = time.perf_counter()
        self._probe.read(self._memory.ctypes.data, self._memory.nbytes)
        return self._memory.nbytes / (time.perf_counter() - start)


def products_per_second(kind: str, isa: str, threads: int) -> float | None:
    """The most that `threads` threads make of the products of a kind ("int8", "fp32", "bf16"); None if they cannot."""
    probe = _native.Probe(threads)
    rounds, best = 1, 0.0
    while True:
        start = time.perf_counter()
        made = probe.multiply(kind, isa, rounds)
        seconds = time.perf_counter() - start
        if not made:
            return None
        if seconds > BURST:
            break
        rounds *= 2
    for _ in range(PASSES):
        start = time.perf_counter()
        made = probe.multiply(kind, isa, rounds)
        best = max(best, made / (time.perf_counter() - start))
    return best


def roofs(threads: int, isa: str, repeat: int) -> Roofs:
    """The roofs over `threads` threads with the instruction set `isa`."""
    bandwidth = ReadBandwidth(threads)
    int8, fp32, bf16 = (products_per_second(kind, isa, threads) for kind in KINDS)
    if int8 is None or fp32 is None:
        raise ConfigError(f"This machine does not have the instruction set {isa!r}.")
    return Roofs(threads, Samples.of(bandwidth.measure() for _ in range(repeat)), int8, fp32, bf16)


def isa_of(kernels: str) -> str:
    """The instruction set of an engine's kernels ("native avx2"), or the best one here if they have none ("reference")."""
    name = kernels.split()[-1]
    return name if name in ISAS else next(isa for isa in ISAS if _native.runs(isa))


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()
