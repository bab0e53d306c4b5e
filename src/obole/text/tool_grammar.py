"""Grammars that force tool calls, in the Lark dialect of llguidance.

Only text is made here: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md says what it means. Calls are
written exactly as models were trained to write them (what `tojson` of a chat template yields), so that all but the
values is forced and no model is led into endless white space.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from obole.errors import InvalidRequest
from obole.text.added_tokens import AddedToken
from obole.text.tool_formats import ToolFormat

_DEPTH = 100  # of nested schemas
# Options of llguidance's JSON schemas: the separators of Python's json.dumps and no other white space.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_PARAMETERS = {"type": "object", "properties": {}}
# Schemas that say no more than this can be closed: nothing else in them can ask for other properties.
_NOTES = frozenset(
    {"type", "title", "description", "default", "examples", "deprecated", "$schema", "$comment", "$defs", "definitions"}
)
_PLAIN_OBJECT = _NOTES | {"properties", "required", "additionalProperties"}
_PLAIN_ARRAY = _NOTES | {"items", "minItems", "maxItems"}
_TYPES = {
    "dict": "object", "hashmap": "object", "map": "object", "object": "object",
    "list": "array", "tuple": "array", "arraylist": "array", "set": "array", "array": "array",
    "float": "number", "double": "number", "number": "number",
    "int": "integer", "long": "integer", "integer": "integer",
    "bool": "boolean", "boolean": "boolean",
    "str": "string", "char": "string", "string": "string",
    "any": None, "": None,
}  # fmt: skip
_SUBSCHEMA = frozenset({"items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else"})
_SUBSCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "anyOf", "oneOf", "allOf", "prefixItems"})


def tool_grammar(
    format: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    required: bool,
    name: str | None = None,
    parallel: bool = True,
    added: Iterable[AddedToken] = (),
) -> str:
    """A Lark grammar for llguidance under which calls are right: a tool's name, and arguments that match its schema.

    `tools`: as in requests, `{"type": "function", "function": {"name", "parameters", ...}}` or the inner object alone.
    `required`, or `name` for one tool: the answer is calls only. Otherwise any text may stand before, between and after
    calls, and only what begins like a call has to be one. `parallel`: more than one call may follow; if not, the answer is
    over after one. `added`: the tokenizer's added tokens; markers among them are written as these tokens.

    Arguments have no properties beyond those that a plain schema lists, unless it says `additionalProperties`.
    Raises `InvalidRequest` (field "tools" or "tool_choice"). Schemas are checked only as far as they are rewritten here:
    what llguidance cannot do it reports when the grammar is compiled.
    """
    functions = _functions(tools)
    if not functions:
        raise InvalidRequest("tools", "A call needs at least one tool: give tools, or leave tool_choice out.")
    if name is not None:
        if name not in functions:
            raise InvalidRequest("tool_choice", f"tool_choice names {name!r}, which is not one of the tools: name one that is.")
        functions = {name: functions[name]}
    forced = required or name is not None
    # In free text a marker that plain letters can spell must count however it is spelt; a control token has one spelling.
    ids = {token.text: token.id for token in added if token.text in format.markers and (forced or token.control)}
    notation = _Notation(format, ids)
    rules = notation.forced(parallel) if forced else notation.free(parallel)
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    for i, (tool, schema) in enumerate(functions.items()):
        rules.append(f"call_{i}: {notation.call(tool, f'arguments_{i}')}")
        rules.append(f"arguments_{i}: %json {json.dumps({**schema, 'x-guidance': _LAYOUT})}")
    return "%llguidance {}\n" + "\n".join(rules) + "\n"


class _Notation:
    """The rules of one format; `call` is one call without the markers around it. `ids`: markers that are tokens."""

    def __init__(self, format: ToolFormat, ids: Mapping[str, int]) -> None:
        self._name = format.name
        self._ids = ids
        self._marker = format.markers[0]
        self._call_ids = "[CALL_ID]" in format.markers

    def forced(self, parallel: bool) -> list[str]:
        """Rules for nothing but calls."""
        if self._name == "llama3":
            return [f"start: {self._body(parallel)}"]
        more = {"hermes": ' ("\\n" block)*', "mistral-args": " block*"}.get(self._name, "") if parallel else ""
        return [f"start: block{more}", f"block: {self._token(self._marker)} {self._body(parallel)}"]

    def free(self, parallel: bool) -> list[str]:
        """Rules for text in which calls may occur."""
        marker, body = self._token(self._marker), self._body(parallel)
        if self._name == "llama3":
            marked = f" | TEXT {marker} {body}" if self._marker in self._ids else ""
            return [f"start: TEXT | {body}{marked}", "TEXT: /[ \\t\\r\\n]*([^ \\t\\r\\n{](.|\\n)*)?/"]
        lead = f"lead: TEXT {marker}" if self._marker in self._ids else f"lead[lazy]: TEXT {marker}"
        start = "start: block* TEXT" if parallel and self._name != "mistral" else "start: TEXT | block"
        return [start, f"block: lead {body}", lead, "TEXT: /(.|\\n)*/"]

    def _body(self, parallel: bool) -> str:
        """What follows the marker."""
        if self._name == "hermes":
            return f'"\\n" call "\\n" {self._token("</tool_call>")}'
        if self._name == "mistral":
            return '" "? "[" call {} "]"'.format('(", " call)*' if parallel else "")
        if self._name == "llama3":
            return 'call ("; " call)*' if parallel else "call"
        return "call"

    def call(self, name: str, arguments: str) -> str:
        """One call; `arguments` is the rule of its arguments."""
        if self._name == "mistral-args":
            call_id = f"{self._token('[CALL_ID]')} /[A-Za-z0-9]{{9}}/ " if self._call_ids else ""
            return f"{_literal(name)} {call_id}{self._token('[ARGS]')} {arguments}"
        key = "parameters" if self._name == "llama3" else "arguments"
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
        return f'{_literal(head)} {arguments} "}}"'

    def _token(self, marker: str) -> str:
        return f"<[{self._ids[marker]}]>" if marker in self._ids else _literal(marker)


def _literal(text: str) -> str:
    return json.dumps(text)


def _functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Schemas of the arguments by the names of the tools."""
    found: dict[str, dict[str, Any]] = {}
    for place, tool in enumerate(tools):
        where = f"tools[{place}]"
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
            raise InvalidRequest("tools", f"{where} must be a function with a name.")
        if name in found:
            raise InvalidRequest("tools", f"{where} has the name {name!r} of another tool: give each tool its own name.")
        schema = function.get("parameters")
        if schema is None:
            schema = _NO_PARAMETERS
        if not isinstance(schema, Mapping) or schema.get("type", "object") != "object":
            raise InvalidRequest("tools", f"{where}.parameters must be a JSON schema of type 'object'.")
        found[name] = _closed(_bounded({"type": "object", **schema}, f"{where}.parameters"))
    return found


def _bounded(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of a schema that is not nested too deeply for parsers."""
    if depth > _DEPTH:
        raise InvalidRequest("tools", f"{where} is nested more than {_DEPTH} levels deep: flatten it.")
    if isinstance(value, Mapping):
        return {key: _bounded(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_bounded(item, where, depth + 1) for item in value]
    return value


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` in each plain object that lists its properties."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    properties, required = made.get("properties"), made.get("required", [])
    if made.get("type") == "array" and _PLAIN_ARRAY.issuperset(made):
        made["items"] = _closed(made.get("items", {}))
    elif made.get("type") == "object" and isinstance(properties, dict) and _PLAIN_OBJECT.issuperset(made):
        made["properties"] = {key: _closed(value) for key, value in properties.items()}
        if isinstance(required, list) and all(key in properties for key in required if isinstance(key, str)):
            made.setdefault("additionalProperties", False)
    return made


def normalise_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema from one whose types have the names of a programming language ("dict", "float", "ArrayList", "any").

    Types that allow everything are left out, so that `{"type": "any"}` becomes `{}`; a list of items becomes `prefixItems`;
    unknown names stay. Raises `InvalidRequest` (field "tools") for schemas nested more than 100 levels deep.
    """
    made: dict[str, Any] = _renamed(_bounded(schema, "The schema"))
    return made


def _renamed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    kind = made.pop("type", None)
    if isinstance(kind, str):
        kind = _TYPES.get(kind.lower(), kind)
    elif isinstance(kind, list):
        kinds = [_TYPES.get(item.lower(), item) if isinstance(item, str) else item for item in kind]
        kind = None if None in kinds else list(dict.fromkeys(kinds))
    if kind is not None:
        made = {"type": kind, **made}
    if isinstance(made.get("items"), list):
        made["prefixItems"] = made.pop("items")
    for key in _SUBSCHEMA.intersection(made):
        made[key] = _renamed(made[key])
    for key in _SUBSCHEMAS.intersection(made):
        inner = made[key]
        if isinstance(inner, dict):
            made[key] = {name: _renamed(item) for name, item in inner.items()}
        elif isinstance(inner, list):
            made[key] = [_renamed(item) for item in inner]
    return made
