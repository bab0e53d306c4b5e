"""The native suffix index against its specification, and against plain search in strings."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from obole.speculate.reference import Match as Expected
from obole.speculate.reference import ReferenceCursor, ReferenceIndex
from obole.speculate.suffix import Cursor, Match, SuffixIndex

ALL = 1 << 30  # classes counted: every one
TEXT = st.lists(st.integers(0, 2), max_size=12)
MOST = st.integers(0, 9)


def plain(match: Match | None) -> Expected | None:
    return match and Expected(match.length, match.tokens, match.support, match.total, match.branches)


class IndexMachine(RuleBasedStateMachine):
    """Documents, forks of them, cursors on the growing index and copies: always what the specification says."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.reference = SuffixIndex(counted=ALL), ReferenceIndex()
        self.cursors: list[tuple[Cursor, ReferenceCursor]] = []

    @rule(token=st.integers(0, 3), most=MOST)
    def step(self, token: int, most: int) -> None:
        self.reference.append(token)
        assert plain(self.index.step(token, most)) == self.reference.match(most)

    @rule(tokens=TEXT)
    def extend(self, tokens: list[int]) -> None:
        self.index.extend(tokens)
        self.reference.extend(tokens)

    @rule(unit=st.lists(st.integers(0, 1), min_size=1, max_size=3), times=st.integers(2, 6))
    def repeat(self, unit: list[int], times: int) -> None:
        self.extend(unit * times)

    @rule()
    def begin(self) -> None:
        self.index.begin()
        self.reference.begin()

    @rule(data=st.data(), tail=TEXT)
    def resume(self, data: st.DataObject, tail: list[int]) -> None:
        anywhere = st.integers(-1, len(self.reference) - 1)
        known = self.reference.string(data.draw(st.just(self.reference.end) | anywhere))
        tokens = known + tail
        found = self.index.resume(tokens)
        assert found == self.reference.resume(tokens) >= len(known)

    @rule(most=MOST)
    def match(self, most: int) -> None:
        assert plain(self.index.match(most)) == self.reference.match(most)
        assert len(self.index) == len(self.reference)

    @rule()
    def copy(self) -> None:
        old, self.index = self.index, self.index.copy()
        old.extend([0, 1, 2, 3] * 9)  # of no concern to the copy
        self.cursors.clear()

    @precondition(lambda self: len(self.cursors) < 3)
    @rule()
    def cursor(self) -> None:
        self.cursors.append((Cursor(self.index), ReferenceCursor(self.reference)))

    @precondition(lambda self: self.cursors)
    @rule(data=st.data(), tokens=TEXT, most=MOST)
    def advance(self, data: st.DataObject, tokens: list[int], most: int) -> None:
        native, reference = data.draw(st.sampled_from(self.cursors))
        native.advance(tokens)
        reference.advance(tokens)
        assert plain(native.match(most)) == reference.match(most)

    def teardown(self) -> None:
        self.match(9)
        for native, reference in self.cursors:  # perhaps read long ago, in states that were split since
            assert plain(native.match(9)) == reference.match(9)


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestIndexMachine = IndexMachine.TestCase


def fibonacci(n: int) -> list[int]:
    a, b = [0], [0, 1]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


REPETITIVE = {
    "one token": [7] * 150,
    "period 3": [1, 2, 3] * 50,
    "fibonacci": fibonacci(150),
    "thue-morse": [n.bit_count() % 2 for n in range(150)],
    "squares": [bit for n in range(12) for bit in [0] * n + [1]],
    "random": random.Random(3).choices(range(2), k=150),
}


@pytest.mark.parametrize("counted", [1, 2, 16])
@pytest.mark.parametrize("name", REPETITIVE)
def test_few_classes_counted_are_lower_bounds_of_the_counts_and_nothing_else(name: str, counted: int) -> None:
    index, reference = SuffixIndex(counted=counted), ReferenceIndex()
    for token in REPETITIVE[name]:
        match = index.step(token, 6)
        reference.append(token)
        exact = reference.match(6)
        assert (match is None) == (exact is None)
        if match is None or exact is None:
            continue
        assert match.length == exact.length
        assert 1 <= match.support <= exact.support
        assert match.support <= match.total <= exact.total
        assert match.branches[0] == (match.tokens[0], match.support)
        assert dict(match.branches).keys() == dict(exact.branches).keys()
        assert match.tokens in continuations(reference, match.length, 6)


def continuations(reference: ReferenceIndex, length: int, most: int) -> list[list[int]]:
    """What follows each occurrence of the last `length` tokens."""
    text = reference.string(reference.end)[-length:]
    followers = [node for node, above in enumerate(reference.above) if reference.common(above, text) == length]
    return [reference.continuation(node, most, own=True) for node in followers]


def searched(text: str, known: int) -> int:
    """Length of the longest suffix of `text` that ends before its end, given one that does."""
    while text.find(text[len(text) - known - 1 :], 0, len(text) - 1) >= 0:
        known += 1
    return known


@given(st.integers(2, 400), st.integers(0, 1 << 32))
@settings(max_examples=12, deadline=None)
def test_lengths_in_longer_texts(vocabulary: int, seed: int) -> None:
    rng = random.Random(seed)
    tokens = [rng.randrange(vocabulary) for _ in range(40)]
    while len(tokens) < 3000:  # copies of what was before, with noise between
        start = rng.randrange(len(tokens))
        tokens += tokens[start : start + rng.randrange(1, 60)] + [rng.randrange(vocabulary) for _ in range(rng.randrange(3))]
    index, text, known = SuffixIndex(), "", 0
    for token in tokens:
        text += chr(token + 256)
        match = index.step(token, 1)
        length = match.length if match else 0
        known = min(known + 1, length)  # a match grows by one token at a time
        assert text.find(text[len(text) - known :], 0, len(text) - 1) >= 0
        assert searched(text, known) == length == known


def test_the_best_branch_has_most_occurrences_and_of_equals_is_the_latest() -> None:
    index = SuffixIndex()
    index.extend([1, 2, 5, 11, 1, 2, 6, 12, 1, 2, 6, 13, 1, 2])
    assert plain(index.match(3)) == Expected(2, [6, 13, 1], 2, 3, [(6, 2), (5, 1)])
    index.extend([5, 14, 1, 2])
    assert plain(index.match(2)) == Expected(2, [5, 14], 2, 4, [(5, 2), (6, 2)])


def test_a_run_goes_on_periodically() -> None:
    index = SuffixIndex()
    index.extend([0, 1, 2, 0, 1, 2, 0, 1])
    match = index.match(8)
    assert match is not None
    assert (match.length, match.tokens) == (5, [2, 0, 1, 2, 0, 1, 2, 0])


def test_documents_end() -> None:
    index = SuffixIndex()
    index.extend([1, 2, 3])
    index.begin()
    assert index.match(4) is None
    index.extend([4, 2])
    assert plain(index.match(4)) == Expected(1, [3], 1, 1, [(3, 1)])
    index.append(3)  # [2, 3] occurs, and [3], but nothing ever followed
    assert index.match(4) is None
    cursor = Cursor(index)
    cursor.advance([4])
    assert plain(cursor.match(9)) == Expected(1, [2, 3], 1, 1, [(2, 1)])  # the end of a document being written is an end


def test_resume_forks_a_document() -> None:
    index = SuffixIndex()
    index.extend([1, 2, 3, 4])
    assert index.resume([1, 2, 9]) == 2
    assert len(index) == 5
    index.extend([1, 2])
    match = index.match(2)
    assert match is not None
    assert (match.length, match.total, sorted(match.branches)) == (2, 2, [(3, 1), (9, 1)])
    assert index.resume([1, 2, 9, 1, 2, 3, 9]) == 5  # the current one: it goes on
    assert plain(index.match(4)) == Expected(1, [1, 2, 3, 9], 1, 1, [(1, 1)])
    assert len(index) == 9
    assert index.resume([2, 3]) == 0  # no document begins so
    assert len(index) == 11


def hub(seed: int) -> list[int]:
    """A text in which many tokens follow one."""
    rng, text = random.Random(seed), []
    while len(text) < 700:
        noise = 1000 + len(text) if rng.random() < 0.7 else 999
        text += [*[1] * rng.randint(1, 2), 10 + int(rng.paretovariate(0.7)) % 80, noise]
    return text


@pytest.mark.parametrize("counted", [1, 2, ALL])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_many_branches(seed: int, counted: int) -> None:
    """More than a match compares: the best is known all the same."""
    index, reference, most = SuffixIndex(counted=counted), ReferenceIndex(), 0
    for token in hub(seed):
        match = index.step(token, 4)
        reference.append(token)
        exact = reference.match(4)
        if match is None or exact is None:
            assert match is exact
            continue
        most = max(most, exact.total)
        assert match.length == exact.length
        assert len(dict(match.branches)) == len(match.branches) == len(exact.branches)
        assert match.branches[0] == (match.tokens[0], match.support)
        assert match.support <= match.total <= exact.total
        if counted == ALL:
            assert (match.tokens, match.support, match.total) == (exact.tokens, exact.support, exact.total)
    assert most > 100


@pytest.mark.parametrize(
    "kind",
    [list, tuple, np.int32, np.int64, lambda t: np.repeat(np.array(t, np.int32), 2)[::2], lambda t: memoryview(bytes(t))],
)
def test_any_sequence_of_integers(kind: Callable[[list[int]], Sequence[int]] | type[np.generic]) -> None:
    tokens = [1, 2, 3, 1, 2]
    given = np.array(tokens, kind) if isinstance(kind, type) and issubclass(kind, np.generic) else kind(tokens)
    index = SuffixIndex()
    index.extend(given)
    assert index.resume(given) == 5
    cursor = Cursor(index)
    cursor.advance(given)
    for match in (index.match(1), cursor.match(1)):
        assert match is not None
        assert (match.tokens, len(index)) == ([3], 5)


@pytest.mark.parametrize(
    "tokens", [[1, -1], [1 << 31], [1 << 70], [1.0], [None], 3, np.array([1.5]), np.array([3, -3], np.int32)]
)
def test_what_is_no_token_is_refused_and_nothing_appended(tokens: object) -> None:
    index = SuffixIndex()
    index.extend([5, 6, 5])
    cursor = Cursor(index)
    cursor.advance([5])
    for take in (index.extend, index.resume, cursor.advance):
        with pytest.raises((ValueError, TypeError, OverflowError), match=r"token ids|integer|int too big"):
            take(tokens)  # type: ignore[arg-type]
    assert plain(index.match(1)) == plain(cursor.match(1)) == Expected(1, [6], 1, 1, [(6, 1)])
    assert len(index) == 3


def test_refusals() -> None:
    index = SuffixIndex()
    cursor = Cursor(index)
    for read in (index.append, lambda token: index.step(token, 1), lambda token: cursor.step(token, 1)):
        for token in (-1, 1 << 31):
            with pytest.raises(ValueError, match="token ids go from 0"):
                read(token)
    for ask in (index.match, cursor.match, lambda most: index.step(1, most), lambda most: cursor.step(1, most)):
        with pytest.raises(ValueError, match="-1 tokens"):
            ask(-1)
    assert len(index) == 0
    for wrong in ({"counted": 0}, {"limit": 0}, {"limit": 1 << 31}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SuffixIndex(**wrong)


def test_a_full_index_refuses_more_and_still_answers() -> None:
    index = SuffixIndex(limit=12)
    with pytest.raises(ValueError, match="full: its limit is 12"):
        index.extend([1, 2] * 20)
    assert 4 < len(index) < 12
    match = index.match(3)
    assert match is not None
    assert match.length == len(index) - 2
    with pytest.raises(ValueError, match="full"):
        index.append(1)


def test_memory_and_copies() -> None:
    rng = random.Random(5)
    tokens = [int(rng.paretovariate(0.7)) % 30000 for _ in range(20000)]
    for start in range(2000, 20000, 90):
        source = rng.randrange(start)
        tokens[start : start + 30] = tokens[source : source + 30]
    tokens = tokens[:20000]
    index = SuffixIndex()
    index.extend(np.array(tokens, np.int32))
    assert len(index) == 20000
    assert 20000 * 36 < index.nbytes <= 20000 * 100
    copy = index.copy()
    assert (copy.nbytes, len(copy)) == (index.nbytes, len(index))
    again = SuffixIndex()
    for token in tokens:
        again.append(token)
    for token in tokens[100:400]:
        assert plain(copy.step(token, 8)) == plain(index.step(token, 8)) == plain(again.step(token, 8))
    del index
    copy.extend(tokens)
