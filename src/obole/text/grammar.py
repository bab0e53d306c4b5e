"""Structured output: grammars that say, token by token, what may come next.

The grammars are those of `llguidance` (an Earley parser over a lexer of regular-expression derivatives): JSON schemas, regular
expressions and its dialect of Lark. A grammar works on bytes, so any tokenizer will do.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Never

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from llguidance import LLMatcher, LLTokenizer

from obole.errors import InvalidRequest
from obole.text.grammar_schema import strict_schema
from obole.text.grammar_vocabulary import model_vocabulary, parser_limits, special_names
from obole.text.line_process import LineProcess, ProcessEndedError
from obole.text.tokenizer import check_text

if TYPE_CHECKING:
    from obole.text.tokenizer import Tokenizer

KINDS = ("json_schema", "json_object", "regex", "lark")
_FIELD = "response_format"
_TEXT_BYTES = 256 << 10
_SECONDS = 3.0  # of processor time in which a grammar must compile
_QUICK = 0.5  # a grammar that compiled within this is worth compiling again
_KEPT, _KEPT_BYTES = 64, 256 << 20  # compiled grammars
_FORCED = 256  # tokens told at once
_UNSPELLABLE = "The grammar asks for a text that the model's vocabulary cannot write."
_TEMPERATURE = re.compile(r"\[[^]\n]*\btemperature\s*=")


class GrammarCompiler:
    """Compiles grammars for one vocabulary, and keeps the last ones. Safe to use from several threads.

    `end_ids`: tokens that end an answer; `vocab_size`: how many tokens the model has logits for. The first grammar takes
    the time to read the vocabulary (0.2 s for 50,000 tokens, 1 s for 260,000) and to start the process that tries grammars:
    there are small ones on which llguidance runs for minutes, takes all memory, or overflows the stack, which ends a process.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: frozenset[int], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._words: LLTokenizer | None = None
        self._kept: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        names = special_names(tokenizer, end_ids, vocab_size)
        self._trial = LineProcess(
            "obole.text.grammar_worker",
            "grammars",
            seconds=_SECONDS,
            patience=3 * _SECONDS,  # on the clock, of a machine that has other things to do
            hello={"vocab_size": vocab_size, "names": names},
        )

    def compile(self, kind: str, text: str) -> CompiledGrammar:
        """A grammar of a kind in `KINDS` (the text of a "json_object" is empty).

        Takes at most `_SECONDS` of processor time for the trial and about as much again for the vocabulary at hand, during
        which other threads run, and 192 MiB. Raises `InvalidRequest` (field "response_format") for grammars that are
        malformed, need more than that, allow no text, or that cannot be enforced in full.
        """
        if kind not in KINDS:
            raise InvalidRequest(_FIELD, f"There is no kind of grammar {kind!r}: use one of {', '.join(KINDS)}.")
        check_text(text, _FIELD)
        if len(text.encode()) > _TEXT_BYTES:
            raise InvalidRequest(_FIELD, f"A grammar may have {_TEXT_BYTES} bytes; this one has {len(text.encode())}.")
        key = blake3(f"{kind}\0{text}".encode()).digest()
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        grammar = _source(kind, text)
        try:
            trial = self._trial.ask({"grammar": grammar})
        except ProcessEndedError as ended:
            slow = f"it took more than {_SECONDS:g} seconds"
            problem = slow if ended.slow else "it is nested too deeply or needed too much memory"
            raise InvalidRequest(_FIELD, f"The grammar cannot be compiled: {problem}; make it simpler.") from None
        if "error" in trial:
            _refuse(trial["error"])
        made = CompiledGrammar(
            self._vocabulary(), grammar, self._end_ids, self._vocab_size, size=trial["bytes"], seconds=trial["seconds"]
        )
        with self._lock:
            self._kept[key] = made
            while len(self._kept) > _KEPT or sum(one.bytes for one in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)
        return made

    def close(self) -> None:
        """End the process that tries grammars; the next new grammar starts another."""
        self._trial.close()

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._words is None:
                self._words = model_vocabulary(self._tokenizer, self._end_ids, self._vocab_size)
            return self._words


class CompiledGrammar:
    """A grammar and a vocabulary, ready for any number of sequences. `bytes`: about what it takes in memory.

    Its sequences share what the lexer has found out so far, which is why masks get faster with use.
    """

    def __init__(
        self, vocabulary: LLTokenizer, grammar: str, end_ids: frozenset[int], vocab_size: int, size: int, seconds: float
    ) -> None:
        self.bytes = size
        self.end_ids = frozenset(i for i in end_ids if i < vocab_size)
        self.vocab_size = vocab_size
        self.words = -(-vocabulary.vocab_size // 32)
        self._ends = self.end_ids | {vocab_size}
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._quick = seconds < _QUICK
        self._root = self._build()
        self._opening = self.forced(self._root)
        first = self.start()
        first.allowed()  # a grammar with no way to start is refused here, and the lexer warms up
        if first.over:
            raise InvalidRequest(_FIELD, "The grammar allows nothing but the empty text.")

    def start(self) -> GrammarState:
        """The state of a sequence with nothing chosen yet."""
        return GrammarState(self, self._root.deep_copy(), self._opening)

    def afresh(self) -> LLMatcher | None:
        """A matcher at the start that shares nothing with those before; None if compiling again takes too long."""
        if not self._quick:
            return None
        self._root = self._build()
        return self._root.deep_copy()

    def forced(self, matcher: LLMatcher) -> list[int]:
        """The tokens that must come next, as far as they are known."""
        tokens: list[int] = matcher.compute_ff_tokens()
        if any(token > self.vocab_size for token in tokens):
            raise InvalidRequest(_FIELD, _UNSPELLABLE)
        if not self._ends.isdisjoint(tokens):
            raise InvalidRequest(_FIELD, "The grammar names a token that ends the answer: leave it out.")
        return tokens

    def _build(self) -> LLMatcher:
        made = LLMatcher(self._vocabulary, self._grammar, log_level=0, limits=parser_limits())
        made.consume_tokens([])  # finds out whether the start is the end
        if made.is_error():
            _refuse(made.get_error())
        return made


class GrammarState:
    """Where one sequence stands in a grammar (a `Constraint`). For one thread at a time.

    Text that must come next is cut into tokens as the model's tokenizer cuts it, except for a last part that could be cut
    otherwise together with what may follow. As long as such tokens are due, the next one is the only one allowed: what may
    come next is a function of what came before, whether anybody asks for `forced` or not.

    Raises `InvalidRequest` (field "response_format") from any method when following the grammar exceeds the limits.
    """

    def __init__(self, grammar: CompiledGrammar, matcher: LLMatcher, opening: list[int]) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._taken: list[int] = []
        self._forced = opening  # tokens that must come next, from `_place` on
        self._place = 0
        self._settled = True  # whether `_forced` is up to date
        self._ended = False
        self._words = np.zeros(grammar.words, np.uint32)
        self._mask = self._words[: -(-grammar.vocab_size // 32)]
        self._address = (self._words.ctypes.data, self._words.nbytes)

    def allowed(self) -> npt.NDArray[np.uint32]:
        """The tokens that may come next, (ceil(vocab_size / 32),): bit i of word i // 32. Good until the next call.

        Ends of sequence are among them exactly where the grammar may end.
        """
        if self._due():
            self._words.fill(0)
            token = self._forced[self._place]
            self._words[token >> 5] = 1 << (token & 31)
            return self._mask
        self._matcher.unsafe_compute_mask_ptr(*self._address)
        if self._matcher.is_error():
            self._recover()
            self._matcher.unsafe_compute_mask_ptr(*self._address)
            self._check()
        self._trim()
        return self._mask

    def accept(self, token_id: int) -> None:
        """The token was chosen. Raises `ValueError` if it was not allowed."""
        if self._due():
            if token_id != self._forced[self._place]:
                raise ValueError(f"token {token_id} is not allowed: token {self._forced[self._place]} must come next")
        elif token_id in self._grammar.end_ids:
            if self._ended or not self._matcher.is_accepting():
                raise ValueError(f"token {token_id} is not allowed: the grammar may not end here")
            self._ended = True
            return
        if not self._consume(token_id):
            raise ValueError(f"token {token_id} is not allowed by the grammar")
        self._taken.append(token_id)
        self._place += 1
        self._settled = self._place < len(self._forced)

    def forced(self) -> list[int]:
        """Tokens that must come next, one after the other; there may be more after them."""
        return self._forced[self._place : self._place + _FORCED] if self._due() else []

    @property
    def over(self) -> bool:
        """Whether nothing may follow."""
        return self._ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    def _due(self) -> bool:
        """Whether a forced token is due; asks for them if that is not known."""
        if not self._settled:
            forced = self._grammar.forced(self._matcher)
            if self._matcher.is_error():
                self._recover()
                forced = self._grammar.forced(self._matcher)
                self._check()
            self._forced, self._place, self._settled = forced, 0, True
        return self._place < len(self._forced)

    def _trim(self) -> None:
        """Take llguidance's own tokens out of the mask: its end of sequence, which stands for ours, and unspelled bytes."""
        size, words = self._grammar.vocab_size, self._words
        first = size >> 5
        own = int.from_bytes(words[first:].astype("<u4").tobytes(), "little") >> (size & 31)
        words[first] &= np.uint32((1 << (size & 31)) - 1)
        words[first + 1 :] = 0
        for i in self._grammar.end_ids:
            bit = np.uint32(1 << (i & 31))
            words[i >> 5] = words[i >> 5] | bit if own & 1 else words[i >> 5] & ~bit
        if own and not self._mask.any():
            raise InvalidRequest(_FIELD, _UNSPELLABLE)

    def _consume(self, token_id: int) -> bool:
        consumed = self._matcher.try_consume_tokens([token_id])
        if self._matcher.is_error():
            self._recover()
            consumed = self._matcher.try_consume_tokens([token_id])
            self._check()
        return bool(consumed)

    def _recover(self) -> None:
        """Come here once more with a lexer of its own: the shared one, once it has met a limit, is of no use to anyone."""
        fresh = self._grammar.afresh()
        if fresh is not None and fresh.consume_tokens(self._taken):
            self._matcher = fresh
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            problem = _problem(self._matcher.get_error())
            where = f"after {len(self._taken)} tokens"
            raise InvalidRequest(_FIELD, f"The grammar cannot be followed {where}: {problem}.")


def _source(kind: str, text: str) -> str:
    """A grammar as llguidance takes it."""
    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(text))
    if kind == "lark":
        if _TEMPERATURE.search(text):
            raise InvalidRequest(_FIELD, "A grammar cannot set the temperature: set that of the request.")
        return json.dumps({"grammars": [{"lark_grammar": text}]})
    if kind == "json_object" and text:
        raise InvalidRequest(_FIELD, "A json_object has no text: use json_schema to say more about it.")
    return json.dumps({"grammars": [{"json_schema": strict_schema(text or '{"type": "object"}')}]})


def _refuse(error: str) -> Never:
    raise InvalidRequest(_FIELD, f"The grammar cannot be compiled: {_problem(error)}.")


def _problem(error: str) -> str:
    """What llguidance says is wrong, as half a sentence."""
    if error.startswith("NoExtension"):
        return "no text can follow"
    if "oneOf constraints are not supported" in error:
        return "options of oneOf may hold together, which cannot be ruled out: use anyOf"
    if error.startswith("panic"):
        return "llguidance failed on it"
    lines = [line.strip() for line in error.splitlines()] or [""]
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return told.rstrip(".")[:300]
