"""Texts to draft from, kept beside the blocks: they outlive the process, as the blocks do.

On disk a text has the tag of its tenant and no name, so what was read is taken into memory when a tenant of that tag first
asks for something: newest first, one text between two steps, until the memory's limit is reached.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from obole.cache.prefix import owner_tag
from obole.cache.tiers.store import TierStore
from obole.speculate.memory import Memory
from obole.types import Sequence

Tokens = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class _Text:
    name: bytes
    tokens: Tokens
    written: float  # seconds on the engine's clock


class Recall:
    """Saves texts that are remembered, and brings those of earlier processes back. All methods are the engine thread's.

    Reading happens on a thread of its own, newest first, until there are as many bytes as `memory` may take. Nobody waits
    for it.
    """

    def __init__(self, store: TierStore, memory: Memory, clock: Callable[[], float]) -> None:
        self._store = store
        self._memory = memory
        self._clock = clock
        self._lock = threading.Lock()
        self._read: dict[bytes, list[_Text]] = {}  # by owner, oldest first; filled when the thread ends, under the lock
        self._forgotten: set[bytes] = set()  # owners whose texts the thread must leave out
        self._open: dict[str, list[_Text]] = {}  # of tenants that have asked
        self._waiting: dict[str, None] = {}
        self._met: set[str] = set()
        self._thread = threading.Thread(target=self._read_all, name="obole-recall", daemon=True)
        self._thread.start()

    def save(self, seq: Sequence, tokens: Tokens) -> None:
        """Keep a text on disk."""
        data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
        self._store.put_document(owner_tag(seq.request.tenant), blake3(data).digest(16), data)

    def meet(self, tenant: str) -> None:
        """A tenant asks for something: its texts will be wanted."""
        if tenant not in self._met:
            self._met.add(tenant)
            self._waiting[tenant] = None

    def feed(self) -> bool:
        """Take one text into memory. False if there is none to take now."""
        if self._waiting and not self._thread.is_alive():
            for tenant in self._waiting:
                texts = self._read.pop(owner_tag(tenant), None)
                if texts:
                    self._open[tenant] = texts
            self._waiting.clear()
        if not self._open:
            return False
        tenant = next(iter(self._open))
        texts = self._open[tenant]
        text = texts.pop()
        fresh = self._clock() - text.written <= self._memory.keep_seconds
        if not fresh or not self._memory.recall(tenant, f"recalled {text.name.hex()}", text.tokens, text.written) or not texts:
            del self._open[tenant]
        return True

    def forget(self, tenant: str) -> None:
        """Never bring back what was read of a tenant. On disk it is the store that forgets."""
        owner = owner_tag(tenant)
        with self._lock:
            self._forgotten.add(owner)
            self._read.pop(owner, None)
        self._open.pop(tenant, None)

    def wait(self, seconds: float) -> None:
        """For the thread to have read everything."""
        self._thread.join(seconds)

    def _read_all(self) -> None:
        now, wall = self._clock(), time.monotonic()
        kept: list[tuple[bytes, _Text]] = []
        size = 0
        for owner, name, data, age in self._store.documents():
            size += len(data)
            if age > self._memory.keep_seconds or size > self._memory.limit:
                break
            if len(data) % 4 == 0:
                kept.append((owner, _Text(name, np.frombuffer(data, dtype="<i4"), now + (time.monotonic() - wall) - age)))
        with self._lock:
            for owner, text in reversed(kept):
                if owner not in self._forgotten:
                    self._read.setdefault(owner, []).append(text)
