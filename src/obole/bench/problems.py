"""Word problems with a number for an answer: made up here with their working, or read from a file in the form of GSM8K.

The problems made up here need two to four steps with whole numbers up to 99. What a question asks settles every number of the
working but not its words, of which there are several, some likelier than others: as in texts that people write, more than one
continuation is right, and a model that says several tokens at once has to settle for one of them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from zlib import crc32

from obole.errors import InvalidRequest

TRAIN, TEST = "train", "test"
TEST_SEED = 0  # of the problems that benchmarks ask
TEST_SHARE = 8  # one in so many sets of facts is kept for tests

NAMES = (
    ("Tom", "he"), ("Ann", "she"), ("Leo", "he"), ("Mia", "she"), ("Sam", "he"), ("Eva", "she"),
    ("Max", "he"), ("Zoe", "she"), ("Ben", "he"), ("Ida", "she"), ("Jon", "he"), ("Amy", "she"),
    ("Paul", "he"), ("Rosa", "she"), ("Omar", "he"), ("Lena", "she"),
)  # fmt: skip
THINGS = (
    "apples", "pens", "books", "coins", "stamps", "eggs", "shells", "cards", "marbles", "stickers", "plums", "nuts",
)  # fmt: skip
HOLDERS = (("boxes", "box"), ("bags", "bag"), ("jars", "jar"), ("baskets", "basket"))
GAINS = ("buys", "finds", "wins", "is given")
LOSSES = ("sells", "loses", "gives away", "breaks")
EXTRAS = ("a cap", "a ball", "a map", "a cake", "a cup")
DOINGS = (
    ("reads", "read", "pages"),
    ("walks", "walked", "miles"),
    ("paints", "painted", "tiles"),
    ("writes", "written", "lines"),
)

# What may be said at one place of a working, and how often.
Ways = tuple[tuple[str, int], ...]
FIRST: Ways = (("", 5), ("First, ", 3), ("To begin with, ", 2))
NEXT: Ways = (("Then ", 5), ("Next, ", 3), ("After that, ", 2))
HENCE: Ways = ((", so ", 5), (". This means that ", 3), (", and because of that ", 2))
START: Ways = (
    ("{0} starts with {1}.", 5),
    ("At the beginning {0} has {1}.", 3),
    ("We know that {0} has {1} to start with.", 2),
)
END: Ways = (("In the end ", 5), ("All in all, ", 3), ("To sum up, ", 2))

NUMBER = r"-?\$?\s?-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\$?\s?-?\.\d+"
MARKED = (  # where answers say which number counts, the surest sign first
    re.compile(rf"####\s*({NUMBER})"),
    re.compile(rf"\\boxed\{{\s*\\?({NUMBER})"),
    re.compile(rf"answer\s*(?:is|:)\s*:?[\s*\\(]*({NUMBER})", re.IGNORECASE),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """`working`: sentences that end in the answer, as a model is trained on them; empty where nobody gave any."""

    question: str
    working: str
    answer: Decimal


@dataclass(frozen=True, slots=True)
class _Draft:
    """A problem before its place is known; `facts`: the kind and the numbers, in their order, of which all else follows."""

    facts: tuple[str | int, ...]
    question: str
    working: str
    answer: int


def arithmetic(count: int, seed: int, part: str) -> list[Problem]:
    """So many problems, the same for the same seed, and no question twice.

    `part`: "train" or "test". A problem is in one of them for its numbers and what is done with them, so that none of one part
    is a problem of the other with other names.
    """
    rng = random.Random(f"{part} {seed}")
    found: dict[str, Problem] = {}
    while len(found) < count:
        draft = rng.choice(KINDS)(rng)
        if part_of(draft.facts) == part:
            found.setdefault(draft.question, Problem(draft.question, draft.working, Decimal(draft.answer)))
    return list(found.values())


def part_of(facts: Sequence[str | int]) -> str:
    return TEST if crc32(repr(facts).encode()) % TEST_SHARE == 0 else TRAIN


def gsm8k(text: str) -> list[Problem]:
    """Problems from JSON lines with `question` and `answer`, which ends in "#### 42" (arXiv 2110.14168).

    Raises `InvalidRequest` for a line that is something else, and if there is none.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            question, solution = fields["question"], fields["answer"]
            working, mark, last = solution.rpartition("####")
            answer = value_of(last)
        except (ValueError, TypeError, LookupError, AttributeError):
            question = mark = answer = None
        if not isinstance(question, str) or not mark or answer is None:
            raise InvalidRequest(
                "file",
                f'Line {number} is no problem: each must be a JSON object with question, and answer that ends in "#### 42".',
            )
        found.append(Problem(question.strip(), working.strip(), answer))
    if not found:
        raise InvalidRequest("file", "The file has no problems.")
    return found


# --- asking and checking ----------------------------------------------------------------------------------------------


def plain_prompt(problem: Problem) -> str:
    """What a model without a chat template is asked."""
    return f"Question: {problem.question}\nAnswer:"


def training_text(problem: Problem) -> str:
    """The prompt with the working, as a model is trained on it; the token that ends a text is to follow."""
    return f"{plain_prompt(problem)} {problem.working}"


def chat_prompt(problem: Problem) -> list[dict[str, str]]:
    """What a model with a chat template is asked."""
    told = "Solve the problem step by step in a few sentences. End with the sentence: The answer is <number>."
    return [{"role": "user", "content": f"{told}\n\n{problem.question}"}]


def answer_of(text: str) -> Decimal | None:
    """The number that an answer settles on: the last that is marked as such, or else the last one."""
    for pattern in MARKED:
        if marked := pattern.findall(text):
            return value_of(marked[-1])
    numbers = re.findall(NUMBER, text)
    return value_of(numbers[-1]) if numbers else None


def value_of(number: str) -> Decimal | None:
    """The value of "1,234" or "$ 5.50"; None for what is no number."""
    try:
        value = Decimal(re.sub(r"[\s$,]", "", number))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def solved(problem: Problem, text: str) -> bool:
    return answer_of(text) == problem.answer


# --- problems of several kinds ----------------------------------------------------------------------------------------


def _one_of(rng: random.Random, ways: Ways) -> str:
    return rng.choices([way for way, _ in ways], [weight for _, weight in ways])[0]


def _step(rng: random.Random, before: Ways, fact: str, result: str) -> str:
    """A fact of the question, and what follows from it."""
    return f"{_one_of(rng, before)}{fact}{_one_of(rng, HENCE)}{result}."


def _end(rng: random.Random, result: str, answer: int) -> str:
    return f"{_one_of(rng, END)}{result}. The answer is {answer}."


def _keeping(rng: random.Random) -> _Draft:
    """Somebody has things, in boxes or not, and gets or loses some, two or three times."""
    (name, he), things = rng.choice(NAMES), rng.choice(THINGS)
    if rng.random() < 0.4:
        (holders, holder), boxes, each = rng.choice(HOLDERS), rng.randint(2, 6), rng.randint(2, 8)
        has, facts = boxes * each, list[str | int](("keeping", boxes, each))
        asked = [f"{name} has {boxes} {holders} with {each} {things} in each {holder}."]
        said = [_step(rng, FIRST, f"{name} has {boxes} {holders}", f"{he} has {boxes} * {each} = {has} {things}")]
    else:
        has = rng.randint(5, 40)
        facts, asked = ["keeping", has], [f"{name} has {has} {things}."]
        said = [_one_of(rng, START).format(name, f"{has} {things}")]
    for step in range(rng.randint(2, 3)):
        lost = has > 9 and rng.random() < 0.5
        some = rng.randint(2, 9)
        does, sign, left = (rng.choice(LOSSES), "-", has - some) if lost else (rng.choice(GAINS), "+", has + some)
        asked.append(f"{'Then ' + he if step else he.capitalize()} {does} {some} {things}.")
        said.append(_step(rng, NEXT, f"{name} {does} {some} {things}", f"{he} has {has} {sign} {some} = {left} {things}"))
        facts += [sign, some]
        has = left
    asked.append(f"How many {things} does {name} have now?")
    said.append(_end(rng, f"{name} has {has} {things}", has))
    return _Draft(tuple(facts), " ".join(asked), " ".join(said), has)


def _shopping(rng: random.Random) -> _Draft:
    """Somebody buys several things of a price, maybe something else, and pays with more."""
    (name, he), things = rng.choice(NAMES), rng.choice(THINGS)
    number, price = rng.randint(2, 5), rng.randint(2, 8)
    cost = number * price
    facts: list[str | int] = ["shopping", number, price]
    asked = [f"{name} buys {number} {things} for {price} dollars each."]
    said = [_step(rng, FIRST, f"{name} buys {number} {things}", f"the {things} cost {number} * {price} = {cost} dollars")]
    if rng.random() < 0.6:
        extra, more = rng.choice(EXTRAS), rng.randint(2, 9)
        asked.append(f"{he.capitalize()} also buys {extra} for {more} dollars.")
        said.append(_step(rng, NEXT, f"{name} buys {extra}", f"all of it costs {cost} + {more} = {cost + more} dollars"))
        cost += more
        facts += ["+", more]
    paid = rng.choice([total for total in (20, 30, 40, 50) if total > cost])
    back = paid - cost
    asked.append(f"{he.capitalize()} pays with {paid} dollars. How many dollars does {name} get back?")
    said.append(_step(rng, NEXT, f"{name} pays with {paid} dollars", f"{he} gets {paid} - {cost} = {back} dollars"))
    said.append(_end(rng, f"{name} gets {back} dollars", back))
    return _Draft((*facts, paid), " ".join(asked), " ".join(said), back)


def _comparing(rng: random.Random) -> _Draft:
    """One has things, the next one some more or fewer, and a third one than the second."""
    people, things = rng.sample(NAMES, 3), rng.choice(THINGS)
    (first, _), has = people[0], rng.randint(11, 40)
    facts: list[str | int] = ["comparing", has]
    asked = [f"{first} has {has} {things}."]
    said = [_one_of(rng, START).format(first, f"{has} {things}")]
    for (before, _), (name, he) in pairwise(people):
        apart = rng.randint(2, 9)
        more = has < 11 or rng.random() < 0.5
        word, sign, left = ("more", "+", has + apart) if more else ("fewer", "-", has - apart)
        asked.append(f"{name} has {apart} {word} {things} than {before}.")
        fact, result = f"{name} has {apart} {word} {things}", f"{he} has {has} {sign} {apart} = {left} {things}"
        said.append(_step(rng, NEXT, fact, result))
        facts += [sign, apart]
        has = left
    asked.append(f"How many {things} does {name} have?")
    said.append(_end(rng, f"{name} has {has} {things}", has))
    return _Draft(tuple(facts), " ".join(asked), " ".join(said), has)


def _working_through(rng: random.Random) -> _Draft:
    """Somebody does so much a day for some days, and then a little more, once or twice."""
    (name, he), (does, did, parts) = rng.choice(NAMES), rng.choice(DOINGS)
    daily, days = rng.randint(2, 8), rng.randint(2, 6)
    done = daily * days
    facts: list[str | int] = ["working", daily, days]
    asked = [f"{name} {does} {daily} {parts} a day for {days} days."]
    said = [_step(rng, FIRST, f"{name} {does} for {days} days", f"{he} has {did} {days} * {daily} = {done} {parts}")]
    for day in ("next", "last")[: rng.randint(1, 2)]:
        more = rng.randint(2, 9)
        asked.append(f"On the {day} day {he} {does} {more} {parts}.")
        result = f"{he} has {did} {done} + {more} = {done + more} {parts}"
        said.append(_step(rng, NEXT, f"{name} {does} {more} {parts}", result))
        facts.append(more)
        done += more
    asked.append(f"How many {parts} has {name} {did}?")
    said.append(_end(rng, f"{name} has {did} {done} {parts}", done))
    return _Draft(tuple(facts), " ".join(asked), " ".join(said), done)


KINDS: tuple[Callable[[random.Random], _Draft], ...] = (_keeping, _shopping, _comparing, _working_through)
