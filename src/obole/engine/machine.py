"""What this process may use of the machine: its own share, where a container limits it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")  # version 2, as seen from inside a container


def available_memory(cgroup: Path = CGROUP) -> int:
    """Bytes of memory that can still be taken: of the machine, or of the control group if that allows less."""
    available: int = psutil.virtual_memory().available
    limit, used = _numbers(cgroup / "memory.max"), _numbers(cgroup / "memory.current")
    if limit and used:
        # pages of files count as used, but give way
        pages = _field(cgroup / "memory.stat", "inactive_file")
        available = min(available, max(0, limit[0] - used[0] + pages))
    return available


def total_memory(cgroup: Path = CGROUP) -> int:
    """Bytes of memory of the machine, or what the control group allows of it."""
    total: int = psutil.virtual_memory().total
    return min([total, *_numbers(cgroup / "memory.max")])


def usable_processors(cgroup: Path = CGROUP) -> int:
    """Processors on which this process may run, or as many as its quota of time amounts to, rounded up."""
    allowed = len(os.sched_getaffinity(0))
    quota = _numbers(cgroup / "cpu.max")
    if len(quota) == 2 and quota[1] > 0:
        allowed = min(allowed, max(1, -(-quota[0] // quota[1])))
    return allowed


def _numbers(path: Path) -> list[int]:
    """The numbers in a file; none if it is not there or says "max"."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def _field(path: Path, name: str) -> int:
    try:
        rows = dict(line.split() for line in path.read_text().splitlines())
        return int(rows[name])
    except (OSError, ValueError, KeyError):
        return 0
