"""Prompt lookup: what followed the last time that these tokens stood at the end. The index outlives its sequence."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np

from obole.speculate.proposal import Proposal
from obole.speculate.suffix import SuffixIndex
from obole.types import Sequence, Source

Tokens = np.ndarray[Any, np.dtype[np.int32]]

FEWEST_SHARED = 32  # tokens in common that make an index worth taking over


@dataclass(slots=True, eq=False, weakref_slot=True)
class Lookup:
    """A sequence's own prompt and output, indexed. `read` tokens of it are in the index.

    An index taken over from an earlier sequence also holds what that one had read; `tenant` and `origins` (request ids) say
    whose tokens there are.
    """

    index: SuffixIndex
    tenant: str
    origins: frozenset[str]
    read: int = 0

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        """Read the tokens that are new and draft at most `most` tokens."""
        tokens = seq.tokens
        if self.read < len(tokens):
            self.index.extend(tokens[self.read :] if self.read else tokens)
            self.read = len(tokens)
        match = self.index.match(most)
        if match is None:
            return None
        return Proposal(Source.LOOKUP, match.length, match.support / match.total, match.tokens)


@dataclass(frozen=True, slots=True)
class _Kept:
    lookup: Lookup
    tokens: Tokens  # that its index ends with, from the beginning
    head: bytes  # the first of them: most texts differ there
    nbytes: int
    since: float  # seconds


@dataclass(slots=True)
class IndexStore:
    """Indexes of finished sequences, for those that go on from them: the next turn of a conversation reads what is new.

    Owns at most `limit` bytes, each index for at most `keep_seconds`; the least recently kept go first. A tenant only ever
    gets its own. Times are seconds on the caller's clock and never decrease.
    """

    limit: int
    keep_seconds: float
    _kept: OrderedDict[int, _Kept] = field(default_factory=OrderedDict)
    _bytes: int = 0
    _number: int = 0
    _lent: WeakSet[Lookup] = field(default_factory=WeakSet)  # at work

    def keep(self, seq: Sequence, lookup: Lookup, now: float) -> None:
        """Take over the index of a finished sequence."""
        lookup.index.extend(seq.tokens[lookup.read :])
        self._lent.discard(lookup)
        tokens = np.asarray(seq.tokens, dtype=np.int32)
        self._number += 1
        kept = _Kept(lookup, tokens, head_of(tokens), lookup.index.nbytes + tokens.nbytes, now)
        self._kept[self._number] = kept
        self._bytes += kept.nbytes
        self.expire(now)
        while self._bytes > self.limit and self._kept:
            self._pop(next(iter(self._kept)))

    def start(self, seq: Sequence) -> Lookup:
        """An index for a new sequence: that of the longest beginning in common, or an empty one."""
        request = seq.request
        best, shared = None, 0
        tokens = np.asarray(seq.tokens, dtype=np.int32)
        head = head_of(tokens)
        for number, kept in reversed(self._kept.items()):
            if kept.head == head and kept.lookup.tenant == request.tenant:
                common = common_prefix(kept.tokens, tokens)
                if common > shared:
                    best, shared = number, common
                if common == len(tokens):
                    break
        own = frozenset((request.id,))
        if best is None or shared < FEWEST_SHARED:
            lookup = Lookup(SuffixIndex(), request.tenant, own)
        elif shared == len(self._kept[best].tokens):  # the sequence goes on where the other ended, and nobody else will
            old = self._pop(best).lookup
            lookup = Lookup(old.index, request.tenant, old.origins | own, shared)
        else:
            old = self._kept[best].lookup
            index = old.index.copy()
            index.resume(tokens)
            lookup = Lookup(index, request.tenant, old.origins | own, len(tokens))
        self._lent.add(lookup)
        return lookup

    def forget(self, tenant: str, request_id: str | None = None) -> None:
        """Delete what is kept of a tenant, or of one of its requests. Sequences at work begin anew with their own tokens."""

        def concerned(lookup: Lookup) -> bool:
            return lookup.tenant == tenant and (request_id is None or request_id in lookup.origins)

        for number in [n for n, kept in self._kept.items() if concerned(kept.lookup)]:
            self._pop(number)
        for lookup in filter(concerned, list(self._lent)):
            lookup.index, lookup.read = SuffixIndex(), 0

    def expire(self, now: float) -> None:
        """Drop what was kept more than `keep_seconds` ago."""
        while self._kept:
            number, oldest = next(iter(self._kept.items()))
            if now - oldest.since <= self.keep_seconds:
                break
            self._pop(number)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def _pop(self, number: int) -> _Kept:
        kept = self._kept.pop(number)
        self._bytes -= kept.nbytes
        return kept


def head_of(tokens: Tokens) -> bytes:
    return tokens[:FEWEST_SHARED].tobytes()


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Tokens that `a` and `b` begin with alike."""
    size = min(a.size, b.size)
    different = a[:size] != b[:size]
    first = int(different.argmax()) if size else 0
    return first if size and different[first] else size
