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
BYTES_PER_TOKEN = 80  # of an index and its document, at most
LOOK_BACK = 64  # tokens before the present place that are compared: a longer match says no more


@dataclass(slots=True, eq=False)
class Generation:
    tenant: str
    index: SuffixIndex = field(default_factory=SuffixIndex)
    documents: dict[str, list[Tokens]] = field(default_factory=dict)  # by request id
    newest: float = 0.0  # seconds, when its last document came
    recalled: bool = False  # it has documents from before this process

    def add(self, request_id: str, tokens: Tokens, now: float) -> None:
        self._read(tokens)
        self.documents.setdefault(request_id, []).append(tokens)
        self.newest = now

    def remove(self, request_id: str) -> None:
        """Forget the documents of a request: the others go into a new index."""
        del self.documents[request_id]
        self.index = SuffixIndex()
        for documents in self.documents.values():
            for tokens in documents:
                self._read(tokens)

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + 4 * len(self.index)

    def _read(self, tokens: Tokens) -> None:
        self.index.begin()
        self.index.extend(tokens)


@dataclass(slots=True)
class Memory:
    """What is remembered of all tenants: at most `limit` bytes of each and of all together, for `keep_seconds`.

    Over the limit the tenant that was written to least recently loses its oldest generation first. Times are seconds on the
    caller's clock and never decrease.
    """

    limit: int
    keep_seconds: float
    _tenants: OrderedDict[str, list[Generation]] = field(default_factory=OrderedDict)  # least recently written first
    _ages: OrderedDict[Generation, None] = field(default_factory=OrderedDict)  # all generations, by `newest`
    _bytes: int = 0  # of them

    def remember(self, seq: Sequence, now: float) -> Tokens | None:
        """Take in a finished sequence, less the beginning of its prompt that was found in the cache: that came before.

        Returns the tokens taken in.
        """
        if not self.limit:
            return None
        tokens = np.asarray(seq.tokens[max(0, seq.tally.cached - LOOK_BACK) :], dtype=np.int32)
        generation = self._open(seq.request.tenant)
        self._bytes -= generation.nbytes
        try:
            generation.add(seq.request.id, tokens, now)
        finally:
            self._bytes += generation.nbytes
        self._ages.move_to_end(generation)
        self.expire(now)
        while self._bytes > self.limit:
            self._drop(next(iter(self._tenants.values()))[0])
        return tokens

    def recall(self, tenant: str, name: str, tokens: Tokens, when: float) -> bool:
        """Take in a document of an earlier time, older than those recalled so far. False if there is no room for it."""
        if self._bytes + BYTES_PER_TOKEN * len(tokens) > self.limit:
            return False
        generations = self._tenants.setdefault(tenant, [])
        if not generations or not generations[0].recalled or generations[0].nbytes > self.limit // GENERATIONS:
            generations.insert(0, Generation(tenant, newest=when, recalled=True))
            self._bytes += generations[0].nbytes
        generation = generations[0]
        self._bytes -= generation.nbytes
        try:
            generation.add(name, tokens, generation.newest)
        finally:
            self._bytes += generation.nbytes
        self._ages[generation] = None
        self._ages = OrderedDict.fromkeys(sorted(self._ages, key=lambda each: each.newest))
        return True

    def generations(self, tenant: str) -> list[Generation]:
        """Oldest first. The list is the memory's own."""
        return self._tenants.get(tenant, [])

    def forget(self, tenant: str, request_id: str | None = None) -> None:
        """Delete what is remembered of a tenant, or of one of its requests."""
        for generation in list(self.generations(tenant)):
            if request_id is None or generation.documents.keys() == {request_id}:
                self._drop(generation)
            elif request_id in generation.documents:
                self._bytes -= generation.nbytes
                generation.remove(request_id)
                self._bytes += generation.nbytes

    def expire(self, now: float) -> None:
        """Drop what was last added to more than `keep_seconds` ago."""
        while self._ages:
            oldest = next(iter(self._ages))
            if now - oldest.newest <= self.keep_seconds:
                break
            self._drop(oldest)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def _open(self, tenant: str) -> Generation:
        """The generation that takes documents of a tenant in."""
        generations = self._tenants.setdefault(tenant, [])
        self._tenants.move_to_end(tenant)
        if not generations or generations[-1].recalled or generations[-1].nbytes > self.limit // GENERATIONS:
            generation = Generation(tenant)
            generations.append(generation)
            self._ages[generation] = None
            self._bytes += generation.nbytes
        return generations[-1]

    def _drop(self, generation: Generation) -> None:
        self._bytes -= generation.nbytes
        del self._ages[generation]
        generations = self._tenants[generation.tenant]
        generations.remove(generation)
        if not generations:
            del self._tenants[generation.tenant]


class Recollection:
    """One sequence's place in the memory of its tenant: a cursor in each generation."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._cursors: dict[int, tuple[SuffixIndex, Cursor]] = {}
        self._read = 0

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        tokens = seq.tokens
        new = tokens[self._read :]
        self._read = len(tokens)
        best = None
        cursors = {}
        for generation in self._memory.generations(seq.request.tenant):
            index = generation.index
            known = self._cursors.get(id(index))
            if known is not None:
                cursor = known[1]
                cursor.advance(new)
            else:
                cursor = Cursor(index)
                cursor.advance(tokens[-LOOK_BACK:])
            cursors[id(index)] = (index, cursor)
            match = cursor.match(most)
            if match is not None and (best is None or match.length >= best.length):  # of equals the newest
                best = match
        self._cursors = cursors  # of what is gone, nothing is held
        if best is None:
            return None
        return Proposal(Source.MEMORY, best.length, best.support / best.total, best.tokens)
