"""The specification of the suffix index: slow, obvious, and equal to the native one but for the counts of short strings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

BRANCHES = 8  # listed in a match, at most


@dataclass(frozen=True, slots=True)
class Match:
    length: int  # tokens of the suffix
    tokens: list[int]  # the continuation of the latest occurrence of the best branch
    support: int  # occurrences of that branch, at least 1
    total: int  # occurrences of all branches
    branches: list[tuple[int, int]]  # (next token, occurrences), best first


class ReferenceIndex:
    """A forest: each token appended is a node below the token before it in its document, and a node's string is that from the
    beginning of the document to the node. -1 stands above all nodes; its string is empty.

    A run is what was appended in one go: a document, or the part of one that it does not share with an earlier one.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []  # of the nodes
        self.above: list[int] = []
        self.runs: list[int] = []
        self.run = 0
        self.end = -1  # the last node of the current document

    def __len__(self) -> int:
        return len(self.tokens)

    def begin(self) -> None:
        self._go_on(-1)

    def _go_on(self, node: int) -> None:
        self.end = node
        self.run += 1

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.above.append(self.end)
        self.runs.append(self.run)
        self.end = len(self.tokens) - 1

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.append(token)

    def resume(self, tokens: Sequence[int]) -> int:
        nodes = {tuple(self.string(node)): node for node in range(-1, len(self.tokens))}
        found = max(n for n in range(len(tokens) + 1) if tuple(tokens[:n]) in nodes)
        if self.string(self.end) != list(tokens[:found]):
            self._go_on(nodes[tuple(tokens[:found])])
        self.extend(tokens[found:])
        return found

    def string(self, node: int) -> list[int]:
        text = []
        while node >= 0:
            text.append(self.tokens[node])
            node = self.above[node]
        return text[::-1]

    def common(self, node: int, text: Sequence[int]) -> int:
        """Length of the longest suffix that the string of a node and a text have in common."""
        length = 0
        while node >= 0 and length < len(text) and self.tokens[node] == text[-1 - length]:
            node, length = self.above[node], length + 1
        return length

    def longest(self, text: Sequence[int]) -> int:
        """Length of the longest suffix of a text that occurs."""
        return max((self.common(node, text) for node in range(len(self.tokens))), default=0)

    def match(self, most: int) -> Match | None:
        return self.match_of(self.string(self.end), most, own=True)

    def match_of(self, text: Sequence[int], most: int, *, own: bool) -> Match | None:
        """The longest suffix of a text that a node follows. `own`: the text is the current document."""
        lengths = [self.common(above, text) for above in self.above]
        longest = max(lengths, default=0)
        if longest == 0:
            return None
        followers = [node for node, length in enumerate(lengths) if length == longest]
        counts = Counter(self.tokens[node] for node in followers)
        latest = {self.tokens[node]: node for node in followers}
        branches = sorted(counts, key=lambda token: (counts[token], latest[token]), reverse=True)
        return Match(
            longest,
            self.continuation(latest[branches[0]], most, own=own),
            counts[branches[0]],
            len(followers),
            [(token, counts[token]) for token in branches[:BRANCHES]],
        )

    def continuation(self, node: int, most: int, *, own: bool) -> list[int]:
        """What stands in a run from a node on. The run being written is followed by what follows it here."""
        text = [token for token, run in zip(self.tokens[node:], self.runs[node:], strict=True) if run == self.runs[node]]
        if own and self.runs[node] == self.run:
            period = len(text)
            while len(text) < most:
                text.append(text[-period])
        return text[:most]


class ReferenceCursor:
    def __init__(self, index: ReferenceIndex) -> None:
        self._index = index
        self._read: list[int] = []  # the longest suffix of what was read that occurred in the index

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            read = [*self._read, token]
            self._read = read[len(read) - self._index.longest(read) :]

    def match(self, most: int) -> Match | None:
        return self._index.match_of(self._read, most, own=False)
