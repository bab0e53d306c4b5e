"""Logs and traces of several kinds as `Record`s. The first line of a file says what it is, and all others must be like it.

- OpenAI-style JSON lines: `messages` or `prompt` beside the answer, or under `request`, `body` or `input`; the answer as a
  response with `choices`, `output` or `content`, as text, or as the last message; files of the batch API, requests and answers;
- traces of Mooncake (`hash_ids`, blocks of 512), of Azure (CSV, lengths only), and of agents' sessions (`requests`).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from obole.economics.reading import Line
from obole.economics.records import Blocks, Record, Reply, Text
from obole.errors import InvalidRequest

MOONCAKE_BLOCK = 512  # tokens
AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens"
MASK = (1 << 64) - 1
KNOWN = "JSON lines with messages or a prompt and the answer, a batch, or a trace of Mooncake, Azure or agents' sessions"

CHATS, BATCH, ANSWERS = "chats", "batch requests", "batch answers"
MOONCAKE, AZURE_KIND, SESSIONS = "Mooncake trace", "Azure trace", "agents' sessions"


class Foreign(ValueError):
    """A line is not what it should be; the message says in which way."""


def records(source: Iterable[Line], skip: list[str] | None = None) -> Iterator[tuple[str, Record | Reply]]:
    """(kind, record) of every request. Raises `InvalidRequest` with the number of the first line that is none; with `skip`,
    such a line is appended to that as a message, unless it is the first of its file."""
    file, kind = "", ""
    for line in source:
        first = line.file != file
        try:
            if first:
                file, kind = line.file, kind_of(line.text)
            yield from ((kind, one) for one in _of(kind, line.text, file, first))
        except Foreign as error:
            problem = f"Line {line.number} of {line.file} {error}"
            if skip is None or first:
                raise InvalidRequest("trace", problem if problem.endswith(".") else f"{problem}.") from None
            skip.append(problem)


def kind_of(first: bytes) -> str:
    """What a file is whose first line this is. Raises `Foreign`."""
    if first.removeprefix(b"\xef\xbb\xbf").strip() == AZURE:
        return AZURE_KIND
    if first.lstrip()[:1] == b"[":
        raise Foreign("begins a JSON array: write one object a line (jq -c '.[]').")
    document = _object(first)
    keys = document.keys()
    if {"hash_ids", "input_length"} <= keys:
        return MOONCAKE
    if "requests" in keys and "block_size" in keys:
        return SESSIONS
    if "custom_id" in keys and "body" in keys:
        return BATCH
    if "custom_id" in keys and "response" in keys:
        return ANSWERS
    if _asked(document) is not None or _is_own_log(document):
        return CHATS
    raise Foreign(f"is nothing that is known here; known are {KNOWN}.")


def _of(kind: str, line: bytes, file: str, first: bool) -> Iterator[Record | Reply]:
    if kind == AZURE_KIND:
        if not first:
            yield _azure(line)
        return
    document = _object(line)
    if kind == MOONCAKE:
        yield _mooncake(document)
    elif kind == SESSIONS:
        yield from _session(document, file)
    elif kind == ANSWERS:
        yield from _batch_answer(document)
    elif kind == BATCH:
        yield _chat({**_mapping(document.get("body"), "body"), "_key": document.get("custom_id")})
    elif _is_own_log(document):
        yield from _own_log(document)
    else:
        yield _chat(document)


# -- traces -----------------------------------------------------------------------------------------------------------------


def _azure(line: bytes) -> Blocks:
    try:
        at, context, generated = line.decode("ascii").strip().split(",")
        stamp = datetime.datetime.fromisoformat(at[:26])
        return Blocks(input_tokens=_count(int(context)), output_tokens=_count(int(generated)), at=stamp.timestamp())
    except ValueError:
        raise Foreign("is not a time and two numbers of tokens, as an Azure trace has them.") from None


def _mooncake(document: Mapping[str, Any]) -> Blocks:
    try:
        keys = [_mixed(_count(key)) for key in document["hash_ids"]]
        counts = _count(document["input_length"]), _count(document["output_length"])
        at = float(document["timestamp"]) / 1e3
    except (KeyError, TypeError, ValueError):
        raise Foreign("is no record of a Mooncake trace: timestamp, input_length, output_length, hash_ids.") from None
    if (len(keys) - 1) * MOONCAKE_BLOCK > counts[0]:
        raise Foreign(f"has {len(keys)} hash_ids, more than blocks of {MOONCAKE_BLOCK} tokens in {counts[0]}.")
    return Blocks(input_tokens=counts[0], output_tokens=counts[1], at=at, keys=keys, block_tokens=MOONCAKE_BLOCK)


def _session(document: Mapping[str, Any], file: str) -> Iterator[Blocks]:
    """The requests of one session, in their order. Hash ids that are local to it mean nothing elsewhere."""
    try:
        size = _count(document["block_size"])
        session = _mixed(hash_text(f"{file} {document.get('id')}"))
        salt = session if document.get("hash_id_scope") == "local" else 0
        for one in document["requests"]:
            for request in one.get("requests") or (one,):  # those of a subagent stand together
                if "in" not in request:
                    continue
                keys = [_mixed(_count(key) ^ salt) for key in request["hash_ids"]]
                counts = _count(request["in"]), _count(request.get("out") or 0)
                yield Blocks(
                    input_tokens=counts[0], output_tokens=counts[1], at=_time(request), session=session, keys=keys,
                    block_tokens=size,
                )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError):
        raise Foreign("is no session of agents: block_size, and requests with in, out and hash_ids.") from None


def _time(request: Mapping[str, Any]) -> float | None:
    return float(request["t"]) if "t" in request else None


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(value)
    return value


def _mixed(key: int) -> int:
    """A hash of 64 bits in which every bit depends on all of the key (the finisher of SplitMix64, Steele et al. 2014)."""
    key = (key + 0x9E3779B97F4A7C15) & MASK
    key = ((key ^ key >> 30) * 0xBF58476D1CE4E5B9) & MASK
    key = ((key ^ key >> 27) * 0x94D049BB133111EB) & MASK
    return key ^ key >> 31


def hash_text(text: str) -> int:
    """64 bits of a text, the same on every run."""
    import hashlib

    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


# -- requests with words ----------------------------------------------------------------------------------------------------


def _object(line: bytes) -> dict[str, Any]:
    try:
        document = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise Foreign("is not UTF-8 text.") from None
    except (ValueError, RecursionError):
        raise Foreign("is no whole JSON value: write one object a line.") from None
    if not isinstance(document, dict):
        raise Foreign("is no JSON object: write one object a line.")
    return document


def _mapping(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Foreign(f"has no object under {name}.")
    return value


def _asked(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of a record that has the prompt."""
    for inner in (document, *(document.get(name) for name in ("request", "body", "request_body", "input", "inputs"))):
        if isinstance(inner, dict) and ("messages" in inner or "prompt" in inner):
            return inner
        if isinstance(inner, dict) and isinstance(inner.get("body"), dict) and _asked(inner["body"]) is not None:
            return _asked(inner["body"])
    if isinstance(document.get("input"), str | list) and ("output" in document or "model" in document):
        return {**document, "prompt" if isinstance(document["input"], str) else "messages": document["input"]}
    return None


def _chat(document: Mapping[str, Any]) -> Text:
    asked = _asked(document)
    if asked is None:
        raise Foreign("has neither messages nor a prompt.")
    prompt = asked["messages"] if "messages" in asked else asked["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    answer, usage = _answered(document, asked)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        if not all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in prompt):
            raise Foreign("has messages without a role.")
        if answer is None and len(prompt) > 1 and prompt[-1]["role"] == "assistant":
            answer, prompt = _spoken(prompt[-1]), prompt[:-1]
        prompt = [_plain_message(one) for one in prompt]
        system = asked.get("system") or asked.get("instructions")
        if isinstance(system, str):
            prompt = [{"role": "system", "content": system}, *prompt]
    elif not (isinstance(prompt, str) or _is_ids(prompt)) or not prompt:
        raise Foreign("has a prompt that is no text, no list of messages and no list of token ids, or is empty.")
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    tools = asked.get("tools")
    return Text(
        prompt=prompt,
        answer=answer,
        tools=tools if isinstance(tools, list) and tools else None,
        tenant=_tenant(document, asked),
        input_tokens=_maybe(usage, "prompt_tokens", "input_tokens"),
        output_tokens=_maybe(usage, "completion_tokens", "output_tokens"),
        cached_tokens=_maybe(details if isinstance(details, dict) else {}, "cached_tokens"),
        key=str(document["_key"]) if document.get("_key") is not None else None,
    )


def _is_ids(prompt: object) -> bool:
    return isinstance(prompt, list) and all(isinstance(t, int) and not isinstance(t, bool) and 0 <= t < 2**31 for t in prompt)


def _maybe(usage: Mapping[str, Any], *names: str) -> int | None:
    return next((value for name in names if isinstance(value := usage.get(name), int)), None)


def _tenant(document: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    for place in (document, asked):
        for name in ("tenant", "api_key_id", "organization", "organization_id", "project_id", "user_id", "user"):
            if isinstance(place.get(name), str | int):
                return str(place[name])
    return ""


def _answered(document: Mapping[str, Any], asked: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The answer, if there is one, and the usage that comes with it."""
    usage: Mapping[str, Any] = {}
    for place in (document, asked):
        if isinstance(place.get("usage"), dict):
            usage = place["usage"]
    for place in (document, asked):
        for name in (
            "response",
            "response_body",
            "completion",
            "answer",
            "output",
            "outputs",
            "result",
            "choices",
            "generation",
        ):
            value = place.get(name)
            if isinstance(value, dict) and isinstance(value.get("body"), dict):
                value = value["body"]
            if name == "choices":
                value = {"choices": value}
            if value is None:
                continue
            if isinstance(value, dict) and isinstance(value.get("usage"), dict):
                usage = value["usage"]
            answer = _said(value)
            if answer is not None:
                return answer, usage
    return None, usage


def _said(value: Any) -> str | None:
    """The text of an answer in any of the forms that responses have; None for what is none."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):  # output items or content parts
        parts = [part for one in value if isinstance(one, dict) for part in (_spoken(one),) if part]
        return "".join(parts) if parts else None
    if not isinstance(value, dict):
        return None
    choices = value.get("choices")
    if isinstance(choices, list):
        first = choices[0] if choices else None
        if not isinstance(first, dict):
            return None
        message = first.get("message")
        return (
            _spoken(message) if isinstance(message, dict) else first.get("text") if isinstance(first.get("text"), str) else None
        )
    if "output" in value:
        return _said(value["output"])
    return _spoken(value) if "content" in value or "text" in value else None


def _spoken(message: Mapping[str, Any]) -> str:
    """What a message or a part of it says: text, and calls of tools as JSON."""
    kind = message.get("type")
    if kind in ("function_call", "tool_use"):
        return json.dumps({"name": message.get("name"), "arguments": message.get("arguments", message.get("input"))})
    content = message.get("content", message.get("text"))
    text = content if isinstance(content, str) else _said(content) if isinstance(content, list) else None
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            name, arguments = json.dumps(function.get("name")), function.get("arguments")
            given = arguments if isinstance(arguments, str) else json.dumps(arguments)
            text = (text or "") + f'{{"name": {name}, "arguments": {given}}}'
    return text or ""


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as chat templates take it: content as text; what is no text leaves its kind behind."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_spoken(part) or f"<{part.get('type')}>" if isinstance(part, dict) else str(part) for part in content)
    made = {"role": "system" if message["role"] == "developer" else message["role"], "content": content or ""}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        made["content"] = _spoken(message)
    return made


def _batch_answer(document: Mapping[str, Any]) -> Iterator[Reply]:
    key = document.get("custom_id")
    if key is None:
        raise Foreign("has no custom_id.")
    response = document.get("response")
    body = response.get("body") if isinstance(response, dict) else None
    answer = _said(body) if isinstance(body, dict) else None
    if answer is not None:
        yield Reply(str(key), answer)


def _is_own_log(document: Mapping[str, Any]) -> bool:
    """A line of the log of `obole serve`."""
    return "level" in document and "time" in document and ("request" in document or "message" in document)


def _own_log(document: Mapping[str, Any]) -> Iterator[Text]:
    prompts = document.get("prompt")
    if prompts is None:
        return
    for prompt in prompts if isinstance(prompts, list) else [prompts]:
        yield _chat(
            {"prompt" if isinstance(prompt, str) or _is_ids(prompt) else "messages": prompt, "tenant": document.get("tenant")}
        )
