"""The answer of a response while it comes in: its output items, and the events that tell a reader of them.

Whole responses and streams are made by the same code, so that they cannot differ. Events:
https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from obole.server.chatting import News
from obole.server.responses_shapes import OutputCall, OutputItem, OutputMessage, OutputText, Status
from obole.text.tool_calls import CallArguments, CallEnd, CallStart, Part, TextPart
from obole.types import TokenLogprob

Event = dict[str, Any]
Shown = Callable[[Iterable[TokenLogprob]], list[dict[str, Any]]]


def new_id(kind: str) -> str:
    """Of an item: nobody can guess it."""
    return f"{kind}_{secrets.token_hex(12)}"


class Output:
    """The output items of one answer. Events have neither a sequence number nor sources yet.

    `logprobs`: how a response shows log-probabilities; None where they were not asked for.
    """

    def __init__(self, logprobs: Shown | None = None) -> None:
        self.items: list[OutputItem] = []
        self._show = logprobs
        self._open = False  # whether more of the last item may come
        self._pieces: list[str] = []  # of the last item: its text, or its arguments
        self._whole = False  # whether the arguments of the last item, a call, are complete

    def take(self, news: News) -> list[Event]:
        """The events of what came. The last news of an answer end its last item."""
        events: list[Event] = []
        logprobs = [] if self._show is None else self._show(news.logprobs)
        for part in news.parts:
            events += self._part(part, logprobs)
            if isinstance(part, TextPart):
                logprobs = []
        if logprobs and isinstance(text := self._text(), OutputText):
            text.logprobs += logprobs  # of tokens without text of their own, such as the last
        if news.finish_reason is not None:
            if not self.items:
                events += self._begin_message()
            events += self.close("incomplete" if news.finish_reason == "length" else "completed")
        return events

    def close(self, status: Status) -> list[Event]:
        """The events that end the last item, if it has not ended. `status`: what it is if nothing in it is missing."""
        if not self._open:
            return []
        self._open = False
        item, place = self.items[-1], len(self.items) - 1
        whole = "".join(self._pieces)
        if isinstance(item, OutputCall):
            item.arguments = whole
            item.status = "completed" if self._whole else "incomplete"
            done = _event("function_call_arguments.done", output_index=place, item_id=item.id, name=item.name, arguments=whole)
            return [done, _event("output_item.done", output_index=place, item=_copy(item))]
        text = item.content[0]
        text.text = whole
        item.status = status
        at = {"output_index": place, "item_id": item.id, "content_index": 0}
        return [
            _event("output_text.done", **at, text=whole, logprobs=text.logprobs),
            _event("content_part.done", **at, part=_copy_text(text)),
            _event("output_item.done", output_index=place, item=_copy(item)),
        ]

    def snapshot(self) -> Sequence[OutputItem]:
        """The items so far, with what has come of the last one."""
        made = [_copy(item) for item in self.items]
        if self._open:
            last = made[-1]
            if isinstance(last, OutputCall):
                last.arguments = "".join(self._pieces)
            else:
                last.content[0].text = "".join(self._pieces)
        return made

    def _part(self, part: Part, logprobs: list[dict[str, Any]]) -> list[Event]:
        if isinstance(part, TextPart):
            begun = [] if self._text() else [*self.close("completed"), *self._begin_message()]
            return [*begun, self._add_text(part.text, logprobs)]
        if isinstance(part, CallStart):
            return [*self.close("completed"), self._begin_call(part.name)]
        place, item = len(self.items) - 1, self.items[-1]
        if isinstance(part, CallEnd):
            self._whole = True
            return self.close("completed")
        assert isinstance(part, CallArguments)
        self._pieces.append(part.fragment)
        return [_event("function_call_arguments.delta", output_index=place, item_id=item.id, delta=part.fragment)]

    def _text(self) -> OutputText | None:
        """The text that is being written, if it is a text."""
        item = self.items[-1] if self._open else None
        return item.content[0] if isinstance(item, OutputMessage) else None

    def _begin_message(self) -> list[Event]:
        item = OutputMessage(id=new_id("msg"), status="in_progress", content=[])
        place = len(self.items)
        added = _event("output_item.added", output_index=place, item=_copy(item))
        item.content = [OutputText(text="", annotations=[], logprobs=[])]
        self._add(item)
        part = OutputText(text="", annotations=[], logprobs=[])
        return [added, _event("content_part.added", output_index=place, item_id=item.id, content_index=0, part=part)]

    def _begin_call(self, name: str) -> Event:
        item = OutputCall(id=new_id("fc"), call_id=new_id("call"), name=name, arguments="", status="in_progress")
        self._add(item)
        return _event("output_item.added", output_index=len(self.items) - 1, item=_copy(item))

    def _add(self, item: OutputItem) -> None:
        self.items.append(item)
        self._open, self._pieces, self._whole = True, [], False

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> Event:
        item = self.items[-1]
        assert isinstance(item, OutputMessage)
        self._pieces.append(text)
        item.content[0].logprobs += logprobs
        at = {"output_index": len(self.items) - 1, "item_id": item.id, "content_index": 0}
        return _event("output_text.delta", **at, delta=text, logprobs=logprobs)


def _event(kind: str, /, **fields: Any) -> Event:
    return {"type": f"response.{kind}", **fields}


def _copy(item: OutputItem) -> OutputItem:
    """As it is now: events are written later."""
    if isinstance(item, OutputCall):
        return OutputCall(id=item.id, call_id=item.call_id, name=item.name, arguments=item.arguments, status=item.status)
    return OutputMessage(id=item.id, status=item.status, content=[_copy_text(text) for text in item.content])


def _copy_text(text: OutputText) -> OutputText:
    return OutputText(text=text.text, annotations=[], logprobs=list(text.logprobs))
