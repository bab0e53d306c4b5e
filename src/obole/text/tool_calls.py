"""Tool calls in the text of an answer, found while it streams in.

The parser is a recursive descent over the text so far that waits (`yield`) wherever it needs a character that has not
come yet; so the cut of the text into pieces cannot change what is found. Text that cannot be a call after all is given
out as it is and never read twice, so that the work is linear in its length.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import TypeVar

from obole.text.json_scan import PLAIN, SCALAR, WHITE, Nesting, past, unescape
from obole.text.tool_formats import ToolFormat

_KEYS = ("name", "arguments", "parameters", "type", "id")
_ARGUMENTS = ("arguments", "parameters")  # models write the one where they were shown the other
_CALL_ID = re.compile(r"[A-Za-z0-9]*")

_T = TypeVar("_T")
_Steps = Generator[None, None, _T]


@dataclass(frozen=True, slots=True)
class TextPart:
    """Ordinary content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call has begun: its place among the calls of the answer, from 0, and the tool's name."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON text of a call's arguments, as the model wrote it."""

    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of a call are complete: an object with all its brackets. A call that breaks off has no end."""

    index: int


Part = TextPart | CallStart | CallArguments | CallEnd


class _NotACall(Exception):
    """What has been read since the last part cannot become a call: it is text."""


class ToolCallParser:
    """Splits the text of one answer into content and calls.

    `names`: the tools that may be called. What looks like a call of something else is content, as are markers in prose
    and JSON that breaks before the name and the beginning of the arguments are known. White space before the first call,
    between calls and after the last is not content. Content and calls come in the order of the text.

    Arguments are passed on as they come and need not be valid JSON beyond balanced brackets and strings; where these
    break, the call is left without a `CallEnd` and the rest is content. Arguments given as a JSON string are decoded,
    absent or null ones become `{}`. Other entries of a call (`type`, `id`) are dropped.

    A call stands behind its marker, anywhere; at the beginning of the answer and after another call, where nothing else
    can be meant, Llama's and Mistral's need none. Only text that may still become a call is held back.
    """

    def __init__(self, format: ToolFormat, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._marker = format.markers[0]
        self._candidate = {
            "hermes": self._hermes,
            "llama3": self._llama3,
            "mistral": self._mistral,
            "mistral-args": self._mistral,
        }[format.name]
        self._text = ""  # what came and is not yet a part
        self._at = 0  # read up to here
        self._mark = 0  # given out up to here
        self._ended = False  # no more text comes
        self._parts: list[Part] = []
        self._calls = 0  # begun so far
        self._streaming = False  # arguments go to the call begun last, not to `_kept`
        self._kept: list[str] = []  # arguments that came before the name
        self._reader = self._read()

    def push(self, text: str) -> list[Part]:
        """Take the next piece of the answer; returns what is certain now."""
        if self._ended:
            raise RuntimeError("text after the end of the answer")
        self._text = self._text[self._mark :] + text
        self._at -= self._mark
        self._mark = 0
        return self._resume()

    def finish(self) -> list[Part]:
        """The answer is over; returns what was held back. An unfinished call keeps what came of its arguments."""
        self._ended = True
        return self._resume()

    def _resume(self) -> list[Part]:
        next(self._reader, None)
        parts, self._parts = self._parts, []
        return parts

    # --- content and calls ---

    def _read(self) -> _Steps[None]:
        gap = True  # nothing but white space since the beginning or the last call
        while True:
            if gap:
                yield from self._skip(WHITE)
            else:
                found = self._text.find(self._marker[0], self._at)
                self._at = found if found >= 0 else len(self._text)
                self._say()
            if not (yield from self._more()):
                if not (gap and self._calls):
                    self._say()
                return
            try:
                gap = yield from self._candidate(gap)
                if not gap:
                    self._at += 1
                    self._say()
            except _NotACall:
                gap = False
                self._kept = []
                self._say()

    def _hermes(self, _gap: bool) -> _Steps[bool]:
        """`<tool_call>`, the call as JSON, `</tool_call>`. Returns False, having read nothing, if no call begins here."""
        if not (yield from self._literal(self._marker)):
            return False
        yield from self._skip(WHITE)
        yield from self._group()
        yield from self._optional("</tool_call>")
        return True

    def _llama3(self, gap: bool) -> _Steps[bool]:
        """`<|python_tag|>` and the call as JSON, or the JSON alone. Returns as `_hermes`."""
        if (yield from self._literal(self._marker)):
            yield from self._skip(WHITE)
        elif not gap or (yield from self._peek()) != "{":
            return False
        yield from self._group()
        return True

    def _mistral(self, gap: bool) -> _Steps[bool]:
        """`[TOOL_CALLS]` and calls as a JSON list, or a name and its arguments; or these alone. Returns as `_hermes`."""
        marked = yield from self._literal(self._marker)
        if marked:
            yield from self._skip(WHITE)
        elif not gap:
            return False
        first = yield from self._peek()
        if first == "[" or (marked and first == "{"):
            yield from self._group()
            return True
        return (yield from self._named(marked))

    def _named(self, marked: bool) -> _Steps[bool]:
        """`name[CALL_ID]id[ARGS]{...}`, where the strings in brackets may be absent. Returns as `_hermes`."""
        name = ""
        while (after := (yield from self._peek())) and _begins(name + after, self._names):
            name += after
            self._at += 1
        if not name and not marked:
            return False
        if name not in self._names:
            raise _NotACall
        if (yield from self._literal("[CALL_ID]")):
            yield from self._skip(_CALL_ID)
        if (yield from self._literal("[ARGS]")) or marked:
            yield from self._skip(WHITE)
        if (yield from self._peek()) != "{":
            raise _NotACall
        self._start(name)
        self._stop(whole=(yield from self._balanced()))
        return True

    # --- calls as JSON objects ---

    def _group(self) -> _Steps[None]:
        """One call or several, with commas, semicolons or white space between them, perhaps in brackets."""
        bracketed = yield from self._take("[")
        yield from self._skip(WHITE)
        yield from self._object()
        while True:
            yield from self._skip(WHITE)
            if (yield from self._take(",;")):
                yield from self._skip(WHITE)
            if (yield from self._peek()) != "{":
                break
            yield from self._object()
        self._back()
        if bracketed:
            yield from self._optional("]")

    def _object(self) -> _Steps[None]:
        """One call: its name and its arguments in either order."""
        yield from self._need("{")
        name: str | None = None
        arguments: bool | None = None  # None: not seen yet; else whether they are complete
        while True:
            yield from self._skip(WHITE)
            if (yield from self._take("}")):
                break
            key = yield from self._word(_KEYS)
            yield from self._skip(WHITE)
            yield from self._need(":")
            yield from self._skip(WHITE)
            if key == "name" and name is None:
                name = yield from self._word(self._names)
            elif key in _ARGUMENTS and arguments is None:
                arguments = yield from self._arguments(name)
            elif key in ("name", *_ARGUMENTS) or not (yield from self._value()):
                raise _NotACall
            if name is not None and arguments is not None:
                yield from self._conclude(name, arguments)
                return
            yield from self._skip(WHITE)
            if not (yield from self._take(",")):
                yield from self._need("}")
                break
        if name is None:
            raise _NotACall
        self._start(name)
        self._put("{}")
        self._stop(whole=True)

    def _conclude(self, name: str, whole: bool) -> _Steps[None]:
        if not self._streaming:
            self._start(name)
        self._stop(whole=whole)
        yield from self._rest()

    def _arguments(self, name: str | None) -> _Steps[bool]:
        """The value of the arguments: streamed if the name is known, else kept. Returns whether it is complete."""
        if (yield from self._literal("null")) or (yield from self._literal('""')):
            if name is not None:
                self._start(name)
            self._put("{}")
            return True
        if (yield from self._peek()) == "{":
            if name is not None:
                self._start(name)
            whole = yield from self._balanced()
        else:
            whole = yield from self._quoted(name)
        if not whole and name is None:
            raise _NotACall
        return whole

    def _balanced(self, keep: bool = True) -> _Steps[bool]:
        """An object or list up to the bracket that closes it. Returns False where it breaks off."""
        nesting = Nesting()
        while (yield from self._more()):
            begin = self._at
            self._at = nesting.scan(self._text, begin)
            if keep:
                self._put(self._text[begin : self._at])
            if nesting.closed or nesting.broken:
                return nesting.closed
        return False

    def _quoted(self, name: str | None) -> _Steps[bool]:
        """Arguments as JSON within a JSON string, decoded. Returns whether it is one whole object."""
        yield from self._need('"')
        nesting, begun, good = Nesting(), False, True
        while (first := (yield from self._peek())) != '"':
            if not first and begun:
                return False
            if first == "\\":
                piece = yield from self._escape()
            else:
                begin, self._at = self._at, past(PLAIN, self._text, self._at)
                piece = self._text[begin : self._at]
            if not begun:
                piece = piece[past(WHITE, piece, 0) :]
                if first and not piece:
                    continue
                if not piece.startswith("{"):
                    raise _NotACall
                begun = True
                if name is not None:
                    self._start(name)
            self._put(piece)
            end = 0 if nesting.closed else nesting.scan(piece, 0)
            good = good and past(WHITE, piece, end) == len(piece)
        self._at += 1
        if not begun:
            raise _NotACall
        return good and nesting.closed

    def _rest(self) -> _Steps[None]:
        """What follows the arguments in their object: entries that mean nothing here, and the brace; or other text."""
        while True:
            yield from self._skip(WHITE)
            if (yield from self._take("}")):
                self._mark = self._at
                return
            good = yield from self._take(",")
            yield from self._skip(WHITE)
            good = good and (yield from self._value())
            yield from self._skip(WHITE)
            good = good and (yield from self._take(":"))
            yield from self._skip(WHITE)
            if not good or not (yield from self._value()):
                break
        if self._ended and self._at == len(self._text):
            self._mark = self._at
        self._back()

    def _value(self) -> _Steps[bool]:
        """Skip one JSON value. Returns False if it breaks off or none is there."""
        first = yield from self._peek()
        if first in ("{", "["):
            return (yield from self._balanced(keep=False))
        if first != '"':
            return (yield from self._skip(SCALAR))
        self._at += 1
        while (yield from self._more()):
            yield from self._skip(PLAIN)
            if (yield from self._take('"')):
                return True
            if (yield from self._take("\\")) and (yield from self._more()):
                self._at += 1
        return False

    def _word(self, options: Collection[str]) -> _Steps[str]:
        """A JSON string that is one of `options`."""
        yield from self._need('"')
        word = ""
        while not (yield from self._take('"')):
            first = yield from self._peek()
            piece = (yield from self._escape()) if first == "\\" else first
            if not piece or not _begins(word + piece, options):
                raise _NotACall
            word += piece
            if first != "\\":
                self._at += 1
        if word not in options:
            raise _NotACall
        return word

    # --- characters ---

    def _more(self) -> _Steps[bool]:
        """Wait for a character at `_at`. Returns False at the end of the answer."""
        while self._at == len(self._text):
            if self._ended:
                return False
            yield
        return True

    def _peek(self) -> _Steps[str]:
        """The next character, not taken; "" at the end of the answer."""
        return self._text[self._at] if (yield from self._more()) else ""

    def _take(self, wanted: str) -> _Steps[bool]:
        """Take the next character if it is one of `wanted`."""
        found = yield from self._peek()
        if not found or found not in wanted:
            return False
        self._at += 1
        return True

    def _need(self, wanted: str) -> _Steps[None]:
        if not (yield from self._take(wanted)):
            raise _NotACall

    def _literal(self, wanted: str) -> _Steps[bool]:
        """Take a string if it is what comes next, or nothing."""
        while True:
            found = self._text[self._at : self._at + len(wanted)]
            if found == wanted:
                self._at += len(wanted)
                return True
            if self._ended or not wanted.startswith(found):
                return False
            yield

    def _skip(self, kind: re.Pattern[str]) -> _Steps[bool]:
        """Take all characters of a kind. Returns whether there were any."""
        found = False
        while True:
            end = past(kind, self._text, self._at)
            found = found or end > self._at
            self._at = end
            if end < len(self._text) or self._ended:
                return found
            yield

    def _optional(self, closing: str) -> _Steps[None]:
        """Drop what closes a group of calls if it comes next, also where the answer ends within it."""
        yield from self._skip(WHITE)
        closed = yield from self._literal(closing)
        if not closed and self._ended and closing.startswith(self._text[self._at :]):
            closed, self._at = True, len(self._text)
        if closed:
            self._mark = self._at
        self._back()

    def _escape(self) -> _Steps[str]:
        """Take one escape of a JSON string and decode it."""
        while (found := unescape(self._text, self._at, ended=self._ended)) is None:
            yield
        piece, self._at = found
        return piece

    def _back(self) -> None:
        """Return to what was given out last."""
        self._at = self._mark

    # --- parts ---

    def _say(self) -> None:
        """Give out all that was read as content."""
        text = self._text[self._mark : self._at]
        self._mark = self._at
        last = self._parts[-1] if self._parts else None
        if isinstance(last, TextPart):
            self._parts[-1] = TextPart(last.text + text)
        elif text:
            self._parts.append(TextPart(text))

    def _start(self, name: str) -> None:
        """What was read is a call."""
        self._mark = self._at
        self._parts.append(CallStart(self._calls, name))
        self._calls += 1
        self._streaming = True
        kept, self._kept = self._kept, []
        for fragment in kept:
            self._put(fragment)

    def _put(self, fragment: str) -> None:
        """Give out a piece of arguments, or keep it until the name is known."""
        if not self._streaming:
            self._kept.append(fragment)
            return
        self._mark = self._at
        index = self._calls - 1
        last = self._parts[-1] if self._parts else None
        if isinstance(last, CallArguments) and last.index == index:
            self._parts[-1] = CallArguments(index, last.fragment + fragment)
        elif fragment:
            self._parts.append(CallArguments(index, fragment))

    def _stop(self, *, whole: bool) -> None:
        """The arguments are over."""
        self._mark = self._at
        self._streaming = False
        if whole:
            self._parts.append(CallEnd(self._calls - 1))


def _begins(beginning: str, options: Collection[str]) -> bool:
    return any(option.startswith(beginning) for option in options)
