"""Which notation a model was trained to write its tool calls in, told from its chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from obole.text.added_tokens import AddedToken


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A notation of tool calls, and the strings in it that may be tokens of their own.

    Where a marker is a control token, answers do not show it (`Tokenizer.token_bytes`) and a call cannot be told from
    text in front of it: the detokenizer of an answer that may hold calls has to show the ids in `shown_tokens`.
    """

    name: str
    markers: tuple[str, ...]


# <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>, any number of them: Hermes 2 and 3, Qwen 2.5 and 3, Granite 4.
HERMES = ToolFormat("hermes", ("<tool_call>", "</tool_call>"))
# {"name": "f", "parameters": {...}} as the whole answer, sometimes after a marker: Llama 3.1 to 3.3.
LLAMA3 = ToolFormat("llama3", ("<|python_tag|>",))
# [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]: Mistral until Small 3.1.
MISTRAL = ToolFormat("mistral", ("[TOOL_CALLS]",))
# [TOOL_CALLS]f[ARGS]{...}, any number of them: Mistral's tokenizers of versions 11 and 13; version 11 has call ids as well.
MISTRAL_ARGS = ToolFormat("mistral-args", ("[TOOL_CALLS]", "[ARGS]"))
MISTRAL_CALL_ID = ToolFormat("mistral-args", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"))

_ARGUMENTS_KEY = re.compile(r'"arguments\\?":')  # within a string of the template the quote is escaped
_PARAMETERS_KEY = re.compile(r'"parameters\\?":')
# Marks of other notations within <tool_call>: XML arguments (Qwen3-Coder, Nemotron 3, GLM) and lists (Apriel).
_NOT_HERMES = ("<function=", "<parameter", "<arg_key>", "<tool_calls>")


def detect_format(template_source: str) -> ToolFormat | None:
    """The notation of tool calls that a chat template writes; None if it writes none or one that is not known here."""
    if "[TOOL_CALLS]" in template_source:
        if "[ARGS]" not in template_source:
            return MISTRAL
        return MISTRAL_CALL_ID if "[CALL_ID]" in template_source else MISTRAL_ARGS
    if "<tool_call>" in template_source:
        other = any(mark in template_source for mark in _NOT_HERMES)
        return HERMES if not other and _ARGUMENTS_KEY.search(template_source) else None
    if "<|start_header_id|>" in template_source and _PARAMETERS_KEY.search(template_source):
        return LLAMA3
    return None


def shown_tokens(format: ToolFormat, added: Iterable[AddedToken]) -> frozenset[int]:
    """Ids of the control tokens that answers have to show as text, so that calls in this format can be found in it."""
    return frozenset(token.id for token in added if token.control and token.text in format.markers)
