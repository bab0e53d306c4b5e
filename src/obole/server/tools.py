"""Tools of a request: what the model is shown, what its answer is held to, and how calls are found in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from obole.engine.engine import Engine
from obole.server.errors import refused
from obole.server.tool_text import in_text
from obole.text.grammar_schema import strict_schema
from obole.text.tool_calls import ToolCallParser
from obole.text.tool_formats import HERMES, ToolFormat, shown_tokens
from obole.text.tool_grammar import tool_grammar
from obole.types import Grammar


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A choice of one tool that must be called."""

    name: str


ToolChoice = str | NamedTool  # "none", "auto", "required"


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """`tools`: for the chat template; `grammar`: None where any text will do; `shown`: control tokens to appear as text."""

    tools: Sequence[dict[str, Any]]
    format: ToolFormat
    names: frozenset[str]
    grammar: Grammar | None
    shown: tuple[int, ...]

    def parser(self) -> ToolCallParser:
        """For one answer."""
        return ToolCallParser(self.format, self.names)


def plan_tools(
    engine: Engine, tools: Sequence[dict[str, Any]], choice: ToolChoice, parallel: bool, answer: Grammar | None = None
) -> ToolPlan | None:
    """What the tools of a request (in OpenAI's form) come to; None: no calls, as without tools.

    With the choice "none" the model is not shown the tools, so that it cannot call them. Answers are held to a grammar where
    a call is required, where a tool is `strict`, where only one call may be made, and where `answer` says what text without
    calls must look like. Raises `ApiError`, `InvalidRequest` (also with the field "response_format", for schemas of tools).
    """
    if not tools:
        if choice not in ("none", "auto"):
            raise refused("tool_choice", "tool_choice asks for a call, but there are no tools: give tools.")
        return None
    if choice == "none":
        return None
    format = engine.tool_format or HERMES
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise refused("tools", "This model has no tokenizer: leave tools out.")
    required = choice != "auto"
    name = choice.name if isinstance(choice, NamedTool) else None
    # also where it is not used: it checks the tools
    text = tool_grammar(
        format, tools, required=required or answer is not None, name=name, parallel=parallel, added=tokenizer.added
    )
    grammar = None
    if required or answer or not parallel or any(tool["function"].get("strict") for tool in tools):
        for tool in tools:
            strict_schema(json.dumps(tool["function"].get("parameters", {})))  # refuses what cannot be enforced
        grammar = Grammar("lark", text if required or answer is None else _or_answer(text, answer))
    names = frozenset(tool["function"]["name"] for tool in tools)
    return ToolPlan(tools, format, names, grammar, tuple(sorted(shown_tokens(format, tokenizer.added))))


def _or_answer(calls: str, answer: Grammar) -> str:
    """A grammar of calls or else of JSON, from one of calls alone. Raises `ApiError` for an answer of another kind."""
    if answer.kind not in ("json_schema", "json_object"):
        problem = (
            f"An answer of the format {answer.kind} cannot be told from a call: leave out one, or set tool_choice to none."
        )
        raise refused("response_format", problem)
    schema = json.dumps(strict_schema(answer.text or '{"type": "object"}'))
    return calls.replace("\nstart: ", "\ncalls: ", 1) + f"start: calls | answer\nanswer: %json {schema}\n"


def chat_prompt(
    engine: Engine, messages: Sequence[Mapping[str, Any]], plan: ToolPlan | None
) -> tuple[list[Mapping[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools as the model's chat template takes them: without tools of its own it is told them in the text."""
    tools = [] if plan is None else list(plan.tools)
    if engine.tool_format is None:
        return in_text(messages, tools), None
    return list(messages), tools or None
