"""What the benchmarks of speculation ask: sizes, contents, refusals."""

from __future__ import annotations

import ast
import json

import pytest

from obole.bench import texts
from obole.bench.workloads import (
    Task,
    changes,
    documents,
    edits,
    extractions,
    function_names,
    leading_statements,
    library_words,
    mixture,
    proof_prompts,
    shortened,
    spec_bench,
    stories,
)
from obole.errors import InvalidRequest

SOURCE = """import os


def one():
    return os


class Two:
    def __init__(self):
        self.three()

    def three(self):
        one()
"""


def quarters(text: str) -> int:
    return len(text) // 4


@pytest.mark.parametrize(("context", "most"), [(32768, 1600), (4096, 1600), (2048, 770), (1000, 333)])
def test_edits_are_whole_files_that_fit_twice(context, most):
    tasks = edits(quarters, context)
    assert [task.kind for task in tasks[:4]] == ["rename", "insert", "type hints", "reformat"]
    assert len(tasks) >= 16
    assert len(tasks) % 4 == 0
    for task in tasks:
        file = task.prompt.split("```python\n")[1].removesuffix("```\n")
        assert ast.parse(file).body
        assert min(900, most // 2) <= quarters(file) <= most
        assert quarters(task.prompt) + task.max_tokens < context
        assert task.max_tokens > quarters(file)


def test_a_context_too_short_for_any_file_is_refused():
    with pytest.raises(InvalidRequest, match="300 tokens") as refusal:
        edits(quarters, 300)
    assert refusal.value.field == "max_context"


def test_names_and_pieces_of_a_file():
    assert function_names(SOURCE) == ["one", "three"]
    assert leading_statements(SOURCE, len, len(SOURCE)) == SOURCE
    piece = leading_statements(SOURCE, len, len(SOURCE) - 1)
    assert piece == SOURCE[: SOURCE.index("\n\nclass")]
    assert leading_statements(SOURCE, len, 3) == ""
    assert "`one` to `do_one`" in changes(SOURCE, ["one", "three"])["rename"]
    assert "statement of `three`" in changes(SOURCE, ["one", "three"])["insert"]


def test_questions_come_with_the_document_that_answers_them():
    tasks = documents()
    assert len(tasks) == len(texts.QUESTIONS)  # every version of Python has these topics
    for task, (name, question) in zip(tasks, texts.QUESTIONS, strict=True):
        assert f"({name}):" in task.prompt
        assert task.prompt.endswith(question)
        assert task.prompt.count("Document ") == 3


def test_fields_are_in_the_prompt():
    for task, (fields, letter) in zip(extractions(), texts.LETTERS, strict=True):
        assert all(field in task.prompt for field in fields)
        assert task.prompt.endswith(letter)


def test_mixture():
    tasks = mixture(20)
    assert len({task.prompt for task in tasks}) == 20
    assert {task.kind for task in tasks[:3]} == {task.kind for task in (documents()[0], extractions()[0], stories()[0])}
    for number in (0, 1000):
        with pytest.raises(InvalidRequest) as refusal:
            mixture(number)
        assert refusal.value.field == "requests"


def test_texts_are_shortened_at_paragraphs():
    assert shortened("one\n\ntwo\n\nthree", 9) == "one\n\ntwo"
    assert shortened("one two", 3) == "one"
    assert shortened("one", 100) == "one"


def test_words_of_the_library():
    words = list(library_words(5000))
    assert len(words) == 5000
    assert all(words)
    assert "".join(words).count("\n") > 100


def test_prompts_of_the_proof_differ():
    prompts = dict(proof_prompts())
    assert len(set(prompts.values())) == len(prompts) == 6
    assert min(map(len, prompts.values())) > 100


def question(category="qa", first="Why?", **more):
    return json.dumps({"question_id": 1, "category": category, "turns": [first, "And then?"], **more})


def test_spec_bench():
    lines = [question("qa", f"q{i}") for i in range(3)] + ["", question("rag", "r0", reference=["x"]), question("qa", "q3")]
    text = "\n".join(lines)
    assert [task.prompt for task in spec_bench(text, None, None)] == ["q0", "q1", "q2", "q3", "r0"]
    assert spec_bench(text, None, 1) == [Task("qa", "q0", 128), Task("rag", "r0", 128)]
    assert [task.prompt for task in spec_bench(text, "rag", 2)] == ["r0"]


@pytest.mark.parametrize(
    ("text", "category", "field"),
    [
        ("", None, "file"),
        ("{", None, "file"),
        ("3", None, "file"),
        ('{"category": "qa"}', None, "file"),
        ('{"category": "qa", "turns": []}', None, "file"),
        ('{"category": 3, "turns": ["a"]}', None, "file"),
        ('{"category": "qa", "turns": [3]}', None, "file"),
        (question("qa"), "rag", "category"),
    ],
)
def test_spec_bench_refusals(text, category, field):
    with pytest.raises(InvalidRequest) as refusal:
        spec_bench(text, category, None)
    assert refusal.value.field == field
