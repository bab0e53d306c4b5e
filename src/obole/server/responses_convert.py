"""Between the items of the Responses API and the messages of chats. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from obole.errors import InvalidRequest
from obole.server.conversation import Message, add_call, called, marked
from obole.server.errors import refused
from obole.server.fields import MTP_FIELDS
from obole.server.responses_shapes import (
    CallItem,
    CallOutputItem,
    Choice,
    FunctionChoice,
    FunctionTool,
    InputDetails,
    InputItem,
    MessageItem,
    OutputDetails,
    OutputItem,
    OutputMessage,
    ResponsesRequest,
    ResponsesUsage,
)
from obole.server.tools import NamedTool, ToolChoice
from obole.text.grammar_schema import strict_schema


def input_messages(given: str | Sequence[InputItem], before: Sequence[Message]) -> list[Message]:
    """Items as chat messages. `before`: the messages of the conversation so far, which calls may have been made in.

    What the assistant said and the calls that follow become one message, as it wrote them. Raises `ApiError` for the output
    of a call that nobody made.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    made: list[Message] = []
    known = called(before)
    for place, item in enumerate(given):
        if isinstance(item, MessageItem):
            role = "system" if item.role == "developer" else item.role
            made.append(marked({"role": role, "content": item.text}, item.cache_control))
        elif isinstance(item, CallItem):
            known.add(item.call_id)
            add_call(made, item.call_id, item.name, item.arguments)
        elif isinstance(item, CallOutputItem):
            if item.call_id not in known:
                problem = (
                    f"input[{place}] is the output of call {item.call_id!r}, which is not in the conversation: send it first."
                )
                raise refused(f"input[{place}].call_id", problem)
            made.append({"role": "tool", "content": item.text, "tool_call_id": item.call_id})
    return made


def output_messages(items: Iterable[OutputItem]) -> list[Message]:
    """An answer as chat messages, for the requests that continue it."""
    made: list[Message] = []
    for item in items:
        if isinstance(item, OutputMessage):
            made.append({"role": "assistant", "content": "".join(part.text for part in item.content)})
        else:
            add_call(made, item.call_id, item.name, item.arguments)
    return made


def resolved(tools: Sequence[FunctionTool]) -> list[FunctionTool]:
    """Tools with `strict` settled.

    Those that do not say are strict, as in OpenAI's API, unless some tool is not to be strict or cannot be: answers are held
    to all tools or none.
    """
    strict = all(tool.strict is not False and _enforceable(tool.parameters or {}) for tool in tools)
    return [msgspec.structs.replace(tool, strict=strict) if tool.strict is None else tool for tool in tools]


def _enforceable(schema: Mapping[str, Any]) -> bool:
    try:
        strict_schema(json.dumps(schema))
    except InvalidRequest:
        return False
    return True


def plain_tools(tools: Iterable[FunctionTool]) -> list[dict[str, Any]]:
    """As chat completions have them."""
    made = []
    for tool in tools:
        function: dict[str, Any] = {"name": tool.name}
        for name in ("description", "parameters", "strict"):
            if (value := getattr(tool, name)) is not None:
                function[name] = value
        made.append({"type": "function", "function": function})
    return made


def plain_choice(choice: Choice | None) -> ToolChoice:
    return NamedTool(choice.name) if isinstance(choice, FunctionChoice) else choice or "auto"


def sampling(request: ResponsesRequest, temperature: float) -> dict[str, Any]:
    """Arguments for `SamplingParams`. `temperature`: where the request does not say."""
    made: dict[str, Any] = {
        "temperature": temperature if request.temperature is None else request.temperature,
        "max_tokens": request.max_output_tokens,
        "logprobs": (request.top_logprobs or 0) if request.wants_logprobs else None,
        "stop": (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        "prediction": None if request.prediction is None else request.prediction.text,
    }
    names = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "speculate")
    return made | {name: value for name in (*names, *MTP_FIELDS) if (value := getattr(request, name)) is not None}


def echo(request: ResponsesRequest, temperature: float) -> dict[str, Any]:
    """What a response says about its request, defaults filled in."""
    text: dict[str, Any] = {"format": {"type": "text"}, "verbosity": "medium"}
    if request.text is not None and request.text.format is not None:
        text["format"] = request.text.format
    tools = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
        for tool in request.tools or ()
    ]
    plain = ("instructions", "max_output_tokens", "previous_response_id", "prompt_cache_key", "prompt_cache_retention")
    return {
        **{name: getattr(request, name) for name in (*plain, "safety_identifier", "user")},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "temperature": temperature if request.temperature is None else request.temperature,
        "text": text,
        "tool_choice": request.tool_choice or "auto",
        "tools": tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "presence_penalty": request.presence_penalty or 0.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "metadata": request.metadata or {},
    }


def responses_usage(usage: Mapping[str, Any]) -> ResponsesUsage:
    """From the form of chat completions."""
    details = usage["completion_tokens_details"]
    return ResponsesUsage(
        input_tokens=usage["prompt_tokens"],
        input_tokens_details=InputDetails(cached_tokens=usage["prompt_tokens_details"]["cached_tokens"]),
        output_tokens=usage["completion_tokens"],
        output_tokens_details=OutputDetails(**details),
        total_tokens=usage["total_tokens"],
    )
