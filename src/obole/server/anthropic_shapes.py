"""What comes and goes at /v1/messages: https://platform.claude.com/docs/en/api/messages"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from obole.server.conversation import Unsupported
from obole.server.fields import CacheControl, Fraction, Mtp, MtpTokens, Natural, Positive, Prediction, Speculate
from obole.server.messages import Nothing
from obole.server.shapes import Report

ToolName: TypeAlias = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]

UNSUPPORTED: Unsupported = {
    "container": ((), "No code runs on this server: leave container out."),
    "context_management": (({}, {"edits": []}), "Nothing is left out of a conversation here: leave context_management out."),
    "diagnostics": ((), "There are no diagnostics here, but each answer has a receipt under obole: leave diagnostics out."),
    "inference_geo": ((), "This server is in one place: leave inference_geo out."),
    "mcp_servers": (([],), "This server calls no tools itself: leave mcp_servers out."),
    "speed": (("standard",), "There is one speed here: leave speed out."),
    "thinking": (({"type": "disabled"},), "Models here do not think apart from their answer: set thinking to disabled."),
}


class TextBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A piece of text."""

    text: str
    cache_control: CacheControl | None = None
    citations: Nothing = None


class DirectCaller(Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["direct"]


class ToolUseBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    """A call that the model made."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None


class ToolResultBlock(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    """What came of a call. With `is_error` the model reads "Error: " before the text."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class UserTurn(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="user"):
    content: str | list[TextBlock | ToolResultBlock]


class AssistantTurn(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    content: str | list[TextBlock | ToolUseBlock]


class SystemTurn(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role", tag="system"):
    content: str | list[TextBlock]


MessageTurn: TypeAlias = UserTurn | AssistantTurn | SystemTurn


class ClientTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of the client. `input_schema`: of an object. `strict`: what the model writes never leaves it."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # it always is
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Nothing = None


class AutoChoice(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="auto"):
    """Text or calls, as the model sees fit."""

    disable_parallel_tool_use: bool | None = None


class AnyToolChoice(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="any"):
    """Some tool must be called."""

    disable_parallel_tool_use: bool | None = None


class OneToolChoice(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="tool"):
    """The one tool that must be called."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoToolChoice(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="none"):
    """No tool may be called."""


ClientToolChoice: TypeAlias = AutoChoice | AnyToolChoice | OneToolChoice | NoToolChoice


class SchemaFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    format: SchemaFormat | None = None
    effort: None = None


class RequestMetadata(Struct, kw_only=True, forbid_unknown_fields=True):
    """`user_id`: is written to the log."""

    user_id: str | None = None


class CountRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A conversation whose tokens are to be counted."""

    messages: Annotated[list[MessageTurn], Meta(min_length=1)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ClientToolChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """A conversation to be continued. null is the same as absent.

    Where the context ends before `max_tokens`, the answer ends there, with the stop reason `model_context_window_exceeded`.
    """

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0.0)] | None = None
    top_p: Fraction | None = None
    top_k: Natural | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # not in Anthropic's API
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    prediction: Prediction | None = None
    speculate: Speculate | None = None
    mtp: Mtp | None = None
    tau: Fraction | None = None
    mtp_tokens: MtpTokens | None = None
    timeout: Annotated[float, Meta(ge=0.0)] | None = None
    pace: Annotated[float, Meta(ge=0.0)] | None = None


class TextAnswer(Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ToolUseAnswer(Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock: TypeAlias = TextAnswer | ToolUseAnswer


class MessagesUsage(Struct, kw_only=True):
    """Token counts. `input_tokens`: those that were computed; the whole prompt is these and those read from the cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0  # the cache keeps what it computes, which is not counted apart
    cache_read_input_tokens: int = 0
    output_tokens: int
    service_tier: Literal["standard"] = "standard"


class MessageReport(Report, kw_only=True):
    """`partial_inputs`: by the id of a tool use, the JSON text of an input that is no whole object; its `input` is empty."""

    partial_inputs: dict[str, str] | UnsetType = UNSET


class MessageAnswer(Struct, kw_only=True):
    """The whole answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    stop_sequence: str | None
    usage: MessagesUsage
    obole: MessageReport | UnsetType = UNSET


class TokenCount(Struct, kw_only=True):
    """All tokens of the prompt, whether or not they are in the cache."""

    input_tokens: int
