"""Added tokens: whole strings with an id of their own, and where they stand in a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A string that is one token wherever it is matched.

    `control` tokens (`<|im_start|>`, `</s>`) structure a prompt: plain text never yields them and answers do not show
    them. The others (`<tool_call>`, runs of newlines in Gemma) are matched in plain text as well.
    `lstrip`/`rstrip`: the token swallows white space beside it; `single_word`: not inside a word.
    """

    id: int
    text: str
    control: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class AddedTokenMatcher:
    """Finds added tokens in a text: leftmost first, and the longest of those that start at one place."""

    def __init__(self, tokens: Iterable[AddedToken]) -> None:
        self._tokens: dict[str, AddedToken] = {}
        self._lengths: dict[str, tuple[int, ...]] = {}  # first character -> lengths of the tokens, longest first
        lengths: dict[str, set[int]] = {}
        for token in tokens:
            if token.text:
                self._tokens[token.text] = token
                lengths.setdefault(token.text[0], set()).add(len(token.text))
        self._lengths = {first: tuple(sorted(found, reverse=True)) for first, found in lengths.items()}

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def find(self, text: str) -> Iterator[tuple[int, int, AddedToken]]:
        """Yield (start, end, token) in order, white space swallowed by the token included; the spans do not overlap."""
        done = 0
        for place in self._candidates(text):
            if place < done:
                continue
            for length in self._lengths[text[place]]:
                start, end = place, place + length
                token = self._tokens.get(text[start:end]) if end <= len(text) else None
                if token is None or (token.single_word and _inside_word(text, start, end)):
                    continue
                if token.lstrip:
                    start = done + len(text[done:place].rstrip())
                if token.rstrip:
                    end = len(text) - len(text[end:].lstrip())
                yield start, end, token
                done = end
                break

    def _candidates(self, text: str) -> list[int]:
        """Places where a token may start, in order."""
        places: list[int] = []
        for first in self._lengths:
            place = text.find(first)
            while place >= 0:
                places.append(place)
                place = text.find(first, place + 1)
        places.sort()
        return places


def _inside_word(text: str, start: int, end: int) -> bool:
    before, after = text[start - 1 : start], text[end : end + 1]
    return bool((before and (before.isalnum() or before == "_")) or (after and (after.isalnum() or after == "_")))
