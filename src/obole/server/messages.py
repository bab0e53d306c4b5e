"""Messages and tools of chat completions, checked, and in the form in which chat templates take them.

https://platform.openai.com/docs/api-reference/chat/create
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from obole.server.conversation import marked
from obole.server.fields import CacheControl, MarkedText, text_of
from obole.server.tools import NamedTool, ToolChoice

Name: TypeAlias = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
Nothing: TypeAlias = Annotated[list[Any], Meta(max_length=0)] | None


class SaidContent(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class RefusalContent(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    refusal: str


class CalledFunction(Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolCall(Struct, kw_only=True, forbid_unknown_fields=True):
    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None  # left over from a stream

    def plain(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": self.function.arguments},
        }


class _Spoken(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role"):
    content: str | list[MarkedText]
    name: str | None = None
    cache_control: CacheControl | None = None

    def plain(self) -> dict[str, Any]:
        """For the chat template."""
        made: dict[str, Any] = {"role": self._role, "content": text_of(self.content)}
        return _marked(made if self.name is None else {**made, "name": self.name}, self)

    @property
    def _role(self) -> str:
        return str(self.__struct_config__.tag)


class SystemMessage(_Spoken, tag="system"):
    """What the model is to do."""


class DeveloperMessage(_Spoken, tag="developer"):
    """The newer name of a system message; models know it by the older one."""

    @property
    def _role(self) -> str:
        return "system"


class UserMessage(_Spoken, tag="user"):
    """What the user says: text, or pieces of text that are joined."""


class ToolMessage(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="tool"):
    """What a tool returned."""

    content: str | list[MarkedText]
    tool_call_id: str
    name: str | None = None
    cache_control: CacheControl | None = None

    def plain(self) -> dict[str, Any]:
        made: dict[str, Any] = {"role": "tool", "content": text_of(self.content), "tool_call_id": self.tool_call_id}
        return _marked(made if self.name is None else {**made, "name": self.name}, self)


class AssistantMessage(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    """What the model said before. Without content and tool calls it said nothing."""

    content: str | list[SaidContent | RefusalContent] | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    name: str | None = None
    annotations: Nothing = None
    audio: None = None
    function_call: None = None
    cache_control: CacheControl | None = None

    def plain(self) -> dict[str, Any]:
        made: dict[str, Any] = {"role": "assistant", "content": self._text()}
        if self.name is not None:
            made["name"] = self.name
        if self.tool_calls:
            made["tool_calls"] = [call.plain() for call in self.tool_calls]
            made["content"] = made["content"] or None
        return marked(made, self.cache_control)

    def _text(self) -> str:
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text if isinstance(part, SaidContent) else part.refusal for part in self.content)


def _marked(made: dict[str, Any], message: _Spoken | ToolMessage) -> dict[str, Any]:
    parts = [] if isinstance(message.content, str) else message.content
    return marked(made, message.cache_control, *(part.cache_control for part in parts))


Message: TypeAlias = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(Struct, kw_only=True, forbid_unknown_fields=True):
    """`parameters`: a JSON schema of an object. `strict`: arguments never leave it."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        function = self.function
        made: dict[str, Any] = {"name": function.name}
        for name in ("description", "parameters", "strict"):
            if (value := getattr(function, name)) is not None:
                made[name] = value
        return {"type": "function", "function": made}


class FunctionName(Struct, kw_only=True, forbid_unknown_fields=True):
    name: str


class ChosenTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


AnyChoice: TypeAlias = Literal["none", "auto", "required"] | ChosenTool


def tool_choice(given: AnyChoice | None) -> ToolChoice:
    if isinstance(given, ChosenTool):
        return NamedTool(given.function.name)
    return given or "auto"
