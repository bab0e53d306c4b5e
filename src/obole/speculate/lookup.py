"""Prompt lookup: what followed the last time that these tokens stood at the end. The index outlives its sequence."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from obole.speculate.proposal import Proposal
from obole.speculate.suffix import SuffixIndex
from obole.types import Sequence, Source

FEWEST_SHARED = 32  # tokens in common that make an index worth taking over


@dataclass(slots=True)
class Lookup:
    """A sequence's own prompt and output, indexed. `read` tokens of it are in the index."""

    index: SuffixIndex
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


@dataclass(slots=True)
class _Kept:
    tenant: str
    tokens: list[int]
    index: SuffixIndex


@dataclass(slots=True)
class IndexStore:
    """Indexes of finished sequences, for those that go on from them: the next turn of a conversation reads what is new.

    Owns at most `limit` bytes; the least recently kept go first. A tenant only ever gets its own.
    """

    limit: int
    _kept: OrderedDict[int, _Kept] = field(default_factory=OrderedDict)
    _bytes: int = 0
    _number: int = 0

    def keep(self, seq: Sequence, lookup: Lookup) -> None:
        """Take over the index of a finished sequence."""
        lookup.index.extend(seq.tokens[lookup.read :])
        self._number += 1
        self._kept[self._number] = _Kept(seq.request.tenant, seq.tokens, lookup.index)
        self._bytes += lookup.index.nbytes
        while self._bytes > self.limit and self._kept:
            self._pop(next(iter(self._kept)))

    def start(self, seq: Sequence) -> Lookup:
        """An index for a new sequence: that of the longest beginning in common, or an empty one."""
        best, shared = None, FEWEST_SHARED - 1
        for number, kept in reversed(self._kept.items()):
            if kept.tenant == seq.request.tenant:
                common = common_prefix(kept.tokens, seq.tokens, shared)
                if common > shared:
                    best, shared = number, common
                if common == len(seq.tokens):
                    break
        if best is None:
            return Lookup(SuffixIndex())
        kept = self._kept[best]
        if shared == len(kept.tokens):  # the sequence goes on where the other ended, and nobody else will
            return Lookup(self._pop(best).index, shared)
        index = kept.index.copy()
        index.resume(seq.tokens)
        return Lookup(index, len(seq.tokens))

    def forget(self, tenant: str | None = None) -> None:
        """Drop what is kept of one tenant, or everything."""
        for number in [n for n, kept in self._kept.items() if tenant is None or kept.tenant == tenant]:
            self._pop(number)

    @property
    def nbytes(self) -> int:
        return self._bytes

    def _pop(self, number: int) -> _Kept:
        kept = self._kept.pop(number)
        self._bytes -= kept.index.nbytes
        return kept


def common_prefix(a: list[int], b: list[int], least: int) -> int:
    """Tokens that `a` and `b` begin with alike; any number up to `least` where it is not more than that."""
    if len(a) <= least or len(b) <= least or a[: least + 1] != b[: least + 1]:
        return 0
    low, high = least + 1, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high - 1:  # a[:low] == b[:low], a[:high] != b[:high]
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low
