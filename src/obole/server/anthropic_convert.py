"""Between Anthropic's messages and those of chats. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from obole.engine.results import Choice
from obole.server.anthropic_shapes import (
    AnyToolChoice,
    AssistantTurn,
    ClientTool,
    ClientToolChoice,
    CountRequest,
    MessagesRequest,
    MessagesUsage,
    NoToolChoice,
    OneToolChoice,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from obole.server.conversation import Message, add_call, marked, with_instructions
from obole.server.errors import refused
from obole.server.fields import MTP_FIELDS, CacheControl
from obole.server.tools import NamedTool, ToolChoice
from obole.text.detokenizer import Detokenizer
from obole.text.tokenizer import Tokenizer


def chat_messages(request: CountRequest) -> list[Message]:
    """The conversation as chat messages.

    Pieces of text in one turn are joined. Results of tools become messages of their own, in place. Raises `ApiError` for
    results of calls that nobody made, and for a last turn that the answer would have to continue.
    """
    made: list[Message] = []
    known: set[str] = set()  # ids of the calls so far
    for place, turn in enumerate(request.messages):
        if isinstance(turn, UserTurn):
            _add_user(made, turn, known, f"messages[{place}]")
        elif isinstance(turn, AssistantTurn):
            _add_assistant(made, turn)
            known |= {block.id for block in turn.content if isinstance(block, ToolUseBlock)}
        else:
            made.append(marked({"role": "system", "content": _text(turn.content)}, *_controls(turn.content)))
    if isinstance(request.messages[-1], AssistantTurn):
        problem = "The last message is the assistant's, and answers begin anew here: end with one of the user."
        raise refused("messages", problem)
    shown = with_instructions(None if request.system is None else _text(request.system), made)
    tools = [tool.cache_control for tool in request.tools or ()]
    shown[0] = marked(shown[0], *_controls(request.system or ""), *tools)  # templates tell of tools before anything else
    shown[-1] = marked(shown[-1], request.cache_control)
    return shown


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _controls(content: str | Sequence[TextBlock | ToolUseBlock | ToolResultBlock]) -> list[CacheControl | None]:
    return [] if isinstance(content, str) else [block.cache_control for block in content]


def _add_user(messages: list[Message], turn: UserTurn, known: Collection[str], name: str) -> None:
    if isinstance(turn.content, str):
        messages.append({"role": "user", "content": turn.content})
        return
    texts: list[TextBlock] = []

    def say() -> None:
        if texts:
            messages.append(marked({"role": "user", "content": _text(texts)}, *_controls(texts)))
            texts.clear()

    for place, block in enumerate(turn.content):
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        say()
        if block.tool_use_id not in known:
            field = f"{name}.content[{place}].tool_use_id"
            problem = (
                f"{field} is {block.tool_use_id!r}, which is no tool use of the conversation: send that before its result."
            )
            raise refused(field, problem)
        result = {"role": "tool", "content": _result(block), "tool_call_id": block.tool_use_id}
        messages.append(marked(result, block.cache_control, *_controls(block.content or "")))
    say()
    if not turn.content:
        messages.append({"role": "user", "content": ""})


def _result(block: ToolResultBlock) -> str:
    text = _text(block.content or "")
    return f"Error: {text}" if block.is_error else text


def _add_assistant(messages: list[Message], turn: AssistantTurn) -> None:
    """One message, or more where text follows a call: templates write text before calls."""
    messages.append({"role": "assistant", "content": ""})
    if isinstance(turn.content, str):
        messages[-1]["content"] = turn.content
        return
    for block in turn.content:
        if not isinstance(block, TextBlock):
            add_call(messages, block.id, block.name, json.dumps(block.input, ensure_ascii=False))
        elif "tool_calls" in messages[-1]:
            messages.append({"role": "assistant", "content": block.text})
        else:
            messages[-1]["content"] += block.text
    messages[-1] = marked(messages[-1], *_controls(turn.content))


def chat_tools(tools: Iterable[ClientTool]) -> list[dict[str, Any]]:
    """As chat completions have them. Raises `ApiError`."""
    made = []
    for place, tool in enumerate(tools):
        if tool.input_schema.get("type", "object") != "object":
            raise refused(f"tools[{place}].input_schema", f"tools[{place}].input_schema must be a schema of type 'object'.")
        function: dict[str, Any] = {"name": tool.name}
        if tool.description is not None:
            function["description"] = tool.description
        function["parameters"] = tool.input_schema
        if tool.strict is not None:
            function["strict"] = tool.strict
        made.append({"type": "function", "function": function})
    return made


def chat_choice(choice: ClientToolChoice | None) -> tuple[ToolChoice, bool]:
    """What must be called, and whether more than one call may be made."""
    if isinstance(choice, NoToolChoice):
        return "none", True
    parallel = choice is None or not choice.disable_parallel_tool_use
    if isinstance(choice, OneToolChoice):
        return NamedTool(choice.name), parallel
    return "required" if isinstance(choice, AnyToolChoice) else "auto", parallel


def sampling(request: MessagesRequest, temperature: float) -> dict[str, Any]:
    """Arguments for `SamplingParams`, but for the number of tokens. `temperature`: where the request does not say."""
    made: dict[str, Any] = {
        "temperature": temperature if request.temperature is None else request.temperature,
        "stop": tuple(request.stop_sequences or ()),
        "prediction": None if request.prediction is None else request.prediction.text,
    }
    names = ("top_p", "top_k", "min_p", "repetition_penalty", "seed", "speculate", *MTP_FIELDS)
    return made | {name: value for name in names if (value := getattr(request, name)) is not None}


def messages_usage(usage: Mapping[str, Any]) -> MessagesUsage:
    """From the form of chat completions."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return MessagesUsage(
        input_tokens=usage["prompt_tokens"] - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage["completion_tokens"],
    )


def stop_sequence(
    stops: Sequence[str], choice: Choice, tokenizer: Tokenizer, prompt_ids: Sequence[int], shown: Sequence[int]
) -> str | None:
    """Which of `stops` ended an answer, if one did. `shown`: control tokens that its text shows.

    The text of the tokens goes on where the answer was cut. Of the stop strings that may stand there the shortest was complete
    first, and that is the one that counted.
    """
    text = Detokenizer(tokenizer, (), prompt_ids, shown)
    for token in choice.token_ids:
        text.push(token)
    text.flush()
    rest = text.take()[len(choice.text) :]
    return min((stop for stop in stops if rest.startswith(stop)), key=len, default=None)
