"""Secret prompts in pairs that differ in one thing: what an observer of the network may want to know of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from obole.bench import texts
from obole.bench.classes import user, words
from obole.bench.load import WORDS
from obole.bench.observe import Secret
from obole.errors import InvalidRequest

RECORDS = 12  # of a list that is asked back
CACHED_WORDS = 200  # of a prompt that is long to read
TOPICS = ("a story", "a program", "a recipe", "a letter")


@dataclass(frozen=True, slots=True)
class Question:
    """What the observer wants to know, and its secrets; the labels are 0 and 1, or the numbers of topics."""

    name: str
    secrets: tuple[Secret, ...]


def copied(count: int, seed: int, fields: Mapping[str, Any]) -> Question:
    """1: the answer is a list that stands in the prompt; 0: a story, after the same conversation."""
    draws = np.random.default_rng((seed, 1))
    found = []
    for i in range(2 * count):
        listed = _records(draws)
        story = texts.STORIES[int(draws.integers(len(texts.STORIES)))]
        asked = "Repeat it again, word by word." if i % 2 else f"Now write a short story about {story}."
        turns = [user(f"Repeat this list.\n{listed}"), {"role": "assistant", "content": listed}, user(asked)]
        found.append(Secret(i % 2, turns, fields))
    return Question("copied or not", tuple(found))


def cached(count: int, seed: int, fields: Mapping[str, Any]) -> Question:
    """1: the same prompt was asked just before; 0: it is new. Both are of as many words."""
    draws = np.random.default_rng((seed, 2))
    found = []
    for i in range(2 * count):
        text = f"{words(draws, CACHED_WORDS)}\n\nWrite a short story with some of these words."
        found.append(Secret(i % 2, [user(text)], fields, first=bool(i % 2)))
    return Question("cached or not", tuple(found))


def topics(count: int, seed: int, fields: Mapping[str, Any]) -> Question:
    """Which of four things is asked for, with the same words otherwise."""
    draws = np.random.default_rng((seed, 3))
    found = []
    for i in range(len(TOPICS) * max(2, count // 2)):
        label = i % len(TOPICS)
        found.append(Secret(label, [user(f"Write {TOPICS[label]} that has to do with {words(draws, 2)}.")], fields))
    return Question("topic", tuple(found))


QUESTIONS: Mapping[str, Callable[[int, int, Mapping[str, Any]], Question]] = {
    "copied": copied,
    "cached": cached,
    "topic": topics,
}


def questions(names: Sequence[str], count: int, seed: int, fields: Mapping[str, Any]) -> list[Question]:
    """`count` secrets of each label, of topics half as many. Raises `InvalidRequest` for what is no question."""
    unknown = [name for name in names if name not in QUESTIONS]
    if unknown or not names:
        raise InvalidRequest("question", f"{''.join(unknown[:1])!r} is no question: name some of {', '.join(QUESTIONS)}.")
    return [QUESTIONS[name](count, seed, fields) for name in names]


def _records(draws: np.random.Generator) -> str:
    chosen = draws.choice(len(WORDS), (RECORDS, 2))
    return "\n".join(f"{i + 1}. {WORDS[a]} {WORDS[b]}" for i, (a, b) in enumerate(chosen))
