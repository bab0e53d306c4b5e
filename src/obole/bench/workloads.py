"""What the benchmarks of speculation ask: edits of files, answers from documents, fields of a text, stories.

Files and documents are Python's own, read when they are needed: the same for everybody with the same version of Python.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from obole.bench import texts
from obole.errors import ConfigError, InvalidRequest

Count = Callable[[str], int]  # tokens of a text

FILE_TOKENS = (900, 1600)
FILES = 6
MODULES = (
    "sched", "fnmatch", "linecache", "reprlib", "genericpath", "getpass", "codeop", "textwrap", "glob", "queue", "shelve",
    "hmac", "copy", "getopt", "zipapp", "quopri", "string", "types", "csv", "shlex",
)  # fmt: skip
DOCUMENTS = 3  # in the prompt of a question
DOCUMENT_CHARACTERS = 1600
ANSWER_TOKENS = {"rag": 128, "extract": 160, "prose": 256}
SPECBENCH_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Task:
    """One message to the model, and the most tokens of its answer. Rows of a table gather tasks of a kind."""

    kind: str
    prompt: str
    max_tokens: int


def edits(count: Count, max_context: int) -> list[Task]:
    """Four changes to each of some files of the standard library, to be written out whole.

    Files have 900 to 1,600 tokens, fewer where the context holds no more; of longer modules the first definitions are taken.
    Raises `InvalidRequest` if the context is too short for any.
    """
    most = min(FILE_TOKENS[1], int((max_context - 200) / 2.4))
    least = min(FILE_TOKENS[0], most // 2)
    tasks: list[Task] = []
    files = 0
    for source in filter(None, map(_source_of, MODULES)):
        piece = leading_statements(source, count, most)
        names = function_names(piece)
        if not names or count(piece) < least:
            continue
        for kind, change in changes(piece, names).items():
            prompt = f"{change} Write out the whole file in one code block, and nothing else.\n\n```python\n{piece}```\n"
            tasks.append(Task(kind, prompt, int(1.2 * count(piece)) + 64))
        files += 1
        if files == FILES:
            break
    if not tasks:
        raise InvalidRequest(
            "max_context", f"No file of Python's library fits into a context of {max_context} tokens twice: make it longer."
        )
    return tasks


def changes(source: str, names: list[str]) -> dict[str, str]:
    """What is to be done to a file, by kind; `names`: of its functions, at least one."""
    often = max(names, key=lambda name: len(re.findall(rf"\b{name}\(", source)))
    return {
        "rename": f"Rename the function `{often}` to `do_{often.lstrip('_')}` in the following file, everywhere.",
        "insert": f'Insert the line `print("{names[-1]}")` as the first statement of `{names[-1]}` in the following file.',
        "type hints": "Add type hints to all parameters and return values in the following file, and change nothing else.",
        "reformat": "Reformat the following file: double quotes around all strings, no comments at the end of lines.",
    }


def function_names(source: str) -> list[str]:
    """Functions and methods of a file in the order of the text, but for `__special__` ones."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    functions.sort(key=lambda node: node.lineno)
    return [node.name for node in functions if not node.name.startswith("__")]


def leading_statements(source: str, count: Count, most: int) -> str:
    """The whole source if it has at most `most` tokens, else as many of its first statements as that; maybe none."""
    if count(source) <= most:
        return source
    lines = source.splitlines(keepends=True)
    piece = ""
    for statement in ast.parse(source).body:
        longer = "".join(lines[: statement.end_lineno])
        if count(longer) > most:
            break
        piece = longer
    return piece


def documents() -> list[Task]:
    """Questions that one of several topics of Python's help answers; the others are beside the point."""
    topics = {name: text for name, _ in texts.QUESTIONS if (text := _help_topics().get(name))}
    names = list(topics)
    tasks = []
    for i, question in enumerate(question for name, question in texts.QUESTIONS if name in topics):
        chosen = [names[(i + step) % len(names)] for step in range(DOCUMENTS)]
        parts = [
            f"Document {number} ({other}):\n{shortened(topics[other])}"
            for number, other in enumerate(sorted(chosen, key=lambda other: (len(other), other)), 1)
        ]
        asked = f"Answer from the documents, and quote the sentences on which the answer rests.\nQuestion: {question}"
        tasks.append(Task("rag", "\n\n".join([*parts, asked]), ANSWER_TOKENS["rag"]))
    return tasks


def extractions() -> list[Task]:
    return [
        Task(
            "extract",
            f"Extract these fields from the text as a JSON object: {', '.join(fields)}. Write the JSON object and nothing "
            f"else.\n\nText: {letter}",
            ANSWER_TOKENS["extract"],
        )
        for fields, letter in texts.LETTERS
    ]


def stories() -> list[Task]:
    return [Task("prose", f"Write a short story about {subject}.", ANSWER_TOKENS["prose"]) for subject in texts.STORIES]


def mixture(number: int) -> list[Task]:
    """Tasks of several kinds in turn, no two alike. Raises `InvalidRequest` for more than there are."""
    kinds = [documents(), extractions(), stories()]
    turns = range(max(len(kind) for kind in kinds))
    tasks = [kind[turn] for turn in turns for kind in kinds if turn < len(kind)]
    if not 1 <= number <= len(tasks):
        raise InvalidRequest("requests", f"requests must be from 1 to {len(tasks)}, not {number}.")
    return tasks[:number]


def spec_bench(text: str, category: str | None, limit: int | None) -> list[Task]:
    """First turns of the questions of Spec-Bench (arXiv 2401.07851), of one category or all, at most `limit` of each.

    `text`: of its `question.jsonl`. Raises `InvalidRequest` for what is no such file, and for a category that is not in it.
    """
    asked: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)
            kind, first = question["category"], question["turns"][0]
        except (ValueError, TypeError, LookupError):
            kind = first = None
        if not isinstance(kind, str) or not isinstance(first, str):
            raise InvalidRequest(
                "file", f"Line {number} is no question of Spec-Bench: each must be a JSON object with category and turns."
            )
        asked.setdefault(kind, []).append(first)
    if not asked:
        raise InvalidRequest("file", "The file has no questions.")
    if category is not None and category not in asked:
        raise InvalidRequest("category", f"There is no category {category!r} in the file; there are {', '.join(asked)}.")
    kinds = asked if category is None else {category: asked[category]}
    return [Task(kind, first, SPECBENCH_TOKENS) for kind, turns in kinds.items() for first in turns[:limit]]


def proof_prompts() -> list[tuple[str, str]]:
    """(name, text) of prompts of 20 to some hundred tokens, with and without something to copy; the first ones are short."""
    indent = inspect.getsource(textwrap.indent)
    topic = _help_topics().get("for", texts.STORY)
    return [
        ("sentence", texts.SENTENCE),
        ("records", texts.RECORDS),
        ("languages", texts.LANGUAGES),
        ("story", texts.STORY),
        ("code", f"{indent}\n# The same function with type hints:\n{indent.splitlines()[0]}"),
        ("help", topic),
    ]


def library_words(most: int) -> Iterator[str]:
    """The first words, blanks and signs of the sources of Python's standard library, at most `most`: text as it is repeated
    in practice, without a model's tokenizer."""
    found = 0
    for path in _library_files():
        for match in re.finditer(r"\w+|\s+|[^\w\s]", path.read_text(encoding="utf-8", errors="replace")):
            if found == most:
                return
            found += 1
            yield match[0]


def shortened(text: str, most: int = DOCUMENT_CHARACTERS) -> str:
    """The first paragraphs of a text with at most `most` characters; at least one, cut if need be."""
    kept = ""
    for paragraph in text.strip().split("\n\n"):
        longer = f"{kept}\n\n{paragraph}" if kept else paragraph[:most]
        if len(longer) > most:
            break
        kept = longer
    return kept


def _library_files() -> Iterator[Path]:
    for folder, inner, files in os.walk(sysconfig.get_path("stdlib")):
        inner[:] = sorted({*inner} - {"site-packages", "dist-packages", "test", "tests", "idle_test"})
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _source_of(module: str) -> str | None:
    try:
        return inspect.getsource(importlib.import_module(module))
    except (ImportError, OSError, TypeError):
        return None


def _help_topics() -> Mapping[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ConfigError("This Python has no help topics (pydoc_data), which the documents are made of.") from None
    return topics
