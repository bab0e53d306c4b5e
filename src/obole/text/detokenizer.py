"""Tokens to text while they are generated, with stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from obole.text.stops import stop_automaton
from obole.text.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one answer as its tokens come in; implements `obole.types.TextTracker`.

    The texts taken, joined, are `tokenizer.decode(ids)` up to the first stop string: no character is given away in
    halves and none that is whole is held back, unless it may belong to a stop string. Bytes that are not UTF-8 become
    U+FFFD at once.

    The stop string that is complete first counts, and of two that are complete at the same character the longer. Text
    generated while `stops` is false can be the beginning of a match, not its end.

    `prompt_ids`: what the answer continues. Its text never appears; it decides whether the first space of a
    SentencePiece text is a real one (after text) or the tokenizer's own (at the beginning and after a control token).
    `shown`: control tokens that appear as text.
    """

    __slots__ = ("_tokenizer", "_decoder", "_automaton", "_state", "_final", "_held", "_strip", "_ended", "_stopped", "_shown")

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        prompt_ids: Sequence[int] = (),
        shown: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._decoder = _utf8("replace")
        self._automaton = stop_automaton(tuple(stops)) if stops else None
        self._state = 0
        self._final = ""  # may be taken
        self._held = ""  # may become a stop string
        self._strip = tokenizer.strip_space and (not prompt_ids or prompt_ids[-1] in tokenizer.special_ids)
        self._ended = False  # no more tokens count
        self._stopped = False  # because a stop string was found

    def push(self, token_id: int, *, stops: bool = True) -> bool:
        """Take one token; True when a stop string is complete (only looked for when `stops`)."""
        if self._ended:
            return self._stopped
        if token_id in self._shown:
            text = self._decoder.decode((self._tokenizer.token_text(token_id) or "").encode())
        else:
            text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        if not text:
            return False
        if self._strip:
            self._strip = False
            text = text.removeprefix(" ")
        if self._automaton is None:
            self._final += text
            return False
        return self._watch(text, stops)

    def take(self) -> str:
        """Text that is final since the last call; what may still become a stop string is held back."""
        text, self._final = self._final, ""
        return text

    def flush(self) -> None:
        """No more tokens: release what was held back; an unfinished character becomes one U+FFFD."""
        if not self._ended:
            self._final += self._held + self._decoder.decode(b"", final=True)
            self._held = ""
            self._ended = True

    def _watch(self, text: str, stops: bool) -> bool:
        automaton = self._automaton
        assert automaton is not None
        state, step, match = self._state, automaton.step, automaton.match
        for place, character in enumerate(text):
            state = step(state, character)
            if stops and match[state]:
                seen = self._held + text[: place + 1]
                self._final += seen[: len(seen) - match[state]]
                self._held = ""
                self._ended = self._stopped = True
                return True
        seen = self._held + text
        free = len(seen) - automaton.live[state]
        self._final += seen[:free]
        self._held = seen[free:]
        self._state = state
        return False
