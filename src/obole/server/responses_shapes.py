"""What comes and goes at /v1/responses: https://platform.openai.com/docs/api-reference/responses"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from obole.server.body import converted
from obole.server.conversation import Unsupported, supported
from obole.server.endpoint import Call
from obole.server.errors import refused
from obole.server.fields import (
    CacheControl,
    FormatLark,
    FormatObject,
    FormatRegex,
    FormatText,
    Fraction,
    Mtp,
    MtpTokens,
    Penalty,
    Positive,
    Prediction,
    Speculate,
    TopLogprobs,
    sized,
)
from obole.server.messages import Name, Nothing, RefusalContent
from obole.server.shapes import Report
from obole.types import Grammar

LOGPROBS = "message.output_text.logprobs"
_UNSUPPORTED: Unsupported = {
    "background": (
        (False,),
        "Responses are made while the request is open: leave background out, and stream if it takes long.",
    ),
    "background_options": ((), "Responses are made while the request is open: leave background_options out."),
    "context_management": (([],), "Nothing is left out of a conversation here: leave context_management out."),
    "conversation": ((), "There are no conversation objects here: use previous_response_id, or send the whole conversation."),
    "max_tool_calls": ((), "max_tool_calls is for tools that run on the server, and this one has none: leave it out."),
    "moderation": ((), "Nothing is moderated here: leave moderation out."),
    "prompt": ((), "There are no stored prompts here: send instructions and input."),
    "truncation": (("disabled",), "No prompt is cut short here: leave truncation out, and keep input within the context."),
}


class InputText(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="input_text"):
    """A piece of text."""

    text: str


class SpokenText(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="output_text"):
    """A piece of an earlier answer, as it came."""

    text: str
    annotations: Nothing = None
    logprobs: list[Any] | None = None


Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="message"):
    """What somebody said. Only here `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | SpokenText | RefusalContent]
    id: str | None = None
    status: Status | None = None
    phase: None = None
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.refusal if isinstance(part, RefusalContent) else part.text for part in self.content)


class CallItem(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function_call"):
    """A call that the model made. `arguments`: JSON text."""

    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: None = None
    namespace: None = None


class CallOutputItem(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function_call_output"):
    """What came of a call."""

    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: Status | None = None
    caller: None = None
    namespace: None = None

    @property
    def text(self) -> str:
        return self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)


InputItem: TypeAlias = MessageItem | CallItem | CallOutputItem


class FunctionTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function of the client. `strict`: arguments never leave `parameters`, a JSON schema of an object.

    Left out it is true where all tools of the request can be strict; the response says.
    """

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: None = None


class FunctionChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    """The one tool that must be called."""

    type: Literal["function"]
    name: str


Choice: TypeAlias = Literal["none", "auto", "required"] | FunctionChoice


class FormatNamedSchema(Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that a schema allows. `strict` is as good as always true."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None

    def grammar(self, call: Call) -> Grammar:
        return Grammar("json_schema", sized(call, msgspec.json.encode(self.schema).decode(), "text.format"))


class TextConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    format: FormatText | FormatObject | FormatNamedSchema | FormatRegex | FormatLark | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Struct, kw_only=True, forbid_unknown_fields=True):
    """Models here do not reason apart from their answer."""

    effort: Literal["none"] | None = None
    summary: None = None
    generate_summary: None = None


class EventOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """A conversation to be continued: `input`, after that of `previous_response_id`. null is the same as absent."""

    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0.0)] | None = None
    top_p: Fraction | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    stream: bool | None = None
    stream_options: EventOptions | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # not in OpenAI's API
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    prediction: Prediction | None = None
    speculate: Speculate | None = None
    mtp: Mtp | None = None
    tau: Fraction | None = None
    mtp_tokens: MtpTokens | None = None
    timeout: Annotated[float, Meta(ge=0.0)] | None = None
    pace: Annotated[float, Meta(ge=0.0)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


def read_request(raw: dict[str, Any]) -> ResponsesRequest:
    """The JSON of a request, checked. Raises `ApiError` naming the field at fault, also for what is not supported."""
    given = supported(raw, _UNSUPPORTED)
    if isinstance(items := given.get("input"), list):
        given["input"] = [_typed(item) for item in items]
    request = converted(given, ResponsesRequest)
    if request.top_logprobs and not request.wants_logprobs:
        raise refused("top_logprobs", f"top_logprobs needs {LOGPROBS!r} in include.")
    if request.stream_options is not None:
        if not request.stream:
            raise refused("stream_options", "stream_options are for streams: set stream to true, or leave them out.")
        if request.stream_options.include_obfuscation:
            problem = "Events are not padded here: leave include_obfuscation out, or set it to false."
            raise refused("stream_options.include_obfuscation", problem)
    return request


def _typed(item: Any) -> Any:
    """An item with its type, which messages need not give."""
    return {"type": "message", **item} if isinstance(item, dict) else item


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[dict[str, Any]] = []


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: Status
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """`arguments`: JSON text, unless `status` is "incomplete"."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


OutputItem: TypeAlias = OutputMessage | OutputCall


class InputDetails(Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0  # the cache keeps what it computes, which costs nothing apart


class OutputDetails(Struct, kw_only=True):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class ResponsesUsage(Struct, kw_only=True):
    """Token counts. `accepted`, `rejected`: tokens of the request's `prediction` that were, or were not, in the answer."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Problem(Struct, kw_only=True):
    code: str
    message: str


class Incomplete(Struct, kw_only=True):
    reason: Literal["max_output_tokens"]


class ResponseObject(Struct, kw_only=True):
    """A response, whole or in progress. What the request did not say is filled in."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool = False
    error: Problem | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | FunctionChoice
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None
    metadata: dict[str, str]
    obole: Report | UnsetType = UNSET


class Deleted(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
