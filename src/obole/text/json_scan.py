"""Pieces of JSON read as they come in: where an object ends, and what an escape stands for."""

from __future__ import annotations

import re

WHITE = re.compile(r"[ \t\r\n]*")
PLAIN = re.compile(r'[^"\\]*')  # what may stand in a string as it is; raw control characters are let through
SCALAR = re.compile(r"[0-9A-Za-z_.+-]*")  # numbers, literals, and what models write for them (None, NaN)
_BETWEEN = re.compile(r"[ \t\r\n,:0-9A-Za-z_.+-]*")
_CLOSING = {"{": "}", "[": "]"}
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX = re.compile(r"[0-9a-fA-F]*")
_LOW_HALF = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")


def past(kind: re.Pattern[str], text: str, at: int) -> int:
    """Where a run of characters of a kind that begins at `at` ends; `at` itself if there is none."""
    found = kind.match(text, at)
    return at if found is None else found.end()


class Nesting:
    """Follows the brackets and strings of one JSON object or list through pieces of text, from its first bracket on."""

    __slots__ = ("closed", "broken", "_closers", "_quoted", "_escaped")

    def __init__(self) -> None:
        self.closed = False  # the first bracket is closed
        self.broken = False  # a character that cannot stand there
        self._closers: list[str] = []  # brackets that have to come, innermost last
        self._quoted = False  # within a string
        self._escaped = False  # behind its backslash

    def scan(self, text: str, at: int) -> int:
        """Read on from text[at]; returns the end of the text, or the place behind the object, or of what breaks it."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
            elif self._quoted:
                at = past(PLAIN, text, at)
                if at < len(text):
                    self._escaped = text[at] == "\\"
                    self._quoted = self._escaped
                    at += 1
            else:
                at = past(_BETWEEN, text, at)
                if at < len(text):
                    self._open_or_close(text[at])
                    at += not self.broken
                if self.closed or self.broken:
                    break
        return at

    def _open_or_close(self, character: str) -> None:
        if character == '"':
            self._quoted = True
        elif character in _CLOSING:
            self._closers.append(_CLOSING[character])
        elif self._closers[-1:] == [character]:
            self._closers.pop()
            self.closed = not self._closers
        else:
            self.broken = True


def unescape(text: str, at: int, *, ended: bool) -> tuple[str, int] | None:
    """What the escape whose backslash is text[at] stands for, and where it ends; None if that takes more text.

    Both halves of a surrogate pair count as one escape. A half alone, and what is no escape of JSON, stands for itself
    as it is written. `ended`: no more text comes; an escape that is cut off stands for nothing.
    """
    kind = text[at + 1 : at + 2]
    digits = text[at + 2 : at + 6]
    if not kind or (kind == "u" and len(digits) < 4 and _HEX.fullmatch(digits)):
        return ("", len(text)) if ended else None
    if kind != "u":
        return _ESCAPES.get(kind, "\\" + kind), at + 2
    if not _HEX.fullmatch(digits):
        return "\\u", at + 2
    unit = int(digits, 16)
    if not 0xD800 <= unit < 0xE000:
        return chr(unit), at + 6
    low = text[at + 6 : at + 12]
    if unit < 0xDC00 and _LOW_HALF.fullmatch(low):
        return chr(0x10000 + ((unit - 0xD800) << 10) + int(low[2:], 16) - 0xDC00), at + 12
    if unit < 0xDC00 and len(low) < 6 and "\\u".startswith(low[:2]) and _HEX.fullmatch(low[2:]):
        return ("", len(text)) if ended else None
    return text[at : at + 6], at + 6
