"""JSON schemas, checked before they are compiled: what cannot be enforced exactly is refused by name.

`llguidance` passes over keywords that its draft of the standard does not know, and reads numbers as doubles. The check walks
whatever the root of the schema reaches, through local references, without recursion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Never
from urllib.parse import unquote

from obole.errors import InvalidRequest

NESTING = 100  # levels of brackets; the JSON reader of llguidance takes 128
WHITESPACE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
INTEGERS = 2**53 - 1  # readers of JSON agree on integers up to here (RFC 7493, section 2.2), and so does llguidance
_LONG = 2**64  # bounds up to here are those of integer types
_PATH = 120  # characters of a path that a message shows

_SCHEMA_MAPS = {"properties", "patternProperties"}
_SCHEMA_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMAS = {"items", "additionalItems", "additionalProperties"}
_LOWER = {"minimum", "exclusiveMinimum"}
_UPPER = {"maximum", "exclusiveMaximum"}
_SIZES = {"minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength"}
_TEXTS = {"type", "required"}
_ENFORCED = _SCHEMA_MAPS | _SCHEMA_LISTS | _SCHEMAS | _LOWER | _UPPER | _SIZES | _TEXTS
_ENFORCED |= {"$ref", "const", "enum", "multipleOf", "pattern", "format"}
_ANNOTATIONS = {
    *("$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default", "examples"),
    *("example", "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema"),
    *("discriminator", "externalDocs", "xml"),
}
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


def strict_schema(text: str) -> dict[str, Any]:
    """A JSON schema in the form in which llguidance enforces all of it, for a grammar of its own or after `%json` in Lark.

    Outputs are written on one line with `", "` and `": "` between items, as Python's `json.dumps` writes them: nothing else
    bounds the whitespace that a model may write, and what is fixed need not be computed. Properties come in the order of
    the schema. `oneOf` is accepted where its options exclude each other. Bounds of 64-bit integers are
    drawn in to ±(2**53 - 1).

    Raises `InvalidRequest` (field "response_format"), naming the keyword, for keywords that are unknown or cannot be
    enforced, references to other documents, and numbers that doubles do not hold.
    """
    root = _parse(text)
    seen: dict[int, dict[str, Any]] = {}
    pending: list[tuple[Any, str]] = [(root, "#")]
    while pending:
        schema, path = pending.pop()
        if isinstance(schema, bool) or id(schema) in seen:
            continue
        if not isinstance(schema, dict):
            refuse(f"{path} must be a schema (an object, true or false), not {json.dumps(schema)[:40]}")
        seen[id(schema)] = schema
        _check_keywords(schema, path)
        pending += _children(schema, path, root)
    for schema in seen.values():
        _settle_one_of(schema, root)
    return root | {"x-guidance": WHITESPACE}


def refuse(problem: str) -> Never:
    raise InvalidRequest("response_format", f"The JSON schema cannot be enforced: {problem}.")


def check_nesting(text: str) -> None:
    """Raise `InvalidRequest` for JSON nested more than `NESTING` deep."""
    depth = 0
    for found in _BRACKETS.finditer(text):
        mark = found[0]
        depth += (mark in "[{") - (mark in "]}")
        if depth > NESTING:
            refuse(f"it is nested more than {NESTING} levels deep")


def _parse(text: str) -> dict[str, Any]:
    check_nesting(text)
    try:
        root = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except ValueError as error:
        refuse(f"it is not JSON ({error})")
    if not isinstance(root, dict):
        refuse("it must be an object")
    return root


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        refuse(f"the name {next(name for name in names if names.count(name) > 1)!r} stands twice in one object")
    return made


def _no_constant(name: str) -> Never:
    raise ValueError(f"{name} is no number in JSON")


def _check_keywords(schema: dict[str, Any], path: str) -> None:
    for keyword, value in schema.items():
        if keyword in _LOWER or keyword in _UPPER:
            schema[keyword] = _bound(keyword, value, path)
        elif keyword in ("const", "enum"):
            _check_numbers(value, f"{path}/{keyword}")
        elif keyword == "multipleOf":
            if not _is_number(value) or not 0 < value <= INTEGERS:
                refuse(f"{path}/multipleOf must be a number above 0 and below 2**53")
        elif keyword in _SIZES:
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
                refuse(f"{path}/{keyword} must be a whole number below 2**32")
        elif keyword in _TEXTS:
            one = [value] if keyword == "type" and isinstance(value, str) else value
            if not isinstance(one, list) or not all(isinstance(name, str) for name in one):
                refuse(f"{path}/{keyword} must be an array of texts" + " or one text" * (keyword == "type"))
        elif keyword in ("$id", "id") and path != "#" and isinstance(value, str):
            refuse(f"the keyword {keyword!r} at {path} starts another document, which is not supported")
        elif keyword == "x-guidance" or not (keyword in _ENFORCED or keyword in _ANNOTATIONS or keyword.startswith("x-")):
            refuse(f"the keyword {keyword!r} at {path} is not supported")
    if schema.get("minProperties", 0) > max(1, len(schema.get("required", ()))):
        refuse(f"minProperties at {path} exceeds the number of required properties, and other names may come up twice")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bound(keyword: str, value: Any, path: str) -> Any:
    """The value of a bound on numbers, drawn in where it lies further out than numbers are exact."""
    if isinstance(value, bool) and keyword.startswith("exclusive"):  # as in draft 4
        return value
    if not _is_number(value):
        refuse(f"{path}/{keyword} must be a number, not {json.dumps(value)[:40]}")
    outward = -value if keyword in _LOWER else value
    if INTEGERS < outward <= _LONG:
        return -INTEGERS if keyword in _LOWER else INTEGERS
    if abs(value) > INTEGERS:
        refuse(f"{path}/{keyword} lies beyond ±(2**53 - 1)")
    return value


def _check_numbers(value: Any, path: str) -> None:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += item
        elif isinstance(item, dict):
            pending += item.values()
        elif _is_number(item) and abs(item) > INTEGERS:
            refuse(f"{path} holds the number {item!s:.40}, which lies beyond ±(2**53 - 1)")


def _children(schema: Mapping[str, Any], path: str, root: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """The schemas that a schema is made of, with their paths."""
    for keyword, value in schema.items():
        here = f"{path}/{keyword}"
        if keyword == "$ref":
            yield _target(value, here, root), str(value)[:_PATH]
        elif keyword in _SCHEMA_MAPS:
            if not isinstance(value, dict):
                refuse(f"{here} must be an object")
            yield from ((item, f"{here}/{name[:_PATH]}"[-_PATH:]) for name, item in value.items())
        elif keyword in _SCHEMA_LISTS or (keyword == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                refuse(f"{here} must be an array")
            yield from ((item, f"{here}/{number}"[-_PATH:]) for number, item in enumerate(value))
        elif keyword in _SCHEMAS:
            yield value, here[-_PATH:]


def _target(reference: Any, path: str, root: dict[str, Any]) -> Any:
    """What a local reference (a JSON pointer, RFC 6901) points at."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        refuse(f"{path} must point into the schema itself ('#/...'), not at {json.dumps(reference)[:80]}")
    found: Any = root
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            refuse(f"{path} points at {reference[:80]!r}, which does not exist")
    return found


# --- oneOf ---


def _settle_one_of(schema: dict[str, Any], root: dict[str, Any]) -> None:
    """Turn `oneOf` into `anyOf` where no two options can hold together, so that both mean the same.

    llguidance sees that in the options themselves, but not in those behind references, which is how tagged unions come.
    """
    options = schema.get("oneOf")
    if not isinstance(options, list) or "anyOf" in schema or len(options) > 256:
        return
    shapes = [_shape(option, root) for option in options]
    if all(_exclusive(one, other) for place, one in enumerate(shapes) for other in shapes[:place]):
        items = [("anyOf" if keyword == "oneOf" else keyword, value) for keyword, value in schema.items()]
        schema.clear()
        schema.update(items)


def _shape(option: Any, root: dict[str, Any]) -> dict[str, frozenset[str]]:
    """What tells the instances of a schema apart: their types (""), and the values of properties that they must have."""
    told: dict[str, frozenset[str]] = {}
    chain = _chain(option, root)
    required = {name for link in chain for name in link.get("required", ())}
    for link in chain:
        if "type" in link:
            told[""] = frozenset([link["type"]] if isinstance(link["type"], str) else link["type"])
    if told.get("") == frozenset({"object"}):
        for link in chain:
            for name, schema in link.get("properties", {}).items():
                values = [_values(part) for part in _chain(schema, root)]
                if name in required and any(values):
                    told["/" + name] = next(filter(None, values))
    return told


def _chain(schema: Any, root: dict[str, Any]) -> list[dict[str, Any]]:
    """A schema and those that it refers to, one after the other: an instance satisfies all of them."""
    links: list[dict[str, Any]] = []
    while isinstance(schema, dict) and len(links) < 16:
        links.append(schema)
        schema = _target(schema["$ref"], "$ref", root) if "$ref" in schema else None
    return links


def _values(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The texts of which a schema allows no other, if it is made that way."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return None
    return frozenset(values)


def _exclusive(one: Mapping[str, frozenset[str]], other: Mapping[str, frozenset[str]]) -> bool:
    for name in one.keys() & other.keys():
        shared = one[name] & other[name]
        numbers = name == "" and {"integer", "number"} <= one[name] | other[name]
        if not shared and not numbers:
            return True
    return False
