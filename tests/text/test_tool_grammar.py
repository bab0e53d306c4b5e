"""Grammars for tool calls: what llguidance lets through under them, and schemas made fit for it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from obole.errors import InvalidRequest
from obole.text.added_tokens import AddedToken
from obole.text.tool_calls import CallArguments, CallEnd, CallStart, ToolCallParser
from obole.text.tool_formats import HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, MISTRAL_CALL_ID, ToolFormat
from obole.text.tool_grammar import normalise_schema, tool_grammar

FORMATS = (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, MISTRAL_CALL_ID)
MARKERS = tuple(dict.fromkeys(marker for format in FORMATS for marker in format.markers))
END = 256


class Bytes:
    """A vocabulary of the 256 bytes, an end of sequence, the markers, and tokens that lie across borders of the grammar."""

    eos_token_id = END
    bos_token_id = None

    def __init__(self, control: bool) -> None:
        self.tokens = [bytes([i]) for i in range(256)] + [b"<|end|>"] + [marker.encode() for marker in MARKERS]
        self.special_token_ids = list(range(END, len(self.tokens))) if control else [END]
        self.tokens += [b'"}}', b"}\n", b'": "', b'"}\n', b', "', b'": {"', b"}}, {", b"}; {"]
        self.added = [AddedToken(id=END + 1 + i, text=text, control=control) for i, text in enumerate(MARKERS)]

    def __call__(self, text: bytes | str) -> list[int]:
        """Longest match, with the markers as tokens."""
        data = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        while data:
            ids.append(
                max((i for i, token in enumerate(self.tokens) if data.startswith(token)), key=lambda i: len(self.tokens[i]))
            )
            data = data[len(self.tokens[ids[-1]]) :]
        return ids


VOCABULARIES = {control: Bytes(control) for control in (False, True)}
TOKENIZERS = {control: LLTokenizer(TokenizerWrapper(vocabulary)) for control, vocabulary in VOCABULARIES.items()}

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer"}}, "required": ["city"]}
CITY["$defs"] = {"City": {"enum": ["Paris", "Orléans"]}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY}},
    {"type": "function", "function": {"name": "get"}},
    {
        "name": 'math.sum-"é',
        "parameters": {"type": "object", "properties": {"v": {"type": "array", "items": {"type": "number"}}}},
    },
]
GOOD = {"city": "Orléans", "days": 2}


def written(format: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    def dump(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    if format == HERMES:
        return "\n".join(f"<tool_call>\n{dump({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)
    if format == LLAMA3:
        return "; ".join(dump({"name": n, "parameters": a}) for n, a in calls)
    if format == MISTRAL:
        return "[TOOL_CALLS] " + dump([{"name": n, "arguments": a} for n, a in calls])
    middle = "[CALL_ID]aB3456789[ARGS]" if format == MISTRAL_CALL_ID else "[ARGS]"
    return "".join(f"[TOOL_CALLS]{n}{middle}{dump(a)}" for n, a in calls)


def outcome(grammar: str, text: str, control: bool = True) -> str:
    """What the grammar makes of a text: "wrong", "unfinished", "complete" (more may follow) or "over"."""
    assert LLMatcher.validate_grammar_with_warnings(grammar, TOKENIZERS[control]) == (False, [])
    matcher = LLMatcher(TOKENIZERS[control], grammar)
    ids = VOCABULARIES[control](text)
    if matcher.try_consume_tokens(ids) < len(ids):
        return "wrong"
    return "over" if matcher.is_stopped() else "complete" if matcher.is_accepting() else "unfinished"


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_forced_calls(format: ToolFormat, control: bool) -> None:
    added = VOCABULARIES[control].added
    one = tool_grammar(format, TOOLS, required=True, parallel=False, added=added)
    assert outcome(one, written(format, ("get_weather", GOOD)), control) == "over"
    assert outcome(one, written(format, ("get_weather", {"city": "Paris"})), control) == "over"
    assert outcome(one, written(format, ("get", {})), control) == "over"
    assert outcome(one, written(format, ("get", {})).removesuffix("</tool_call>")[:-1], control) == "unfinished"
    assert outcome(one, "", control) == "unfinished"
    assert outcome(one, "Sure. " + written(format, ("get", {})), control) == "wrong"
    assert outcome(one, written(format, ("get", {}), ("get", {})), control) == "wrong"
    for name, arguments in [
        ("ge", {}), ("gett", {}), ("sum", {}), ("get", {"a": 1}), ("get_weather", {}), ("get_weather", {"days": 2}),
        ("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Paris", "days": "2"}), ("get_weather", GOOD | {"more": 1}),
    ]:  # fmt: skip
        assert outcome(one, written(format, (name, arguments)), control) == "wrong"
    many = tool_grammar(format, TOOLS, required=True, added=added)
    calls = [("get", {}), ("get_weather", GOOD), ('math.sum-"é', {"v": [1, 2.5]})]
    for count in (1, 2, 3):
        assert outcome(many, written(format, *calls[:count]), control) == ("over" if format == MISTRAL else "complete")
    named = tool_grammar(format, TOOLS, required=False, name="get", parallel=False, added=added)
    assert outcome(named, written(format, ("get", {})), control) == "over"
    assert outcome(named, written(format, ("get_weather", GOOD)), control) == "wrong"


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_free_text_in_which_calls_must_be_right(format: ToolFormat, control: bool) -> None:
    added = VOCABULARIES[control].added
    right, wrong = written(format, ("get_weather", GOOD)), written(format, ("get_weather", {"city": "Rome"}))
    for parallel in (False, True):
        free = tool_grammar(format, TOOLS, required=False, parallel=parallel, added=added)
        over = "complete" if parallel and format != MISTRAL else "over"
        for text in ("", "\n", "Hello < [x]: {}, é."):
            assert outcome(free, text, control) == "complete"
        assert outcome(free, right, control) == over
        assert outcome(free, wrong, control) == "wrong"
        if format == LLAMA3:
            continue
        assert outcome(free, "Well.\n" + right, control) == over
        assert outcome(free, "Well.\n" + wrong, control) == "wrong"
        more = "complete" if over == "complete" else "wrong"
        assert outcome(free, f"{right}\nand\n{right} so.", control) == more
    marked = "<|python_tag|>" + right
    assert format != LLAMA3 or not control or outcome(free, "Well. " + marked) == "complete"


def test_markers_are_written_as_their_tokens() -> None:
    for control, vocabulary in VOCABULARIES.items():
        grammar = tool_grammar(HERMES, TOOLS, required=True, added=vocabulary.added)
        forced = LLMatcher(TOKENIZERS[control], grammar).compute_ff_tokens()
        assert forced[0] == next(token.id for token in vocabulary.added if token.text == "<tool_call>")
        assert LLMatcher(TOKENIZERS[control], grammar).try_consume_tokens(list(b"<tool_call>")) == 0
    bare = tool_grammar(HERMES, TOOLS, required=True)
    assert LLMatcher(TOKENIZERS[False], bare).try_consume_tokens(list(b"<tool_call>\n{")) == 13


@pytest.mark.parametrize("format", FORMATS)
def test_whatever_is_let_through_is_read_as_calls(format: ToolFormat) -> None:
    grammar = tool_grammar(format, TOOLS, required=True)
    for seed in range(6):
        parser = ToolCallParser(format, {"get_weather", "get", 'math.sum-"é'})
        parts = parser.push(wander(grammar, random.Random(seed))) + parser.finish()
        assert parts
        for start, arguments, end in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            assert isinstance(start, CallStart)
            assert isinstance(arguments, CallArguments)
            assert isinstance(end, CallEnd)
            given = json.loads(arguments.fragment)
            if start.name == "get_weather":
                assert given.pop("city") in ("Paris", "Orléans")
                assert all(key == "days" and isinstance(value, int) for key, value in given.items())
            elif start.name != "get" and given:
                assert list(given) == ["v"]
                assert all(isinstance(value, int | float) for value in given["v"])
            else:
                assert given == {}


def wander(grammar: str, chance: random.Random) -> str:
    """A random answer under a grammar, with short values."""
    matcher, tokens, answer = LLMatcher(TOKENIZERS[False], grammar), VOCABULARIES[False].tokens, b""
    while not matcher.is_stopped() and not (matcher.is_accepting() and chance.random() < 0.5):
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(len(tokens)) if i != END and mask[i // 8] >> i % 8 & 1]
        closing = [i for i in allowed if tokens[i] in (b'"', b"]", b"}", b'"}', b'"}}')]
        token = chance.choice(closing if closing and chance.random() < 0.6 else allowed)
        assert matcher.consume_token(token)
        answer += tokens[token]
    return answer.decode()


def parameters(schema: object) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def arguments_outcome(schema: object, arguments: str) -> str:
    grammar = tool_grammar(LLAMA3, parameters(schema), required=True, parallel=False)
    return outcome(grammar, f'{{"name": "f", "parameters": {arguments}}}')


def test_plain_objects_are_closed_and_others_left_open() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"o": inner, "l": {"type": "array", "items": inner}}}
    assert arguments_outcome(schema, '{"o": {"a": 1}, "l": [{"a": 1}, {}]}') == "over"
    assert arguments_outcome(schema, '{"o": {"b": 1}}') == "wrong"
    assert arguments_outcome(schema, '{"l": [{"b": 1}]}') == "wrong"
    assert arguments_outcome(schema, '{"z": 1}') == "wrong"
    for more in (
        {"additionalProperties": True},
        {"required": ["z"]},
        {"patternProperties": {"z": {}}},
        {"allOf": [{"required": ["z"]}]},
    ):
        assert arguments_outcome(schema | more, '{"z": 1}') == "over"
    assert arguments_outcome({}, '{"z": [null]}') == "over"
    assert arguments_outcome({"type": "object"}, '{"z": {}}') == "over"
    assert arguments_outcome(None, "{}") == "over"
    assert arguments_outcome(None, '{"z": 1}') == "wrong"


INTEGER = {"type": "integer"}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("tools", "name", "field"),
    [
        ([], None, "tools"),
        ([{"type": "function"}], None, "tools"),
        (["f"], None, "tools"),
        ([{"function": {"name": ""}}], None, "tools"),
        ([{"function": {"name": 1}}], None, "tools"),
        ([{"function": None}], None, "tools"),
        ([{"name": "f"}, {"name": "f"}], None, "tools"),
        (parameters([]), None, "tools"),
        (parameters({"type": "string"}), None, "tools"),
        (parameters({"type": ["object", "null"]}), None, "tools"),
        (parameters({"properties": {"a": nested(1000)}}), None, "tools"),
        (parameters({}), "g", "tool_choice"),
    ],
)
def test_refusals(tools: Sequence[Any], name: str | None, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        tool_grammar(HERMES, tools, required=True, name=name)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        ({"type": "any"}, {}),
        ({"type": "", "description": "d"}, {"description": "d"}),
        ({"type": "tuple", "items": {"type": "float"}}, {"type": "array", "items": {"type": "number"}}),
        ({"type": "tuple", "items": [{"type": "float"}]}, {"type": "array", "prefixItems": [{"type": "number"}]}),
        ({"type": ["float", "int", "double"]}, {"type": ["number", "integer"]}),
        ({"type": ["float", "any"]}, {}),
        ({"type": "HashMap", "additionalProperties": {"type": "long"}}, {"type": "object", "additionalProperties": INTEGER}),
        ({"anyOf": [{"type": "String"}, True]}, {"anyOf": [{"type": "string"}, True]}),
        ({"type": "date"}, {"type": "date"}),
        (
            {"type": "dict", "properties": {"type": {"type": "char"}, "items": {"type": "dict"}}, "required": ["type"]},
            {"type": "object", "properties": {"type": {"type": "string"}, "items": {"type": "object"}}, "required": ["type"]},
        ),
        ({"enum": ["dict"], "default": {"type": "dict"}}, {"enum": ["dict"], "default": {"type": "dict"}}),
    ],
)  # fmt: skip
def test_types_of_programming_languages(schema: dict[str, Any], made: dict[str, Any]) -> None:
    before = json.dumps(schema)
    assert normalise_schema(schema) == made
    assert json.dumps(schema) == before
    assert normalise_schema(made) == made


def test_schemas_that_are_too_deep_are_refused() -> None:
    assert normalise_schema(nested(50)) == nested(50)
    with pytest.raises(InvalidRequest):
        normalise_schema(nested(100_000))
