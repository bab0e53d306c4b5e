"""Vocabularies as `llguidance` wants them, and the limits under which it works."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

from obole.errors import InvalidRequest

if TYPE_CHECKING:
    from obole.text.tokenizer import Tokenizer

LONGEST = 1000  # bytes of a token; the tree that llguidance keeps tokens in takes hardly more


def parser_limits() -> LLParserLimits:
    """What a grammar may cost.

    Fuel counts the expressions that a step builds (14,000 to 50,000 a millisecond), items those of the Earley parser (20,000 a
    millisecond); a state of the lexer takes one or two kilobytes and stays as long as its grammar.
    """
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2_000,
        max_lexer_states=100_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


class _Words(TokenizerWrapper):
    """What `LLTokenizer` asks of a tokenizer: `tokens[i]` are the bytes of token i, none if it must never be chosen.

    The call, which cuts a text, is up to those below.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokens: Sequence[bytes], eos: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos
        self.bos_token_id = None
        self.special_token_ids = ()


class _ModelWords(_Words):
    """The words of a model, cut by the model's own tokenizer wherever that gives the text back byte for byte.

    Where it does not (a text that it normalises, the text of a control token), the longest token that fits comes next.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[bytes], eos: int) -> None:
        super().__init__(tokens, eos)
        self._tokenizer = tokenizer
        marks = sorted(tokenizer.special_ids) if tokenizer.strip_space else []
        self._mark = next(filter(None, map(tokenizer.token_text, marks)), None)

    def __call__(self, text: str) -> list[int]:
        try:
            ids = self._cut(text)
        except InvalidRequest:  # the vocabulary turns this text into a control token
            ids = []
        wanted = text.encode()
        spelled = b"".join(self.tokens[i] if i < len(self.tokens) else b"" for i in ids)
        return ids if spelled == wanted else list(self._longest_first(wanted))

    def _cut(self, text: str) -> list[int]:
        if self._mark is None:
            return self._tokenizer.encode(text, special=False)
        # an answer follows a prompt, so its first word does not get the space that goes before the first word of a text
        return self._tokenizer.encode_pieces([(self._mark, False), (text, True)])[1:]

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {spelled: i for i, spelled in enumerate(self.tokens) if spelled}

    def _longest_first(self, text: bytes) -> Iterator[int]:
        place = 0
        while place < len(text):
            sizes = range(min(LONGEST, len(text) - place), 0, -1)
            size = next(n for n in sizes if text[place : place + n] in self._ids)
            yield self._ids[text[place : place + size]]
            place += size


class _ByteWords(_Words):
    """One token for each byte, after `base` other ids."""

    def __init__(self, tokens: Sequence[bytes], base: int) -> None:
        super().__init__([*tokens, *(bytes([byte]) for byte in range(256)), b""], base + 256)
        self._base = base

    def __call__(self, text: str) -> list[int]:
        return [self._base + byte for byte in text.encode()]


def special_names(tokenizer: Tokenizer, end_ids: frozenset[int], vocab_size: int) -> dict[int, str]:
    """The control tokens that a Lark grammar may name, as in `<|python_tag|>`: all but those that end the answer."""
    ids = (i for i in tokenizer.special_ids - end_ids if i < vocab_size)
    return {i: name for i in ids if (name := tokenizer.token_text(i)) and name.startswith("<") and name.endswith(">")}


def model_vocabulary(tokenizer: Tokenizer, end_ids: frozenset[int], vocab_size: int) -> LLTokenizer:
    """The vocabulary of a model with logits for `vocab_size` tokens.

    Token `vocab_size` stands for all ends of sequence, and those after it for the bytes that no token of the model spells, so
    that every text can be cut. Tokens that end the answer, that stand for nothing or that the tokenizer does not know
    have no bytes, so that no grammar allows them.
    """
    known = min(vocab_size, tokenizer.vocab_size)
    tokens = [b"" if i in end_ids else tokenizer.token_bytes(i) for i in range(known)]
    tokens = [spelled if len(spelled) <= LONGEST else b"" for spelled in tokens] + [b""] * (vocab_size + 1 - known)
    single = {spelled for spelled in tokens if len(spelled) == 1}
    tokens += [spelled for byte in range(256) if (spelled := bytes([byte])) not in single]
    return LLTokenizer(_named(_ModelWords(tokenizer, tokens, vocab_size), special_names(tokenizer, end_ids, vocab_size)))


def byte_vocabulary(names: Mapping[int, str], vocab_size: int) -> LLTokenizer:
    """A stand-in for the vocabulary of a model: of its tokens only those with names, then the 256 bytes, then the end.

    Byte b is token `vocab_size + b`. What a grammar takes hardly depends on the vocabulary.
    """
    return LLTokenizer(_named(_ByteWords([b""] * vocab_size, vocab_size), names))


def _named(words: _Words, names: Mapping[int, str]) -> _Words:
    marked = list(words.tokens)
    for i, name in names.items():
        marked[i] = b"\xff" + name.encode()  # llguidance's mark of a special token: no UTF-8 holds this byte
    words.tokens = marked
    return words
