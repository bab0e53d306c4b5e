"""Shared suffix memory: earlier prompts and answers of one tenant, which draft for its later requests.

A suffix automaton cannot forget a document, so the memory is a row of generations: the newest takes documents in, the oldest is
dropped when there are too many bytes, or when its last document has expired. Deleting a request builds its generation anew.
Nothing ever passes from one tenant to another, since every tenant has generations of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from obole.speculate.proposal import Proposal
from obole.speculate.suffix import Cursor, SuffixIndex
from obole.types import Sequence, Source

Tokens = np.ndarray[Any, np.dtype[np.int32]]

GENERATIONS = 4  # that the memory of a tenant is cut into
LOOK_BACK = 64  # tokens before the present place that are compared: a longer match says no more


@dataclass(slots=True)
class Generation:
    index: SuffixIndex = field(default_factory=SuffixIndex)
    documents: dict[str, list[Tokens]] = field(default_factory=dict)
    newest: float = 0.0  # seconds, when its last document came

    def add(self, request_id: str, tokens: Tokens, now: float) -> None:
        self.index.begin()
        self.index.extend(tokens)
        self.documents.setdefault(request_id, []).append(tokens)
        self.newest = now

    def without(self, request_id: str) -> Generation:
        rest = Generation()
        for other, documents in self.documents.items():
            for tokens in documents if other != request_id else ():
                rest.add(other, tokens, self.newest)
        return rest

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + 4 * len(self.index)


@dataclass(slots=True)
class Memory:
    """What is remembered of all tenants: at most `limit` bytes of each and of all together, for `keep_seconds`.

    Over the limit the tenant that was written to least recently loses its oldest generation first.
    """

    limit: int
    keep_seconds: float
    _tenants: OrderedDict[str, list[Generation]] = field(default_factory=OrderedDict)

    def remember(self, seq: Sequence, now: float) -> None:
        """Take in a finished sequence, less the beginning of its prompt that was found in the cache: that came before."""
        if not self.limit:
            return
        tokens = np.asarray(seq.tokens[max(0, seq.tally.cached - LOOK_BACK) :], dtype=np.int32)
        generations = self._tenants.setdefault(seq.request.tenant, [])
        self._tenants.move_to_end(seq.request.tenant)
        if not generations or generations[-1].nbytes > self.limit // GENERATIONS:
            generations.append(Generation())
        generations[-1].add(seq.request.id, tokens, now)
        self.expire(now)
        while self.nbytes > self.limit:
            self._drop_oldest()

    def generations(self, tenant: str) -> list[Generation]:
        """Oldest first. The list is the memory's own."""
        return self._tenants.get(tenant, [])

    def forget(self, tenant: str, request_id: str | None = None) -> None:
        """Delete what is remembered of a tenant, or of one of its requests."""
        if request_id is None:
            self._tenants.pop(tenant, None)
        else:
            known = self._tenants.get(tenant, [])
            known[:] = [g.without(request_id) if request_id in g.documents else g for g in known]

    def expire(self, now: float) -> None:
        for tenant, generations in list(self._tenants.items()):
            generations[:] = [g for g in generations if now - g.newest <= self.keep_seconds]
            if not generations:
                del self._tenants[tenant]

    @property
    def nbytes(self) -> int:
        return sum(g.nbytes for generations in self._tenants.values() for g in generations)

    def _drop_oldest(self) -> None:
        tenant, generations = next(iter(self._tenants.items()))
        del generations[0]
        if not generations:
            del self._tenants[tenant]


class Recollection:
    """One sequence's place in the memory of its tenant: a cursor in each generation."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._cursors: dict[int, tuple[Generation, Cursor]] = {}
        self._read = 0

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        tokens = seq.tokens
        new = tokens[max(self._read, len(tokens) - LOOK_BACK) :]
        self._read = len(tokens)
        best = None
        cursors = {}
        for generation in self._memory.generations(seq.request.tenant):
            known = self._cursors.get(id(generation))
            if known is not None:
                cursor = known[1]
                cursor.advance(new)
            else:
                cursor = Cursor(generation.index)
                cursor.advance(tokens[-LOOK_BACK:])
            cursors[id(generation)] = (generation, cursor)
            match = cursor.match(most)
            if match is not None and (best is None or match.length >= best.length):  # of equals the newest
                best = match
        self._cursors = cursors  # of generations that are gone, nothing is held
        if best is None:
            return None
        return Proposal(Source.MEMORY, best.length, best.support / best.total, best.tokens)
