"""Texts to train on: read from a file, cut into rows of one length.

A row holds one text, or a piece of a long one, and never parts of two: what came before the beginning of a text would be
noise to what is learned about it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from obole.errors import InvalidRequest
from obole.text.templates import ChatTemplate
from obole.text.tokenizer import Tokenizer

SHAPES = '{"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}'
PARAGRAPH = re.compile(r"\n[ \t\r]*\n")
TAIL = 3  # tokens in which a chat template closes its last message


@dataclass(frozen=True, eq=False, slots=True)
class Rows:
    """N texts of at most W tokens. `ids` (N, W) int32, padded; `lengths` (N,) int64: tokens that are text.

    `short`: texts left out for being too short.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    short: int

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def digest(self) -> str:
        """BLAKE3 of all that is trained on, hexadecimal."""
        return blake3(self.ids.numpy().tobytes() + self.lengths.numpy().tobytes()).hexdigest()


def pack(texts: Iterable[list[int]], width: int, least: int, pad: int) -> Rows:
    """Rows of `width` tokens: texts as they are, long ones in pieces. What is shorter than `least` tokens is left out.

    Raises `InvalidRequest` (field "data") if nothing is left.
    """
    pieces: list[list[int]] = []
    count = short = 0
    for text in texts:
        count += 1
        short += len(text) < least
        pieces += [text[i : i + width] for i in range(0, max(len(text) - least + 1, 0), width)]
    if not pieces:
        what = f"all {count} texts are shorter than a region ({least} tokens)" if count else "there is no text"
        raise InvalidRequest("data", f"Nothing to train on: {what}. Give longer texts, or set fewer --slots or more --regions.")
    ids = np.full((len(pieces), width), pad, np.int32)
    for row, piece in zip(ids, pieces, strict=True):
        row[: len(piece)] = piece
    return Rows(torch.from_numpy(ids), torch.tensor([len(piece) for piece in pieces]), short)


def read_texts(path: Path, tokenizer: Tokenizer, template: ChatTemplate | None, end_id: int | None) -> Iterator[list[int]]:
    """Token ids of the texts in a file, each ended by `end_id`: see `entries`.

    Raises `InvalidRequest` (field "data") for a file that can't be read, and for a line that is none of the shapes.
    """
    for place, entry in entries(path):
        try:
            yield _ended(_text_ids(entry, tokenizer, template), tokenizer, end_id)
        except InvalidRequest as error:
            raise InvalidRequest("data", f"{path}, {place}: {error}") from None


def read_prompts(path: Path, tokenizer: Tokenizer, template: ChatTemplate | None) -> list[list[int]]:
    """Token ids of the prompts in a file: texts to go on from, prompts without their completion, messages to be answered.

    Raises `InvalidRequest` (field "prompts").
    """
    found = []
    for place, entry in entries(path):
        try:
            if "messages" in entry:
                found.append(_chat(template).encode(entry["messages"]))
            else:
                found.append(
                    tokenizer.encode(_string(entry, "prompt" if "prompt" in entry else "text"), special=True, bos=True)
                )
        except InvalidRequest as error:
            raise InvalidRequest("prompts", f"{path}, {place}: {error}") from None
    if not found:
        raise InvalidRequest("prompts", f"{path} holds no prompt.")
    return found


def entries(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What a file holds, and where: the lines of a .jsonl, else paragraphs, separated by empty lines, as {"text": ...}.

    Raises `InvalidRequest` (field "data").
    """
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest("data", f"{path} is not UTF-8 text (byte {error.start}); convert it first.") from None
    except OSError as error:
        raise InvalidRequest("data", f"{path} cannot be read: {error.strerror}.") from None
    if path.suffix != ".jsonl":
        paragraphs = (part.strip() for part in PARAGRAPH.split(text))
        yield from ((f"paragraph {n}", {"text": part}) for n, part in enumerate(paragraphs, 1) if part)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _object(line, f"{path}, line {number}")


def _object(line: str, place: str) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("data", f"{place} is not JSON ({error}).") from None
    if not isinstance(found, dict):
        raise InvalidRequest("data", f"{place} must be one of {SHAPES}.")
    return found


def _text_ids(entry: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate | None) -> list[int]:
    if "messages" in entry:
        return _chat(template).encode(entry["messages"], add_generation_prompt=False)
    if "prompt" in entry:
        return tokenizer.encode(_string(entry, "prompt") + _string(entry, "completion"), special=True, bos=True)
    return tokenizer.encode(_string(entry, "text"), special=True, bos=True)


def _chat(template: ChatTemplate | None) -> ChatTemplate:
    if not template:
        raise InvalidRequest("messages", "the model has no chat template; give texts, or prompts and completions.")
    return template


def _string(entry: Mapping[str, Any], name: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(name, f"it must be one of {SHAPES}, with text that is not empty.")
    return value


def _ended(ids: list[int], tokenizer: Tokenizer, end_id: int | None) -> list[int]:
    """The text up to the end that it has already, behind which a template may write a newline, or with one."""
    ends = tokenizer.end_ids | ({end_id} if end_id is not None else set())
    for place in range(len(ids) - 1, max(len(ids) - 1 - TAIL, 0), -1):
        if ids[place] in ends:
            return ids[: place + 1]
    return ids if end_id is None else [*ids, end_id]
