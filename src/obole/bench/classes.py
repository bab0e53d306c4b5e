"""Workloads by class, as conversations for a server: what is asked, and how much of it servers could copy or find cached.

- `chat`, `prose`: questions and stories with nothing to copy; the floor of what a server promises;
- `edit`, `rag`, `extract`: answers that copy from the prompt, as in `workloads.py`;
- `agent`: sessions of several requests, each with all before it and one result of a tool more;
- `shared`: short questions behind one long system prompt.

Every prompt but its shared part is another one, so that no cache finds more of it than a real one would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from obole.bench import texts, workloads
from obole.bench.load import WORDS, Messages
from obole.errors import InvalidRequest

RANDOM = "random"  # words without sense, of a length that was asked for
NOTHING_TO_COPY = ("chat", "prose", RANDOM)
CHARACTERS_PER_TOKEN = 3.5  # about, of English and Python; a server's tokenizer is not known
CONTEXT = 2048  # tokens that every server has
TURNS = 6  # requests of an agent's session
TOOL_CHARACTERS = 600  # of a result
SYSTEM_CHARACTERS = 4000
CHAT_TOKENS, AGENT_TOKENS, SHARED_TOKENS = 128, 48, 64


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: its class, the conversation, and the most tokens of the answer."""

    kind: str
    messages: Messages
    max_tokens: int


def stream_of(kinds: tuple[str, ...], most_tokens: int, *seed: int) -> Iterator[Asked]:
    """Requests of these classes in equal shares, in a random order that the seed determines; without an end.

    `most_tokens`: of an answer, whatever its class would have. Raises `InvalidRequest` for what is no class.
    """
    check(kinds)
    draws = np.random.default_rng(seed)
    sources = {kind: CLASSES[kind](np.random.default_rng((*seed, number))) for number, kind in enumerate(kinds)}
    while True:
        for kind in draws.permutation(kinds):
            one = next(sources[str(kind)])
            yield Asked(one.kind, one.messages, min(most_tokens, one.max_tokens))


def check(kinds: tuple[str, ...]) -> None:
    unknown = [kind for kind in kinds if kind not in CLASSES]
    if unknown or not kinds or len(set(kinds)) < len(kinds):
        named = f"{unknown[0]!r} is no workload" if unknown else "A workload is named twice, or none is"
        raise InvalidRequest("workload", f"{named}: name some of {', '.join(CLASSES)}, each once.")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def words(draws: np.random.Generator, count: int) -> str:
    return " ".join(WORDS[i] for i in draws.choice(len(WORDS), count))


def approximate_tokens(text: str) -> int:
    return int(len(text) / CHARACTERS_PER_TOKEN)


def _chat(draws: np.random.Generator) -> Iterator[Asked]:
    while True:
        text = f"{words(draws, 3).capitalize()}: explain in a few sentences what these have to do with each other."
        yield Asked("chat", [user(text)], CHAT_TOKENS)


def _prose(draws: np.random.Generator) -> Iterator[Asked]:
    while True:
        subject = texts.STORIES[int(draws.integers(len(texts.STORIES)))]
        text = f"With the words {words(draws, 3)}, write a short story about {subject}."
        yield Asked("prose", [user(text)], workloads.ANSWER_TOKENS["prose"])


def _tasks(kind: str, tasks: list[workloads.Task], draws: np.random.Generator) -> Iterator[Asked]:
    """Tasks in turn, each time with another first line."""
    while True:
        for task in tasks:
            yield Asked(kind, [user(f"Note of {words(draws, 3)}.\n\n{task.prompt}")], task.max_tokens)


def _edit(draws: np.random.Generator) -> Iterator[Asked]:
    return _tasks("edit", workloads.edits(approximate_tokens, CONTEXT), draws)


def _rag(draws: np.random.Generator) -> Iterator[Asked]:
    return _tasks("rag", workloads.documents(), draws)


def _extract(draws: np.random.Generator) -> Iterator[Asked]:
    return _tasks("extract", workloads.extractions(), draws)


def _agent(draws: np.random.Generator) -> Iterator[Asked]:
    """A session after another. What the assistant said before is given, so that a request need not wait for an answer."""
    source = workloads.proof_prompts()[-1][1]
    while True:
        system = {"role": "system", "content": f"You work on the task {words(draws, 4)}. Use the results of the tools."}
        so_far: list[dict[str, Any]] = [system, user(f"Look up {words(draws, 3)}, and say what to do next.")]
        for turn in range(TURNS):
            yield Asked("agent", list(so_far), AGENT_TOKENS)
            start = int(draws.integers(max(1, len(source) - TOOL_CHARACTERS)))
            so_far.append({"role": "assistant", "content": f"Step {turn + 1}: I look up {words(draws, 2)}."})
            so_far.append(user(f"Result of the tool:\n{source[start : start + TOOL_CHARACTERS]}\nWhat next?"))


def _shared(draws: np.random.Generator) -> Iterator[Asked]:
    rules = "\n\n".join(task.prompt for task in workloads.documents())[:SYSTEM_CHARACTERS]
    system = {"role": "system", "content": f"You answer questions about Python, from these documents.\n\n{rules}"}
    while True:
        asked = user(f"In one sentence: what do the documents say about {words(draws, 2)}?")
        yield Asked("shared", [system, asked], SHARED_TOKENS)


CLASSES: Mapping[str, Callable[[np.random.Generator], Iterator[Asked]]] = {
    "chat": _chat,
    "edit": _edit,
    "rag": _rag,
    "extract": _extract,
    "prose": _prose,
    "agent": _agent,
    "shared": _shared,
}
