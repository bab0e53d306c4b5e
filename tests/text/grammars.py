"""Random ways through grammars, and schemas to try them on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from obole.errors import InvalidRequest
from obole.text.grammar import GrammarCompiler, GrammarState
from obole.text.tokenizer import Tokenizer

MORE_ROWS = 37  # rows of logits that the tokenizer knows nothing of

SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["b"]},
    "closed": {"type": "object", "properties": {"a": {"type": "null"}, "é": {}}, "additionalProperties": False},
    "map": {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 3},
    "names": {"type": "object", "patternProperties": {"^x-[a-z]+$": {"type": "integer"}}, "additionalProperties": False},
    "array": {"type": "array", "items": {"type": "array", "items": {"enum": ["x", 1, None]}, "maxItems": 3}, "minItems": 2},
    "tuple": {"type": "array", "prefixItems": [{"type": "string", "maxLength": 3}, {"const": [1, {"a": 2}]}], "items": False},
    "enum": {"enum": ["red", "redder", "reddest", "\u65e5\u672c", 'quote " and \\', 3.25, True, None, {"a": []}]},
    "const": {"const": {"deep": [1, "two", {"three": None}]}},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2,4}-\\d{3}(x|y)?$"},
    "search": {"type": "string", "pattern": "b+a", "maxLength": 20},
    "length": {"type": "string", "minLength": 3, "maxLength": 9},
    "integers": {"type": "integer", "minimum": -17, "exclusiveMaximum": 1203},
    "numbers": {"type": "number", "exclusiveMinimum": -0.5, "maximum": 12.75},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 10_000},
    "int64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "any of": {"anyOf": [{"type": "integer"}, {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]}]},
    "all of": {"allOf": [{"type": "string", "minLength": 2}, {"pattern": "^[ab]*$", "maxLength": 6}]},
    "types": {"type": ["string", "null", "array"], "items": {"type": "boolean"}, "maxLength": 4, "maxItems": 2},
    "nested": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"$ref": "#/$defs/leaf"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            },
            "leaf": {"type": "string", "enum": ["l", "r"]},
        },
        "$ref": "#/$defs/node",
    },
    "union": {
        "$defs": {
            "cat": {
                "type": "object",
                "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
                "required": ["kind"],
            },
            "dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]},
        },
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
    },
    "ipv4": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
    "email": {"type": "string", "format": "email", "maxLength": 30},
    "date": {"type": "string", "format": "date"},
}


def bits(mask: np.ndarray) -> list[int]:
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


class Walker:
    """Random answers: each token is any of those allowed, but those that close something come often enough."""

    def __init__(self, tokenizer: Tokenizer, *, ask: bool = True) -> None:
        spelled = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.tokenizer = tokenizer
        self.ask = ask
        self.ends = np.zeros(len(spelled), bool)
        self.ends[list(tokenizer.end_ids)] = True
        self.silent = ~self.ends & ~np.array(list(map(bool, spelled)))
        self.closing = np.array([text == b"." or (text[:1] in b'"]}' and text.strip(b'"]}, ') == b"") for text in spelled])
        self.closing &= ~self.silent

    def walk(self, state: GrammarState, seed: int, steps: int = 600) -> list[int]:
        """The ids chosen, down to the end of the grammar, which must be reached."""
        choose = random.Random(seed)
        ids: list[int] = []
        while not state.over:
            assert len(ids) < steps, self.tokenizer.decode(ids)
            mask = np.unpackbits(state.allowed().view(np.uint8), bitorder="little").astype(bool)
            allowed, beyond = np.split(mask, [self.ends.size])
            assert not beyond.any()
            assert not (allowed & self.silent).any()
            if self.ask and (forced := state.forced()):
                assert np.flatnonzero(allowed).tolist() == forced[:1]
            may_end = (allowed & self.ends).any()
            assert not may_end or allowed[self.ends].all()
            going_on = np.flatnonzero(allowed & ~self.ends)
            if may_end and (not going_on.size or choose.random() < 0.5):
                state.accept(min(self.tokenizer.end_ids))
                assert state.over
                break
            closing = np.flatnonzero(allowed & self.closing)
            ids.append(int(choose.choice(closing if closing.size and choose.random() < 0.5 else going_on)))
            state.accept(ids[-1])
        return ids

    def text(self, state: GrammarState, seed: int) -> str:
        return b"".join(map(self.tokenizer.token_bytes, self.walk(state, seed))).decode("utf-8")


def follow(state: GrammarState, steps: int) -> None:
    for _ in range(steps):
        if state.over:
            break
        state.accept(bits(state.allowed())[-1])


def compiler_of(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer, tokenizer.end_ids, tokenizer.vocab_size + MORE_ROWS)
    yield made
    made.close()


def refusal(compiler: GrammarCompiler, kind: str, text: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(kind, text)
    assert caught.value.field == "response_format"
    return str(caught.value)
