"""Structured output: what comes out is what the grammar says, and a state says where it stands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

from obole.errors import InvalidRequest
from obole.text import grammar as grammar_module
from obole.text.gguf_tokenizer import tokenizer_from_gguf
from obole.text.grammar import CompiledGrammar, GrammarCompiler
from obole.text.tokenizer import Tokenizer
from tests.text.grammars import SCHEMAS, Walker, bits, compiler_of, follow, refusal
from tests.text.vocabularies import byte_level, gguf_metadata, sentencepiece_metadata

CHECKED = FormatChecker(["ipv4", "uuid", "email"])


@pytest.fixture(scope="module", params=["bytes", "pieces", "default"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "default":
        return request.getfixturevalue("default_tokenizer")  # type: ignore[no-any-return]
    made = gguf_metadata(byte_level("qwen2"), "qwen2") if request.param == "bytes" else sentencepiece_metadata()
    return tokenizer_from_gguf(made)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    yield from compiler_of(tokenizer)


@pytest.fixture(scope="module")
def walker(tokenizer: Tokenizer) -> Walker:
    return Walker(tokenizer)


# --- what comes out ---


@pytest.mark.parametrize("name", SCHEMAS)
def test_any_way_through_a_schema_ends_in_an_instance(compiler: GrammarCompiler, walker: Walker, name: str) -> None:
    schema = SCHEMAS[name]
    compiled = compiler.compile("json_schema", json.dumps(schema))
    validator = Draft202012Validator(schema, format_checker=CHECKED)
    for seed in range(5):
        text = walker.text(compiled.start(), seed)
        value = json.loads(text)
        validator.validate(value)
        assert len(text) <= 2 * len(json.dumps(value)) + 60  # no whitespace but ", " and ": "; digits may be many


def test_any_json_object(compiler: GrammarCompiler, walker: Walker) -> None:
    for seed in range(5):
        text = walker.text(compiler.compile("json_object", "").start(), seed)
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("pattern", [r"[a-c]{2,5}(-\d+)?", r"(yes|no|maybe)( [a-zß]+)*\.", r"[^a]x|\u{1F600}+", "a|"])
def test_any_way_through_a_regex_matches(compiler: GrammarCompiler, walker: Walker, pattern: str) -> None:
    compiled = compiler.compile("regex", pattern)
    ours = pattern.replace(r"\u{1F600}", "\U0001f600")
    for seed in range(5):
        assert re.fullmatch(ours, walker.text(compiled.start(), seed), re.DOTALL)


def test_any_way_through_a_lark_grammar_is_derived_from_it(compiler: GrammarCompiler, walker: Walker) -> None:
    compiled = compiler.compile("lark", 'start: sum\nsum: term | sum "+" term\nterm: /[0-9]{1,2}/ | "(" sum ")"')
    for seed in range(8):
        text = walker.text(compiled.start(), seed)
        assert re.fullmatch(r"[0-9+()]+", text)
        eval(re.sub(r"\b0+(?=\d)", "", text))  # digits, brackets and plus signs


@pytest.mark.parametrize(
    "text", ["plain", "na\u00efve \u65e5\u672c", "e\u0301 is not \u00e9", "<|im_end|></s>", ' "\\\n\t\x00', "  two"]
)
def test_a_constant_is_forced_whole(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    state = compiler.compile("json_schema", json.dumps({"const": text})).start()
    spelled = b""
    while not state.over:
        for token in state.forced() or bits(state.allowed())[:1]:
            assert token in bits(state.allowed())
            state.accept(token)
            spelled += tokenizer.token_bytes(token)
    assert json.loads(spelled) == text


def test_whether_anybody_asks_for_forced_tokens_changes_nothing(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for name in ("object", "nested", "enum", "union"):
        compiled = compiler.compile("json_schema", json.dumps(SCHEMAS[name]))
        for seed in range(3):
            asked, silent = (Walker(tokenizer, ask=ask).walk(compiled.start(), seed) for ask in (True, False))
            assert asked == silent


def test_most_of_a_strict_object_is_forced(default_compiler: GrammarCompiler) -> None:
    wide = {
        "type": "object",
        "properties": {f"property_{i}": {"type": "boolean"} for i in range(9)},
        "additionalProperties": False,
    }
    state = default_compiler.compile("json_schema", json.dumps(wide | {"required": list(wide["properties"])})).start()
    chosen = 0
    total = 0
    while not state.over:
        chosen += not state.forced()
        total += 1
        state.accept(bits(state.allowed())[0])
    assert chosen <= 9 * 2
    assert total > 4 * chosen


TEXT = st.text(
    st.characters(exclude_categories=["Cs"], max_codepoint=0xFFFF), max_size=6
)  # all that the default model can write
WHOLE = st.integers(-(2**52), 2**52)
SCALARS = st.one_of(
    st.builds(
        lambda low, size: {"type": "string", "minLength": low, "maxLength": low + size}, st.integers(0, 4), st.integers(0, 5)
    ),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size}, WHOLE, st.integers(0, 10**5)),
    st.builds(lambda values: {"enum": values}, st.lists(TEXT | st.integers(-99, 99) | st.none(), min_size=1)),
    st.sampled_from([{"type": "string", "pattern": pattern} for pattern in ("^a+b?$", "x|yz", "^\\w{2,5}$", "^[^\\d ]{3}")]),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["null", "integer"], "minimum": 3, "maximum": 5000}]),
)


def compound(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    named = st.dictionaries(TEXT, inner, max_size=4)
    return st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(
            lambda items: {"type": "array", "prefixItems": items, "items": False}, st.lists(inner, min_size=1, max_size=3)
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(
            lambda names, all_of_them: {
                "type": "object",
                "properties": names,
                "required": list(names)[all_of_them:],
                "additionalProperties": False,
            },
            named,
            st.integers(0, 2),
        ),
    )


@given(schema=st.recursive(SCALARS, compound, max_leaves=6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_way_through_any_schema_ends_in_an_instance(
    default_compiler: GrammarCompiler, default_walker: Walker, schema: dict[str, Any]
) -> None:
    compiled = default_compiler.compile("json_schema", json.dumps(schema))
    for seed in range(2):
        Draft202012Validator(schema).validate(json.loads(default_walker.text(compiled.start(), seed)))


# --- how a state behaves ---


def test_ends_are_allowed_exactly_where_the_grammar_may_end(
    default_compiler: GrammarCompiler, default_tokenizer: Tokenizer
) -> None:
    state = default_compiler.compile("regex", "ab?").start()
    ends = default_tokenizer.end_ids
    assert len(ends) == 2
    assert ends.isdisjoint(bits(state.allowed()))
    with pytest.raises(ValueError, match="may not end"):
        state.accept(min(ends))
    state.accept(default_tokenizer.encode("a", special=False)[0])
    assert ends < set(bits(state.allowed()))
    assert not state.over
    state.accept(max(ends))
    assert state.over


def test_a_token_that_is_not_allowed_is_told(default_compiler: GrammarCompiler, default_tokenizer: Tokenizer) -> None:
    state = default_compiler.compile("json_schema", '{"type": "array", "items": {"const": "abcdefgh"}}').start()
    before = bits(state.allowed())
    for token in set(range(200)) - set(before) - default_tokenizer.end_ids:
        with pytest.raises(ValueError, match="not allowed"):
            state.accept(token)
    assert bits(state.allowed()) == before


def test_sequences_of_one_grammar_do_not_disturb_each_other(
    default_compiler: GrammarCompiler, default_tokenizer: Tokenizer
) -> None:
    compiled = default_compiler.compile("json_schema", json.dumps(SCHEMAS["nested"]))
    walker = Walker(default_tokenizer)
    alone = [walker.walk(compiled.start(), seed) for seed in range(4)]
    states = [compiled.start() for _ in alone]
    for place in range(max(map(len, alone))):
        for state, ids in zip(states, alone, strict=True):
            if place < len(ids):
                assert ids[place] in bits(state.allowed())
                state.accept(ids[place])
    assert all(state.over for state in states)


def test_a_lexer_that_others_have_filled_is_replaced(
    default_compiler: GrammarCompiler, default_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = type(grammar_module.parser_limits())(max_lexer_states=400, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "parser_limits", lambda: small)
    built: list[CompiledGrammar] = []
    afresh = CompiledGrammar.afresh
    monkeypatch.setattr(CompiledGrammar, "afresh", lambda self: built.append(self) or afresh(self))
    compiled = default_compiler.compile("regex", "[ab]{30}(a|b)*a[ab]{12}x")  # thousands of states; an answer meets some
    walker = Walker(default_tokenizer)
    for seed in range(12):
        assert re.fullmatch("[ab]{30}(a|b)*a[ab]{12}x", walker.text(compiled.start(), seed))
    assert 0 < len(built) < 12


def test_a_step_that_costs_too_much_ends_the_request(
    default_compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = type(grammar_module.parser_limits())(max_lexer_states=40, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "parser_limits", lambda: small)
    state = default_compiler.compile("regex", "x[a-z]{40}[0-9]{40}").start()
    with pytest.raises(InvalidRequest, match="cannot be followed after"):
        follow(state, 200)


def test_control_tokens_come_only_by_name(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    end = min(tokenizer.end_ids)
    others = [i for i in tokenizer.special_ids - tokenizer.end_ids if str(tokenizer.token_text(i)).startswith("<")]
    state = compiler.compile("lark", f'start: {tokenizer.token_text(others[0])} "x"').start()
    assert bits(state.allowed()) == [others[0]]
    state.accept(others[0])
    assert not tokenizer.special_ids & set(bits(state.allowed()))
    assert "special token" in refusal(compiler, "lark", f'start: {tokenizer.token_text(end)} "x"')
    with pytest.raises(InvalidRequest, match="ends the answer"):
        compiler.compile("lark", f'start: <[{end}]> "x"').start().allowed()
    every = compiler.compile("lark", f'start: <[0-{tokenizer.vocab_size - 1}]> "x"').start()
    assert tokenizer.end_ids.isdisjoint(bits(every.allowed()))


def test_a_model_without_an_end_still_stops(default_tokenizer: Tokenizer) -> None:
    for made in compiler_of(default_tokenizer):
        bare = GrammarCompiler(default_tokenizer, frozenset(), 49_152)
        for compiler in (made, bare):
            state = compiler.compile("json_schema", '{"enum": [1, 12, true]}').start()
            true = default_tokenizer.encode("true", special=False)
            for token in true:
                state.accept(token)
            assert state.over
        state = bare.compile("json_schema", '{"enum": [1, 12, true]}').start()
        assert state.allowed().size == 49_152 // 32
        bare.close()


def test_what_the_vocabulary_cannot_write_is_refused(default_compiler: GrammarCompiler, default_tokenizer: Tokenizer) -> None:
    spelled = {default_tokenizer.token_bytes(i) for i in range(default_tokenizer.vocab_size)}
    assert b"\xf1" not in spelled
    assert "cannot write" in refusal(default_compiler, "json_schema", json.dumps({"const": "a\U00050000"}))


def test_threads_may_share_a_compiler_and_a_grammar(default_compiler: GrammarCompiler, default_walker: Walker) -> None:
    schema = json.dumps(SCHEMAS["nested"])

    def answers(thread: int) -> list[str]:
        default_compiler.compile("regex", f"[a-z]{{{thread + 1}}}")
        return [default_walker.text(default_compiler.compile("json_schema", schema).start(), seed) for seed in range(5)]

    with ThreadPoolExecutor(4) as pool:
        assert len({tuple(texts) for texts in pool.map(answers, range(8))}) == 1
