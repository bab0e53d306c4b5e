"""Answers as the events of two APIs: whatever the pieces an answer comes in, readers of events get what is in the whole."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from obole.server.anthropic_events import Content
from obole.server.chatting import News
from obole.server.responses_events import Output
from obole.text.tool_calls import CallArguments, CallEnd, CallStart, Part, TextPart

from .test_messages_api import folded as blocks_of
from .test_responses import folded as items_of
from .test_responses import nameless

PIECES = st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), min_size=1, max_size=4)
ARGUMENTS = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=3).map(json.dumps)


@st.composite
def answers(draw) -> list[Part]:
    """Parts of an answer in the order in which a parser gives them."""
    parts: list[Part] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "call", "broken call"]), max_size=5)):
        if kind == "text":
            parts += map(TextPart, draw(PIECES))
            continue
        text = draw(ARGUMENTS)
        text = text if kind == "call" else text[: draw(st.integers(0, len(text) - 1))]
        cut = draw(st.integers(0, len(text)))
        pieces = [piece for piece in (text[:cut], text[cut:]) if piece]
        parts += [CallStart(calls, f"f{calls}"), *(CallArguments(calls, piece) for piece in pieces)]
        parts += [CallEnd(calls)] if kind == "call" else []
        calls += 1
    return parts


@st.composite
def news(draw) -> list[News]:
    """The same in pieces of any size; the last says why the answer ended."""
    parts = draw(answers())
    cuts = sorted(draw(st.lists(st.integers(0, len(parts)), max_size=4)))
    pieces = [parts[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(parts)], strict=True)]
    made = [News(0, piece, [], [], [], None) for piece in pieces]
    return [*made[:-1], replace(made[-1], finish_reason=draw(st.sampled_from(["stop", "length", "tool_calls"])))]


def plain(value):
    return json.loads(msgspec.json.encode(value))


def joined(pieces: list[News]) -> News:
    return replace(pieces[-1], parts=[part for piece in pieces for part in piece.parts])


@settings(max_examples=100, deadline=None)
@given(news())
def test_items_of_responses(pieces):
    output, at_once = Output(), Output()
    events = []
    for piece in pieces:
        events += plain(output.take(piece))
        shown = plain(output.snapshot())
        assert nameless(items_of(events)) == nameless(shown)
    at_once.take(joined(pieces))
    assert nameless(plain(at_once.items)) == nameless(shown)
    assert plain(output.items) == shown == items_of(events)
    ended = [event["output_index"] for event in events if event["type"] == "response.output_item.done"]
    assert ended == list(range(len(shown)))
    assert all(item["status"] != "in_progress" for item in shown)
    text = "".join(part.text for piece in pieces for part in piece.parts if isinstance(part, TextPart))
    assert text == "".join(item["content"][0]["text"] for item in shown if item["type"] == "message")


@settings(max_examples=100, deadline=None)
@given(news())
def test_blocks_of_messages(pieces):
    content, at_once = Content(), Content()
    events = [event for piece in pieces for event in plain(content.take(piece))]
    at_once.take(joined(pieces))
    whole = plain(content.blocks)
    assert nameless(plain(at_once.blocks)) == nameless(whole)
    assert list(at_once.partial.values()) == list(content.partial.values())
    for block, (read, raw) in zip(whole, blocks_of(events), strict=True):
        if block.get("id") in content.partial:
            assert raw == content.partial[block["id"]]
            assert block["input"] == {}
        else:
            assert read == block
