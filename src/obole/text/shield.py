"""Keeps what callers write apart from what the template writes, so that control tokens come from the template alone.

A token can come into being in three ways that involve a caller's text, and each is stopped before rendering:

- it stands in the text: it is hidden as a whole;
- it begins in the text and is completed by other text, or what lay between its parts is cut out: the character that it would
  begin with is hidden, whatever follows. Left alone are the places where a string that the template has begins (such as
  `<think>`, which templates look for), and where a token stands that is not to be hidden;
- the template begins it and a caller's text comes next, as in `<|{{ message.role }}|>`: text that would go on with a token
  is hidden, except the names of roles and what the template quotes itself, which it must be able to compare.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from obole.text.added_tokens import AddedToken, AddedTokenMatcher

ROLES = frozenset({"system", "user", "assistant", "tool", "developer", "function", "ipython", "model", "observation"})
_RUN = re.compile(r"[^'\"\\{}\n]*")  # a string of a template, as far as its end or what it may spell otherwise
_OPEN_END = r"(?=\s*['\"{%])"  # the template's own text ends here, or a format takes something in


class Hazards:
    """What must be hidden from one template: `tokens`, and whatever could become one of them. `added`: all added tokens."""

    def __init__(self, source: str, tokens: Sequence[AddedToken], added: Iterable[AddedToken]) -> None:
        texts = [token.text for token in tokens if token.text]
        hidden = set(texts)
        self._source = source
        self._tokens = AddedTokenMatcher(tokens)
        self._others = AddedTokenMatcher(token for token in added if token.text not in hidden)
        firsts = sorted({text[0] for text in texts if not text[0].isalnum() and not text[0].isspace()})
        firsts = [first for first in firsts if not _looked_for(first, source)]
        self._first = re.compile("[" + re.escape("".join(firsts)) + "]") if firsts else None
        self._strings: dict[str, set[str]] = {}  # what the template may look for, by first character
        prefixes = {text[:cut] for text in texts for cut in range(1, len(text) + 1)}
        for found in self._first.finditer(source) if self._first else ():
            string = _RUN.match(source, found.start())
            if string is not None and len(string[0]) > 1 and string[0] not in prefixes:
                self._strings.setdefault(found[0], set()).add(string[0])
        self._rests = _rests(source, texts)

    def spans(self, text: str, *, name: bool = False, role: bool = False) -> list[tuple[int, int]]:
        """The places (start, end) to hide, in order. `name`: the text is a key; `role`: it is the role of a message."""
        spans = []
        for start, end, token in self._tokens.find(text):
            at = text.index(token.text, start, end)  # without the white space that the token would swallow
            spans.append((at, at + len(token.text)))
        rest = None if self._known(text, name, role) else self._continuation(text)
        if rest is not None:
            spans.append(rest)
        if self._first is not None:
            kept = [(start, end) for start, end, _ in self._others.find(text)]
            firsts = [found.start() for found in self._first.finditer(text)]
            spans += [(at, at + 1) for at in _outside(firsts, kept) if not self._string_at(text, at)]
        return _merged(spans)

    def _string_at(self, text: str, at: int) -> bool:
        return any(text.startswith(string, at) for string in self._strings.get(text[at], ()))

    def _continuation(self, text: str) -> tuple[int, int] | None:
        """The beginning of a text that would go on with a token which the template began."""
        if not self._rests:
            return None
        bare = text.strip()
        lower, start = bare.lower(), text.find(bare)
        for rest in self._rests:
            if lower and (lower.startswith(rest) or rest.startswith(lower)):
                return start, start + min(len(rest), len(bare))
        return None

    def _known(self, text: str, name: bool, role: bool) -> bool:
        """Whether the template must be able to tell this text."""
        if role and text in ROLES:
            return True
        if name:  # message.key, message['key'], map(attribute='key.key')
            return re.search(rf"['\".]{re.escape(text)}(?!\w)", self._source) is not None
        return f"'{text}'" in self._source or f'"{text}"' in self._source


def _looked_for(first: str, source: str) -> bool:
    """Whether the template compares with, or cuts text at, this character alone."""
    quoted = rf"(?:'{re.escape(first)}'|\"{re.escape(first)}\")"
    return re.search(rf"(?:\(|[=!]=)\s*{quoted}|{quoted}\s+(?:not\s+)?in\b", source) is not None


def _rests(source: str, texts: Sequence[str]) -> tuple[str, ...]:
    """What is missing of the tokens that the template begins but leaves to others to complete; longest first."""
    rests: set[str] = set()
    open_ends: dict[str, bool] = {}
    for text in texts:
        for cut in range(1, len(text)):
            begun = text[:cut]
            if begun not in source:
                break
            if begun not in open_ends:
                open_ends[begun] = re.search(re.escape(begun) + _OPEN_END, source) is not None
            if open_ends[begun]:
                rests.add(text[cut:].lower())
    return tuple(sorted(rests, key=lambda rest: (-len(rest), rest)))


def _outside(places: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    """The places that lie in none of the spans; both are in order."""
    found, n = [], 0
    for place in places:
        while n < len(spans) and spans[n][1] <= place:
            n += 1
        if n == len(spans) or place < spans[n][0]:
            found.append(place)
    return found


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, those that overlap made one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def made_by_template(token: str, source: str, roles: frozenset[str]) -> bool:
    """Whether a token is written in a template, or put together from at most three of its strings and names of roles."""

    def splits(text: str, parts: int) -> bool:
        if not text or not parts:
            return not text
        return any(
            (text[:end] in source or text[:end].lower() in roles) and splits(text[end:], parts - 1)
            for end in range(len(text), 0, -1)
        )

    return splits(token, 3)


class Shield:
    """Replaces text by placeholders, and finds them again in what was rendered.

    Placeholders are digits, which survive what templates do to text (trimming, case, JSON), and start with a number
    drawn for each use, which nobody can know beforehand.
    """

    def __init__(self) -> None:
        self._prefix = str(10**23 + secrets.randbelow(9 * 10**23))
        self._pattern = re.compile(self._prefix + r"(\d{8})")
        self._hidden: list[str] = []
        self._index: dict[str, int] = {}

    def hide(self, value: Any, hazards: Hazards) -> Any:
        """A copy of JSON-like data in which no string, key or value, has anything to do with a token."""
        if isinstance(value, str):
            return self._hide_text(value, hazards.spans(value))
        if isinstance(value, dict):
            return {
                self._hide_text(key, hazards.spans(key, name=True)): self.hide(item, hazards) for key, item in value.items()
            }
        if isinstance(value, list):
            return [self.hide(item, hazards) for item in value]
        return value

    def hide_message(self, message: dict[str, Any], hazards: Hazards) -> dict[str, Any]:
        """A message, whose role the template must be able to tell from others."""
        role = message["role"]
        hidden: dict[str, Any] = self.hide({key: item for key, item in message.items() if key != "role"}, hazards)
        return {"role": self._hide_text(role, hazards.spans(role, role=True)), **hidden}

    def pieces(self, rendered: str) -> list[tuple[str, bool]]:
        """The rendered text in pieces (text, whether it was hidden), every placeholder replaced by what it hid."""
        found: list[tuple[str, bool]] = []
        for place, text in enumerate(self._pattern.split(rendered)):
            if place % 2 == 0:
                found.append((text, False))
            else:
                found.append((self._hidden[int(text)] if int(text) < len(self._hidden) else "", True))
        return found

    def _hide_text(self, text: str, spans: Sequence[tuple[int, int]]) -> str:
        parts, done = [], 0
        for start, end in spans:
            parts += [text[done:start], self._placeholder(text[start:end])]
            done = end
        return "".join([*parts, text[done:]])

    def _placeholder(self, text: str) -> str:
        if text not in self._index:
            self._index[text] = len(self._hidden)
            self._hidden.append(text)
        return f"{self._prefix}{self._index[text]:08d}"
