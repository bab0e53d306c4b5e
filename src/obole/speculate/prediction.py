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
        self._read = -1  # tokens of the sequence that the cursor has read; -1: it has not begun

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        if self._read < seq.prompt_len:
            self._read = seq.prompt_len
        new = seq.tokens[self._read :]
        self._read = len(seq.tokens)
        if len(seq.tokens) == seq.prompt_len:
            return Proposal(Source.PREDICTION, AT_START, 1.0, self._tokens[:most]) if self._tokens else None
        self._cursor.advance(new)
        match = self._cursor.match(most)
        if match is None:
            return None
        return Proposal(Source.PREDICTION, match.length, match.support / match.total, match.tokens)
