"""The answer of a message while it comes in: its content blocks, and the events that tell a reader of them.

Whole answers and streams are made by the same code, so that they cannot differ. Events:
https://platform.claude.com/docs/en/build-with-claude/streaming
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from obole.server.anthropic_shapes import AnswerBlock, TextAnswer, ToolUseAnswer
from obole.server.chatting import News
from obole.text.tool_calls import CallArguments, CallEnd, CallStart, Part, TextPart

Event = dict[str, Any]


class Content:
    """The content blocks of one answer. `partial`: by id of a tool use, the text of an input that is no whole object."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self.partial: dict[str, str] = {}
        self._open = False  # whether more of the last block may come
        self._pieces: list[str] = []  # of the last block: its text, or the JSON of its input

    def take(self, news: News) -> list[Event]:
        """The events of what came. The last news of an answer end its last block."""
        events: list[Event] = []
        for part in news.parts:
            events += self._part(part)
        return events if news.finish_reason is None else events + self._close()

    def _part(self, part: Part) -> list[Event]:
        if isinstance(part, TextPart):
            begun = [] if self._open and isinstance(self.blocks[-1], TextAnswer) else self._begin(TextAnswer(text=""))
            self._pieces.append(part.text)
            return [*begun, self._delta({"type": "text_delta", "text": part.text})]
        if isinstance(part, CallStart):
            return self._begin(ToolUseAnswer(id=f"toolu_{secrets.token_hex(12)}", name=part.name, input={}))
        if isinstance(part, CallEnd):
            return self._close()
        assert isinstance(part, CallArguments)
        self._pieces.append(part.fragment)
        return [self._delta({"type": "input_json_delta", "partial_json": part.fragment})]

    def _begin(self, block: AnswerBlock) -> list[Event]:
        ended = self._close()
        self.blocks.append(block)
        self._open, self._pieces = True, []
        # a copy: the block is filled in when it is whole
        return [*ended, {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": _copy(block)}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        block, whole = self.blocks[-1], "".join(self._pieces)
        if isinstance(block, TextAnswer):
            block.text = whole
        elif (read := _object(whole)) is None:
            self.partial[block.id] = whole
        else:
            block.input = read
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]


def _copy(block: AnswerBlock) -> AnswerBlock:
    return TextAnswer(text="") if isinstance(block, TextAnswer) else ToolUseAnswer(id=block.id, name=block.name, input={})


def _object(text: str) -> dict[str, Any] | None:
    """A JSON object; None for what is none."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, dict) else None
