"""Word problems: the same for everybody, solvable, apart from each other; answers are read as people write them."""

from __future__ import annotations

import json
import operator
import random
import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from obole.bench.problems import (
    KINDS,
    TEST,
    TRAIN,
    answer_of,
    arithmetic,
    chat_prompt,
    gsm8k,
    part_of,
    plain_prompt,
    solved,
    training_text,
)
from obole.errors import InvalidRequest

EQUATION = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+)")
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32))
def test_every_working_is_right(kind, seed):
    draft = kind(random.Random(seed))
    equations = EQUATION.findall(draft.working)
    assert 2 <= len(equations) <= 4
    for left, sign, right, result in equations:
        assert SIGNS[sign](int(left), int(right)) == int(result) > 0
    assert int(equations[-1][3]) == draft.answer
    assert max(int(number) for number in re.findall(r"\d+", draft.question + draft.working)) <= 99
    assert answer_of(draft.working) == draft.answer


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32))
def test_the_facts_settle_the_answer(kind, seed):
    """Every number of the question is among them, in its order, so that no other part has the same problem."""
    draft = kind(random.Random(seed))
    numbers = [fact for fact in draft.facts if isinstance(fact, int)]
    assert numbers == [int(number) for number in re.findall(r"\d+", draft.question)]


def test_sets_of_problems():
    train, test = arithmetic(300, 1, TRAIN), arithmetic(300, 1, TEST)
    assert train == arithmetic(300, 1, TRAIN)
    assert train[:100] == arithmetic(100, 1, TRAIN)
    assert train != arithmetic(300, 2, TRAIN)
    for one in (train, test):
        assert len({problem.question for problem in one}) == 300
        assert all(solved(problem, problem.working) for problem in one)
    assert not {problem.question for problem in train} & {problem.question for problem in test}
    assert part_of(("keeping", 5)) == part_of(("keeping", 5))


def test_one_problem_is_told_in_several_ways():
    """Else there would be only one right continuation, and nothing to settle for."""
    workings = [problem.working for problem in arithmetic(200, 0, TRAIN)]
    for word in (", so ", "This means that", "because of that", "Then", "Next,", "In the end", "To sum up,"):
        assert 5 < sum(word in working for working in workings) < 195, word


def test_how_problems_are_asked():
    [problem] = arithmetic(1, 0, TEST)
    assert plain_prompt(problem) == f"Question: {problem.question}\nAnswer:"
    assert training_text(problem) == f"{plain_prompt(problem)} {problem.working}"
    [message] = chat_prompt(problem)
    assert message["role"] == "user"
    assert message["content"].endswith(problem.question)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("He has 9 left.\n#### 1,234", "1234"),
        ("so 3 + 4 = 7. The answer is 7. Question: what is 9?", "7"),
        ("The answer is **$1,234.50**.", "1234.50"),
        ("Answer: 12.", "12"),
        ("The final answer is \\(42\\), not 5", "42"),
        ("The answer is $\\boxed{17}$ for 3 people", "17"),
        ("#### -5", "-5"),
        ("that makes 1,000 or 12 and .5", ".5"),
        ("first 3, then 4 apples.", "4"),
        ("The answer is 3. No, the answer is 4.", "4"),
        ("nothing", None),
        ("", None),
    ],
)
def test_answers_as_people_write_them(text, value):
    assert answer_of(text) == (None if value is None else Decimal(value))


@given(st.text())
def test_any_text_is_an_answer(text):
    value = answer_of(text)
    assert value is None or value.is_finite()


@given(st.decimals(-(10**9), 10**9, places=2))
def test_numbers_are_read_as_they_are_written(value):
    for written in (f"{value:,}", f"{value}"):
        assert answer_of(f"The answer is {written}.") == value


def test_files_of_gsm8k():
    lines = [
        {"question": " How many? ", "answer": "4 + 4 = <<4+4=8>>8\n#### 1,008"},
        {"question": "And now?", "answer": "#### -3"},
    ]
    found = gsm8k("\n\n".join(json.dumps(line) for line in lines) + "\n")
    assert [problem.question for problem in found] == ["How many?", "And now?"]
    assert [problem.working for problem in found] == ["4 + 4 = <<4+4=8>>8", ""]
    assert [problem.answer for problem in found] == [1008, -3]


@pytest.mark.parametrize(
    "line",
    [
        "nothing",
        "[]",
        '{"question": "q"}',
        '{"question": "q", "answer": "8"}',
        '{"question": "q", "answer": "#### many"}',
        '{"question": 3, "answer": "#### 8"}',
        '{"question": "q", "answer": ["#### 8"]}',
    ],
)
def test_what_is_no_problem(line):
    good = '{"question": "q", "answer": "#### 8"}'
    with pytest.raises(InvalidRequest, match="Line 3 is no problem") as refusal:
        gsm8k(f"{good}\n\n{line}\n")
    assert refusal.value.field == "file"


def test_a_file_without_problems():
    with pytest.raises(InvalidRequest, match="no problems"):
        gsm8k("\n \n")
