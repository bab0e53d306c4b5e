"""Tool calls in streamed text: every format, every cut of the text, and all that only looks like a call."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from obole.text.added_tokens import AddedToken
from obole.text.tool_calls import CallArguments, CallEnd, CallStart, Part, TextPart, ToolCallParser
from obole.text.tool_formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_CALL_ID,
    ToolFormat,
    detect_format,
    shown_tokens,
)

NAMES = frozenset({"get_weather", "get", "math.sum", "f-2", "météo"})
FORMATS = (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS)
ARGS = '{"city": "Pa\\"r}is\\\\", "n": [1, {"deep": {}}], "s": "日本 🦀 </tool_call> [TOOL_CALLS]"}'


def parse(format: ToolFormat, pieces: Sequence[str], names: frozenset[str] = NAMES) -> list[Part]:
    parser = ToolCallParser(format, names)
    return joined([part for piece in pieces for part in parser.push(piece)] + parser.finish())


def joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring pieces of one thing put together."""
    made: list[Part] = []
    for part in parts:
        last = made[-1] if made else None
        if isinstance(part, TextPart) and isinstance(last, TextPart):
            made[-1] = TextPart(last.text + part.text)
        elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.index == last.index:
            made[-1] = CallArguments(part.index, last.fragment + part.fragment)
        else:
            made.append(part)
    return made


def call(index: int, name: str, arguments: str) -> list[Part]:
    return [CallStart(index, name), CallArguments(index, arguments), CallEnd(index)]


def text_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart))


WHOLE: list[tuple[ToolFormat, str, list[Part]]] = [
    # Hermes: one call, two, text around them, other orders and layouts
    (HERMES, f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>', call(0, "get_weather", ARGS)),
    (
        HERMES,
        'Let me see.\n<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"name": "math.sum", "arguments": {"v": [1, 2]}}\n</tool_call>\n Done.',
        [TextPart("Let me see.\n"), *call(0, "get", "{}"), *call(1, "math.sum", '{"v": [1, 2]}'), TextPart("\n Done.")],
    ),
    (HERMES, f'<tool_call>{{"arguments": {ARGS}, "name": "f-2"}}</tool_call>', call(0, "f-2", ARGS)),
    (HERMES, '<tool_call>{"id": "a", "type": "function", "name": "get", "parameters": {}}</tool_call>', call(0, "get", "{}")),
    (HERMES, '<tool_call>{"name": "get", "arguments": {}, "id": ["x}", {}], "n": 1.5}</tool_call>', call(0, "get", "{}")),
    (HERMES, '<tool_call>{"name": "get"}</tool_call>', call(0, "get", "{}")),
    (HERMES, '<tool_call>{"name": "get", "arguments": null}</tool_call>', call(0, "get", "{}")),
    (HERMES, '<tool_call>{"arguments": "", "name": "get"}</tool_call>', call(0, "get", "{}")),
    (HERMES, '<tool_call>{"name": "m\\u00e9t\\u00e9o", "arguments": {}}</tool_call>', call(0, "météo", "{}")),
    (HERMES, '<tool_call>[{"name": "get"}, {"name": "f-2"}]</tool_call>', call(0, "get", "{}") + call(1, "f-2", "{}")),
    (HERMES, '<tool_call>{"name": "get"}\n{"name": "f-2"}</tool_call>', call(0, "get", "{}") + call(1, "f-2", "{}")),
    (HERMES, '<tool_call>{"name": "get"}', call(0, "get", "{}")),
    (HERMES, '<tool_call>{"name": "get", "arguments": {}\n</tool_call>', call(0, "get", "{}")),
    # arguments as a string
    (HERMES, f'<tool_call>{{"name": "get", "arguments": {json.dumps(ARGS)}}}</tool_call>', call(0, "get", ARGS)),
    (LLAMA3, f'{{"parameters": {json.dumps(" " + ARGS)}, "name": "get"}}', call(0, "get", ARGS)),
    (LLAMA3, '{"name": "get", "parameters": "{\\"a\\": \\"\\ud83e\\udd80\\ud83e \\q\\u00\\"}"}', [
        CallStart(0, "get"), CallArguments(0, '{"a": "🦀\\ud83e \\q\\u00"}'), CallEnd(0),
    ]),
    # Llama 3
    (LLAMA3, f'{{"name": "get_weather", "parameters": {ARGS}}}', call(0, "get_weather", ARGS)),
    (LLAMA3, f' \n<|python_tag|>{{"type": "function", "name": "get", "parameters": {ARGS}}}', call(0, "get", ARGS)),
    (LLAMA3, '{"name": "get", "parameters": {}}; {"name": "f-2"}', call(0, "get", "{}") + call(1, "f-2", "{}")),
    (LLAMA3, 'I call: <|python_tag|>{"name": "get"} ; so', [TextPart("I call: "), *call(0, "get", "{}"), TextPart(" ; so")]),
    # Mistral, as a list and by name, with markers and where these are hidden
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "get", "arguments": {ARGS}}}]', call(0, "get", ARGS)),
    (MISTRAL, 'Hm. [TOOL_CALLS][{"name": "get", "arguments": {}},{"name": "f-2", "arguments": {}, "id": "abc"}] Well.', [
        TextPart("Hm. "), *call(0, "get", "{}"), *call(1, "f-2", "{}"), TextPart(" Well."),
    ]),
    (MISTRAL, ' [{"name": "get", "arguments": {"a": "]"}}]\n', call(0, "get", '{"a": "]"}')),
    (MISTRAL_ARGS, f"[TOOL_CALLS]get_weather[ARGS]{ARGS}[TOOL_CALLS]get[ARGS]{{}}", [
        *call(0, "get_weather", ARGS), *call(1, "get", "{}"),
    ]),
    (MISTRAL_CALL_ID, f"Hm.[TOOL_CALLS]math.sum[CALL_ID]aB3456789[ARGS]{ARGS}", [TextPart("Hm."), *call(0, "math.sum", ARGS)]),
    (MISTRAL_ARGS, f"get_weather{ARGS}météo{{}}", call(0, "get_weather", ARGS) + call(1, "météo", "{}")),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "parts"), WHOLE)
def test_calls(format: ToolFormat, text: str, parts: list[Part]) -> None:
    assert parse(format, [text]) == parts
    assert parse(format, list(text)) == parts


ORDINARY: list[tuple[ToolFormat, str]] = [
    *(
        (format, text)
        for format in FORMATS
        for text in ("", " \n", "Hello.", "a < b [c] {d}", "\n\nget it {now}", "[1, 2]", "<")
    ),
    (HERMES, "Put calls between `<tool_call>` and `</tool_call>` tags, as in <tool_call>."),
    (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "get_", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "get", "name": "get", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {}, "parameters": {}, "name": "get"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "get", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "get", "arguments": "soon"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "get", "arguments": "  "}</tool_call>'),
    (HERMES, '<tool_call>{"name": "get", "description": "Gets.", "parameters": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name" "get"}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {"a": 1]}, "name": "get"}</tool_call>'),
    (HERMES, '<tool_call>{"arguments": {}}</tool_call>'),
    (HERMES, "<tool_call>{}</tool_call>"),
    (HERMES, '{"name": "get", "arguments": {}}'),
    (HERMES, '[TOOL_CALLS] [{"name": "get", "arguments": {}}]'),
    (LLAMA3, 'Send {"name": "get", "parameters": {}} to it.'),
    (LLAMA3, '{"answer": {"name": "get", "parameters": {}}}'),
    (LLAMA3, "<|python_tag|>print(1)"),
    (MISTRAL, "[TOOL_CALLS] none"),
    (MISTRAL, "[TOOL_CALLS]get"),
    (MISTRAL, 'Then [{"name": "get", "arguments": {}}]'),
    (MISTRAL_ARGS, "get_weather {}"),
]


@pytest.mark.parametrize(("format", "text"), ORDINARY)
def test_what_only_looks_like_a_call_is_content(format: ToolFormat, text: str) -> None:
    assert parse(format, list(text)) == ([TextPart(text)] if text else [])


def test_a_call_behind_what_was_none() -> None:
    text = '<tool_call><tool_call>{"x<tool_call>{"name": "get"}</tool_call>'
    assert parse(HERMES, list(text)) == [TextPart('<tool_call><tool_call>{"x'), *call(0, "get", "{}")]
    text = '[[TOOL_CALLS]get[TOOL_CALLS]get{"a": 1}'
    assert parse(MISTRAL, list(text)) == [TextPart("[[TOOL_CALLS]get"), *call(0, "get", '{"a": 1}')]


def test_without_names_all_is_content() -> None:
    for format, text, _ in WHOLE:
        assert parse(format, list(text), frozenset()) == [TextPart(text)]


def test_arguments_that_break_leave_the_call_without_an_end() -> None:
    text = '<tool_call>{"name": "get", "arguments": {"a": [1}}</tool_call>'
    assert parse(HERMES, list(text)) == [CallStart(0, "get"), CallArguments(0, '{"a": [1'), TextPart("}</tool_call>")]
    text = '<tool_call>{"name": "get", "arguments": {"a": 1</tool_call>\n<tool_call>{"name": "f-2"}</tool_call>'
    assert parse(HERMES, list(text)) == [CallStart(0, "get"), CallArguments(0, '{"a": 1'), *call(1, "f-2", "{}")]
    for broken in ('{"a": [1', '{"a": 1} and', '{"a": [1}}'):
        text = f'{{"name": "get", "parameters": {json.dumps(broken)}}}'
        assert parse(LLAMA3, list(text)) == [CallStart(0, "get"), CallArguments(0, broken)]


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push('Yes <b <tool_call>{"name": "get", ') == [TextPart("Yes <b ")]
    assert parser.push('"arguments": ') == []
    assert parser.push('{"a": "x') == [CallStart(0, "get"), CallArguments(0, '{"a": "x')]
    assert parser.push("\\") == [CallArguments(0, "\\")]
    assert parser.push('"}') == [CallArguments(0, '"}')]
    assert parser.push('"}') == [CallArguments(0, '"}'), CallEnd(0)]
    assert parser.push("}\n</tool_call>\n") == []
    assert parser.push("<tool") == []
    assert parser.push("box>") == [TextPart("\n<toolbox>")]
    assert parser.push("<tool_ca") == []
    assert parser.finish() == [TextPart("<tool_ca")]
    with pytest.raises(RuntimeError):
        parser.push("more")


def test_an_answer_in_json_is_not_held_back() -> None:
    assert ToolCallParser(LLAMA3, NAMES).push('{"an') == [TextPart('{"an')]
    assert ToolCallParser(LLAMA3, NAMES).push('{"name": "p') == [TextPart('{"name": "p')]
    assert ToolCallParser(MISTRAL, NAMES).push("[1") == [TextPart("[1")]


@pytest.mark.parametrize(("format", "text", "parts"), WHOLE)
def test_cut_off_anywhere(format: ToolFormat, text: str, parts: list[Part]) -> None:
    ends = [part for part in parts if isinstance(part, CallEnd)]
    for length in range(len(text)):
        found = parse(format, [text[:length]])
        assert found == parse(format, list(text[:length]))
        assert [part for part in found if isinstance(part, CallEnd)] == ends[: sum(isinstance(p, CallEnd) for p in found)]
        for index in range(len(ends)):
            written = "".join(p.fragment for p in parts if isinstance(p, CallArguments) and p.index == index)
            kept = "".join(p.fragment for p in found if isinstance(p, CallArguments) and p.index == index)
            assert written.startswith(kept)
            assert kept == written or CallEnd(index) not in found
        if not any(isinstance(part, CallStart) for part in found):
            assert text_of(found) == text[:length]


TOKENS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<", "[", "]", "{", "}", '"', "\\",
    "\\u", "d83e", "\\udd80", ":", ",", ";", " ", "\n", "name", "arguments", "parameters", "id", "get", "_weather", "météo",
    "null", "1", "é", '{"name": "get", "arguments": {', '{"name": "get", "parameters": "{', '{"arguments": {"a": "',
    '"}, "name": "f-2"}', ' "get"}',
]  # fmt: skip
TEXTS = st.one_of(st.lists(st.sampled_from(TOKENS), max_size=30).map("".join), st.sampled_from([text for _, text, _ in WHOLE]))


@given(st.sampled_from(FORMATS), st.lists(TEXTS, max_size=3).map("".join), st.data())
def test_the_cut_of_the_text_does_not_matter(format: ToolFormat, text: str, data: st.DataObject) -> None:
    whole = parse(format, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(format, pieces) == parse(format, list(text)) == whole


@given(st.sampled_from(FORMATS), TEXTS)
def test_parts_are_well_formed_and_nothing_is_made_up(format: ToolFormat, text: str) -> None:
    parser = ToolCallParser(format, NAMES)
    parts: list[Part] = []
    for character in text:
        parts += parser.push(character)
    parts += parser.finish()
    begun, ended = 0, set()
    for part in parts:
        if isinstance(part, TextPart):
            assert part.text
        elif isinstance(part, CallStart):
            assert part.index == begun
            assert part.name in NAMES
            begun += 1
        else:
            assert part.index == begun - 1
            assert part.index not in ended
        if isinstance(part, CallEnd):
            ended.add(part.index)
    rest = text
    for part in joined(parts):
        if isinstance(part, TextPart):  # content in order
            assert part.text in rest
            rest = rest[rest.index(part.text) + len(part.text) :]
    if not begun:
        assert text_of(parts) == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=10,
)


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(max_size=6), VALUES, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
    st.sampled_from([None, 2]),
)
def test_calls_that_were_written_are_read(calls: list[tuple[str, dict[str, object]]], ascii: bool, indent: int | None) -> None:
    def dump(value: object) -> str:
        return json.dumps(value, ensure_ascii=ascii, indent=indent)

    written = {
        HERMES: "\n".join(f"<tool_call>\n{dump({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls),
        LLAMA3: "; ".join(dump({"name": n, "parameters": dump(a)}) for n, a in calls),
        MISTRAL: "[TOOL_CALLS]" + dump([{"arguments": a, "name": n} for n, a in calls]),
        MISTRAL_ARGS: "".join(f"[TOOL_CALLS]{n}[ARGS]{dump(a)}" for n, a in calls),
    }
    for format, text in written.items():
        parts = parse(format, list(text))
        assert [(p.index, p.name) for p in parts if isinstance(p, CallStart)] == [(i, n) for i, (n, _) in enumerate(calls)]
        assert [json.loads(p.fragment) for p in parts if isinstance(p, CallArguments)] == [a for _, a in calls]
        assert len(parts) == 3 * len(calls)


def test_work_is_linear_in_the_text() -> None:
    for text in ('<tool_call>{"arguments": {"a": "' * 3000, '<tool_call>{"id": ' + "[" * 100_000, "<tool_call>\n" * 8000):
        parse(HERMES, [text[i : i + 7] for i in range(0, len(text), 7)])


QWEN = (
    '{%- if tools %}{{- "within <tool_call></tool_call> XML tags:\\n<tool_call>\\n'
    '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}{%- endif %}'
)
LLAMA = "{{- '<|start_header_id|>' }}{{- 'Respond with {\"name\": function name, \"parameters\": dictionary of arguments}.' }}"


@pytest.mark.parametrize(
    ("source", "format"),
    [
        (QWEN, HERMES),
        ('{{ \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' + call.arguments | tojson }}', HERMES),
        (LLAMA, LLAMA3),
        (LLAMA + "{{- '<|python_tag|>' + call.name + '.call(' }}", LLAMA3),
        ("{{- '[TOOL_CALLS] [' }}{{ calls | tojson }}{{ '[/INST]' }}", MISTRAL),
        ("{{- '[TOOL_CALLS]' + call.name + '[ARGS]' + call.arguments }}", MISTRAL_ARGS),
        ("{{- '[TOOL_CALLS]' + call.name }}{{- '[CALL_ID]' + call.id }}{{- '[ARGS]' + call.arguments }}", MISTRAL_CALL_ID),
        ("{{- '<tool_call>\\n<function=' + call.name + '>\\n<parameter=' }}", None),
        ("{{- '<tool_call>' + call.name }}<arg_key>{{ key }}</arg_key>", None),
        ('{{- \'<|tool_call|>[{"name": "arguments":\' }}', None),
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}", None),
        ("{{- '<|start_header_id|>' + m.role + '<|end_header_id|>' + m.content }}", None),
        ("", None),
    ],
)
def test_formats_are_told_from_templates(source: str, format: ToolFormat | None) -> None:
    assert detect_format(source) == format


def test_control_tokens_that_answers_have_to_show() -> None:
    texts = [("<tool_call>", False), ("</tool_call>", True), ("[TOOL_CALLS]", True), ("[ARGS]", True), ("[CALL_ID]", True)]
    added = [AddedToken(id=i, text=text, control=control) for i, (text, control) in enumerate(texts)]
    assert shown_tokens(HERMES, added) == {1}
    assert shown_tokens(MISTRAL, added) == {2}
    assert shown_tokens(MISTRAL_CALL_ID, added) == {2, 3, 4}
    assert shown_tokens(LLAMA3, added) == frozenset()
