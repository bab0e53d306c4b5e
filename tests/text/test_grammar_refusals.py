"""Grammars that cannot be enforced are refused by name, and hostile ones do not get far."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from obole.errors import InvalidRequest
from obole.text import grammar as grammar_module
from obole.text.grammar import GrammarCompiler
from obole.text.grammar_schema import strict_schema
from obole.text.tokenizer import Tokenizer
from tests.text.grammars import compiler_of, follow, refusal

REFUSED: dict[str, tuple[Any, str]] = {  # schema, what the message names
    "not": ({"not": {}}, "'not'"),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 2}}, "'if'"),
    "unique": ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    "misspelt": ({"type": "string", "maxLenght": 3}, "'maxLenght'"),
    "older draft": ({"$schema": "http://json-schema.org/draft-04/schema#", "contains": {}}, "'contains'"),
    "behind a reference": ({"$defs": {"a": {"dependentRequired": {}}}, "items": {"$ref": "#/$defs/a"}}, "'dependentRequired'"),
    "lenient": ({"x-guidance": {"lenient": True}, "type": "string"}, "'x-guidance'"),
    "one of": ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "oneOf"),
    "look-around": ({"pattern": "(?<=x)*"}, "look-around"),
    "format": ({"type": "string", "format": "idn-email"}, "idn-email"),
    "no schema": ({"properties": {"foo": "bar"}}, "#/properties/foo"),
    "dangling": ({"$ref": "#/$defs/nope"}, "#/$defs/nope"),
    "remote": ({"$ref": "https://example.com/schema.json"}, "https://example.com/schema.json"),
    "another document": ({"items": {"$id": "https://example.com/a"}}, "'$id'"),
    "only itself": ({"$ref": "#"}, "no text"),
    "nothing": ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable"),
    "too large": ({"const": 2**53 + 1}, "2**53"),
    "smallest of 64 bits": ({"const": -(2**63)}, "2**53"),  # llguidance alone overflows its stack on this one
    "names may repeat": ({"type": "object", "minProperties": 2}, "minProperties"),
    "size": ({"minLength": -1}, "minLength"),
    "endless": ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "cannot be compiled"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(default_compiler: GrammarCompiler, name: str) -> None:
    schema, named = REFUSED[name]
    assert named in refusal(default_compiler, "json_schema", json.dumps(schema))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "true", '{"const": NaN}', '{"const": 1e999}', '{"type": 1, "type": 2}', '{"const": "\\ud800"}']
)
def test_what_is_no_schema_is_refused(default_compiler: GrammarCompiler, text: str) -> None:
    if text:
        refusal(default_compiler, "json_schema", text)
    refusal(default_compiler, "xml", text)
    refusal(default_compiler, "json_object", "{}")


NO_GRAMMAR = [
    *(("regex", text) for text in ("(?<=x)*", "(", "[^\\s\\S]", "", "\ud800")),
    *(("lark", text) for text in ("", 'start: %json {"not": {}}', '{"grammars": []}', "start: a\na[temperature=0.3]: /x/")),
]


@pytest.mark.parametrize(("kind", "text"), NO_GRAMMAR)
def test_what_is_no_grammar_is_refused(default_compiler: GrammarCompiler, kind: str, text: str) -> None:
    refusal(default_compiler, kind, text)


NAMES = st.sampled_from(
    ["type", "$ref", "properties", "items", "oneOf", "required", "enum", "minimum", "minLength", "$defs", "a"]
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["#", "#/$defs/a", "string", "object"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=12,
)


@given(JSON)
@settings(max_examples=300, deadline=None)
def test_any_json_is_a_schema_or_refused(value: Any) -> None:
    with contextlib.suppress(InvalidRequest):
        assert strict_schema(json.dumps(value))["x-guidance"]


def chain(length: int) -> str:
    links = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(length)}
    return json.dumps({"$defs": links | {f"d{length}": {}}, "$ref": "#/$defs/d0"})


PROPERTIES = {f"p{i}": {"type": "string"} for i in range(7000)}
HOSTILE = {
    "nested 10^4": ("json_schema", '{"items":' * 10**4 + "{}" + "}" * 10**4),
    "nested 10^5": ("json_schema", "[" * 10**5 + "]" * 10**5),
    "chain of references": ("json_schema", chain(3000)),
    "circles": ("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
    "repeated repetition": ("json_schema", '{"pattern": "(a{1,1000}){1,1000}"}'),
    "repetition of one": ("json_schema", '{"pattern": "(a+)+$"}'),
    "long string": ("json_schema", '{"type": "string", "maxLength": 1000000000}'),
    "long array": ("json_schema", '{"type": "array", "minItems": 1000000000}'),
    "enum": ("json_schema", json.dumps({"enum": list(range(30_000))})),
    "properties": ("json_schema", json.dumps({"type": "object", "properties": PROPERTIES})),
    "one of many properties": (
        "json_schema",
        json.dumps({"type": "object", "properties": PROPERTIES, "minProperties": 1, "additionalProperties": False}),
    ),
    "required": ("json_schema", json.dumps({"type": "object", "required": list(PROPERTIES)})),
    "four thousand million": ("regex", "a{4294967295}"),
    "many options": ("regex", "a?" * 20_000),
    "rules": ("lark", "start: r0\n" + "\n".join(f'r{i}: "x" r{i + 1}' for i in range(5000)) + '\nr5000: "y"'),
    "terminals": ("lark", "start: A0\n" + "\n".join(f'A{i}: ("x" A{i + 1})?' for i in range(2000)) + '\nA2000: "y"'),
    "ambiguity": ("lark", 'start: start start | "a" | '),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_compiled_or_refused_in_time(default_compiler: GrammarCompiler, name: str) -> None:
    began = time.process_time()
    with contextlib.suppress(InvalidRequest):
        follow(default_compiler.compile(*HOSTILE[name]).start(), 40)
    assert time.process_time() - began < 6  # of this process; the trial is bounded by its own limit


def test_a_grammar_that_takes_too_long_is_given_up(default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_SECONDS", 0.5)
    patterns = [{"type": "string", "pattern": f"a.*{k}"} for k in range(200)]
    for compiler in compiler_of(default_tokenizer):
        compiler.compile("json_object", "")  # so that the process is there
        began = time.monotonic()
        assert "cannot be compiled" in refusal(compiler, "json_schema", json.dumps({"allOf": patterns}))
        assert time.monotonic() - began < 30  # mostly the start of another process
        compiler.compile("regex", "[ab]+")  # and the next one is served


def test_grammars_are_kept_and_let_go(default_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    first = default_compiler.compile("regex", "first")
    assert default_compiler.compile("regex", "first") is first
    monkeypatch.setattr(grammar_module, "_KEPT", 2)
    for text in ("second", "third"):
        default_compiler.compile("regex", text)
    assert default_compiler.compile("regex", "first") is not first
    assert "262144" in refusal(default_compiler, "regex", "a" * 262_145)


def test_a_trial_process_that_died_is_started_again(default_tokenizer: Tokenizer) -> None:
    for compiler in compiler_of(default_tokenizer):
        compiler.compile("regex", "one")
        process = compiler._trial._process
        assert process is not None
        process.kill()
        process.wait()
        compiler.compile("regex", "two")
        compiler.close()
        compiler.close()
        compiler.compile("regex", "three")
