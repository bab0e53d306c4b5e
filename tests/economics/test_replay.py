"""Answers led past the controller: what is copied is found exactly, and time is what the cost of steps says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from obole.costmodel import StepCost
from obole.economics.replay import BUCKETS, Answered, CopyFinder, Copying, Replay
from obole.speculate.acceptance import bucket_of
from obole.speculate.reference import ReferenceIndex

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=25)


def cost() -> StepCost:
    return StepCost([1, 2, 4, 8, 16, 32, 64], [0.010, 0.0105, 0.011, 0.012, 0.014, 0.02, 0.03], 1e-6, 1e-6)


@settings(max_examples=60, deadline=None)
@given(tokens, tokens)
def test_copyable_tokens_are_those_of_the_specification(prompt, answer):
    copying = Copying()
    CopyFinder(1 << 20).run(Answered(prompt, answer), copying)
    index, seen, right = ReferenceIndex(), [0] * len(BUCKETS), [0] * len(BUCKETS)
    index.extend(prompt)
    for token in answer:
        match = index.match(1)
        if match is not None:
            seen[bucket_of(match.length)] += 1
            if match.branches[0][0] == match.tokens[0]:
                right[bucket_of(match.length)] += match.tokens[0] == token
        index.append(token)
    assert copying.tokens == len(answer)
    assert copying.seen["own"] == copying.seen["both"] == seen  # the lengths of matches are exact
    assert copying.seen["memory"] == [0] * len(BUCKETS)
    assert all(r <= s for r, s in zip(copying.right["own"], seen, strict=True))
    if len(set(prompt + answer)) == 1:
        assert copying.right["own"] == right


def test_a_repeated_passage_is_copied_and_saves_what_its_rows_save():
    passage = list(range(100, 180))
    replay = Replay(cost(), cost(), 1000, "lookup", 1 << 20)
    found = replay.run(Answered([*passage, 1, 2, 3], passage))
    assert found.tokens == 79
    assert found.passes < 25
    assert found.accepted["lookup"] == 79 - found.passes + 1  # each pass chooses one token itself, but for the last, which ends
    assert found.plain == pytest.approx(sum(0.010 + 2e-6 * (83 + i) for i in range(79)))
    assert found.speed_up == pytest.approx(found.plain / found.seconds)
    assert found.speed_up > 2.5


def test_what_repeats_nothing_takes_a_pass_a_token():
    found = Replay(cost(), cost(), 1000, "auto", 1 << 20).run(Answered(list(range(50)), list(range(100, 150))))
    assert (found.tokens, found.passes, found.drafted) == (49, 49, 0)
    assert found.speed_up == pytest.approx(1.0)


def test_what_a_tenant_said_helps_itself_and_nobody_else():
    passage = list(range(100, 200))
    for mode, again, other in (("memory", True, False), ("auto", True, False), ("lookup", False, False)):
        replay = Replay(cost(), cost(), 1000, mode, 1 << 20)
        replay.run(Answered([1, 2], passage, "a"))
        mine = replay.run(Answered([3, 2], passage, "a"))
        foreign = replay.run(Answered([3, 2], passage, "b"))
        assert (mine.accepted.total() > 50) == again
        assert (foreign.accepted.total() > 0) == other
    finder, copying = CopyFinder(1 << 20), Copying()
    finder.run(Answered([1, 2], passage, "a"), copying)
    assert copying.share("both") == 0
    finder.run(Answered([3, 2], passage, "a"), copying)
    assert copying.share("memory") > 0.45


def test_an_answer_of_one_token_has_no_passes():
    found = Replay(cost(), cost(), 10, "auto", 1 << 20).run(Answered([1], [2]))
    assert (found.tokens, found.passes, found.seconds, found.speed_up) == (0, 0, 0.0, 1.0)
