"""Text to token ids and back, on top of the `tokenizers` library.

Plain text never becomes control tokens: only `encode(..., special=True)`, meant for whole prompts written by whoever
runs the engine, and the template's own markers do.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

from obole.errors import InvalidRequest
from obole.text.added_tokens import AddedToken, AddedTokenMatcher

SPACE_MARK = "\u2581"  # SentencePiece's visible space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The characters in which a byte-level vocabulary writes the 256 bytes (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF = byte_alphabet()


class Tokenizer:
    """A vocabulary and the rules that cut text into it. Safe to use from several threads.

    `backend` does the cutting and knows every id below; `added` lists its added tokens. `byte_level` says how tokens
    spell bytes: GPT-2's alphabet, or SentencePiece's (a mark for the space, `<0x..>` for single bytes). `strip_space`:
    encoding puts a space before the text, so decoding takes one away. `silent` ids exist but stand for nothing
    (padding of the vocabulary). `end_ids`: tokens that end a turn or a document. `mask_id`: a token that no text becomes, not
    even that of a whole prompt: its own is plain text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        added: Sequence[AddedToken],
        vocab_size: int,
        byte_level: bool,
        bos_id: int | None = None,
        eos_id: int | None = None,
        unk_id: int | None = None,
        pad_id: int | None = None,
        add_bos: bool = False,
        strip_space: bool = False,
        end_ids: Iterable[int] = (),
        silent: Iterable[int] = (),
        later_pre_tokenizer: Any = None,
        mask_id: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.unk_id = unk_id
        self.pad_id = pad_id
        self.add_bos = add_bos and bos_id is not None
        self.strip_space = strip_space
        self.added: tuple[AddedToken, ...] = tuple(added)
        self.special_ids: frozenset[int] = frozenset(token.id for token in added if token.control)
        self.end_ids: frozenset[int] = frozenset(end_ids) | (frozenset() if eos_id is None else {eos_id})
        self._backend = backend
        self._lock = threading.Lock()  # the backend's switch for control tokens is part of its state
        self._added_text = {token.id: token.text for token in added}
        self._matcher = AddedTokenMatcher(added)
        self._byte_level = byte_level
        self._mute = self.special_ids | frozenset(silent)
        self._forbidden = self.special_ids - {unk_id}  # ids that plain text must not yield
        self._later_pre_tokenizer = later_pre_tokenizer  # for text that is not the first; None: the same as for the first
        self._bytes: dict[int, bytes] = {}
        self._mask = None if mask_id is None else self.token_text(mask_id)

    # --- text to ids ---

    def encode(self, text: str, *, special: bool, bos: bool = False) -> list[int]:
        """Token ids of a text.

        `special`: the text of a control token becomes that token; otherwise it is plain text. `bos`: put the
        beginning-of-sequence token first, if the model wants one and it is not there already.
        Raises `InvalidRequest` for text that is not Unicode (lone surrogates).
        """
        check_text(text, "prompt")
        if special and self._mask and self._mask in text:
            parts = re.split(f"({re.escape(self._mask)})", text)
            ids = self.encode_pieces([(part, part == self._mask) for part in parts])
        else:
            ids = self._encode(text, special)
        return self.with_bos(ids) if bos else ids

    def _encode(self, text: str, special: bool) -> list[int]:
        with self._lock:
            self._backend.encode_special_tokens = not special
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if not special:
            self._check_plain(ids)
        return ids

    def encode_pieces(self, pieces: Sequence[tuple[str, bool]]) -> list[int]:
        """Token ids of a text in pieces (text, literal): added tokens are matched within pieces that are not literal.

        All between two matches, literal or not, is cut into tokens as one text, without any added token.
        """
        ids: list[int] = []
        plain = ""
        for text, literal in pieces:
            check_text(text, "messages")
            done = 0
            for start, end, token in () if literal else self._matcher.find(text):
                plain += text[done:start]
                ids += self._encode_bare(plain, not ids)
                ids.append(token.id)
                plain, done = "", end
            plain += text[done:]
        return ids + self._encode_bare(plain, not ids)

    def with_bos(self, ids: list[int]) -> list[int]:
        """The ids with the beginning-of-sequence token in front, if the model wants one and it is not there."""
        if not self.add_bos or self.bos_id is None or ids[:1] == [self.bos_id]:
            return ids
        return [self.bos_id, *ids]

    def _encode_bare(self, text: str, first: bool) -> list[int]:
        """The backend's pipeline without its added tokens."""
        if not text:
            return []
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        splitter = self._backend.pre_tokenizer
        if not first and self._later_pre_tokenizer is not None:
            splitter = self._later_pre_tokenizer
        words = [text] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(text)]
        ids = [token.id for word in words for token in self._backend.model.tokenize(word)]
        self._check_plain(ids)
        return ids

    def _check_plain(self, ids: list[int]) -> None:
        if not self._forbidden.isdisjoint(ids):
            name = next(self.token_text(i) for i in ids if i in self._forbidden)
            raise InvalidRequest(
                "prompt", f"The vocabulary turns plain text into the control token {name!r}: remove that text."
            )

    def to_json(self) -> str:
        """The rules and the vocabulary as the text of a `tokenizer.json`."""
        text: str = self._backend.to_str()
        return text

    # --- ids to text ---

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; none for control tokens and for ids that stand for nothing."""
        known = self._bytes.get(token_id)
        if known is None:
            known = b"" if token_id in self._mute else self._spell(token_id)
            self._bytes[token_id] = known
        return known

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of some tokens. Bytes that are not UTF-8 become U+FFFD, one for each maximal ill-formed part."""
        spell = self.token_bytes if skip_special else self._spell
        text = b"".join(map(spell, ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strip_space else text

    def _spell(self, token_id: int) -> bytes:
        text = self.token_text(token_id)
        if text is None:
            return b""
        if not self._byte_level:
            byte = _BYTE_TOKEN.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.replace(SPACE_MARK, " ").encode("utf-8")
        if token_id not in self._added_text:
            spelled = [_BYTE_OF.get(character) for character in text]
            if None not in spelled:
                return bytes(byte for byte in spelled if byte is not None)
        return text.encode("utf-8")

    def token_text(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None if there is no such id."""
        if not 0 <= token_id < self.vocab_size:
            return None
        added = self._added_text.get(token_id)
        return self._backend.id_to_token(token_id) if added is None else added

    def id_of(self, token_text: str) -> int | None:
        """The id of a token as the vocabulary spells it; None if there is no such token."""
        found: int | None = self._backend.token_to_id(token_text)
        return found


def check_text(text: object, field: str) -> None:
    """Raise `InvalidRequest` unless it is a string of Unicode characters."""
    if not isinstance(text, str):
        raise InvalidRequest(field, f"{field} must be text, not {type(text).__name__}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"a lone surrogate (U+{ord(text[error.start]):04X}) at position {error.start}"
        raise InvalidRequest(field, f"{field} holds half a character, {found}: send valid Unicode.") from None
