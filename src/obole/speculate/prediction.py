"""Drafts from the text that the caller expects back (OpenAI's predicted outputs)."""

from __future__ import annotations

from obole.speculate.proposal import Proposal
from obole.speculate.suffix import Cursor, SuffixIndex
from obole.types import Sequence, Source

AT_START = 8  # match length that the beginning of a prediction counts as at the beginning of the answer


class Prediction:
    """Follows the answer of one sequence through its prediction, and finds back after it has been left."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self._tokens = list(tokens)
        self._index = SuffixIndex()
        self._index.extend(self._tokens)
        self._cursor = Cursor(self._index)
        self._read = 0  # tokens of the answer
        self._along = True  # the answer is the beginning of the prediction so far

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        new = seq.tokens[seq.prompt_len + self._read :]
        self._along = self._along and new == self._tokens[self._read : self._read + len(new)]
        self._read += len(new)
        self._cursor.advance(new)
        if self._along and self._read < len(self._tokens):
            # the same words may come earlier or later in the text as well: the place counts, not what looks like it
            return Proposal(Source.PREDICTION, AT_START + self._read, 1.0, self._tokens[self._read : self._read + most])
        match = self._cursor.match(most)
        if match is None:
            return None
        return Proposal(Source.PREDICTION, match.length, match.support / match.total, match.tokens)
