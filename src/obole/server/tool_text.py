"""Tools for models whose chat template has none: told in the notation of Hermes, as plain text of the messages.

https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def in_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages (content: text) that say in their text what was in tools, calls of tools and results of tools.

    The tools go at the end of the system message that the conversation begins with, or into one of their own. Results are
    told by the user, those of one turn together.
    """
    made: list[Mapping[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            response = f"<tool_response>\n{message['content']}\n</tool_response>"
            if made and made[-1].get("results"):
                response = f"{made.pop()['content']}\n{response}"
            made.append({"role": "user", "content": response, "results": True})
        elif message.get("tool_calls"):
            calls = [_call(call["function"]) for call in message["tool_calls"]]
            text = "\n".join([message["content"], *calls] if message.get("content") else calls)
            made.append({"role": message["role"], "content": text})
        else:
            made.append(message)
    plain: list[Mapping[str, Any]] = [{key: value for key, value in one.items() if key != "results"} for one in made]
    if not tools:
        return plain
    introduction = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{introduction}"}, *plain[1:]]
    return [{"role": "system", "content": introduction}, *plain]


def _call(function: Mapping[str, Any]) -> str:
    """A call as the model would have written it, its arguments (JSON text) as they are."""
    name = json.dumps(function["name"], ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {function["arguments"]}}}\n</tool_call>'
