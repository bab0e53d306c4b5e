"""Prompt lookup, and the indexes that outlive their sequences: who may take which over, and what is then read."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exact.common import check_idle, fingerprints, random_prompt
from obole import SamplingParams
from obole.speculate.controller import always
from obole.speculate.lookup import FEWEST_SHARED, IndexStore, Lookup, common_prefix
from obole.speculate.reference import ReferenceIndex
from obole.speculate.suffix import SuffixIndex
from obole.types import Sequence, Source
from tests.fakes.driver import make_seqs


def sequence(tokens: list[int], tenant: str = "", name: str = "x") -> Sequence:
    [seq] = make_seqs(name, tokens, tenant=tenant)
    return seq


def answered(store: IndexStore, tokens: list[int], answer: list[int], tenant: str = "", name: str = "x", now: float = 0.0):
    """A sequence from its beginning to its end."""
    seq = sequence(tokens, tenant, name)
    lookup = store.start(seq)
    for token in answer:
        lookup.propose(seq, 4)
        seq.tokens.append(token)
    store.keep(seq, lookup, now)
    return seq


TEXT = list(range(100, 150))
ANSWER = list(range(200, 220))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 9), st.data())
@settings(max_examples=100, deadline=None)
def test_a_proposal_is_what_the_specification_says(tokens, most, data):
    """However many tokens come between two questions."""
    seq = sequence([tokens[0]])
    lookup, reference = IndexStore(1 << 20, 9).start(seq), ReferenceIndex()
    reference.append(tokens[0])
    rest = tokens[1:]
    while rest:
        proposal, expected = lookup.propose(seq, most), reference.match(most)
        assert lookup.read == len(seq.tokens)
        if expected is None:
            assert proposal is None
        else:
            assert (proposal.source, proposal.length) == (Source.LOOKUP, expected.length)
            assert 0 < proposal.sure <= 1
            assert len(proposal.tokens) == most or not proposal.tokens[most:]
        count = data.draw(st.integers(1, len(rest)))
        seq.tokens += rest[:count]
        reference.extend(rest[:count])
        rest = rest[count:]


def test_repetition_is_drafted_periodically():
    seq = sequence([1, 2, 3, 1, 2, 3, 1])
    assert IndexStore(1 << 20, 9).start(seq).propose(seq, 8).tokens == [2, 3, 1, 2, 3, 1, 2, 3]


# -- the store -------------------------------------------------------------------------------------------------------------


def test_the_next_turn_takes_the_index_over_and_reads_only_what_is_new():
    store = IndexStore(1 << 20, 9)
    first = answered(store, TEXT, ANSWER, name="first")
    index = next(iter(store._kept.values())).lookup.index
    second = sequence([*first.tokens, 7, 8, 9], name="second")
    lookup = store.start(second)
    assert lookup.index is index
    assert lookup.read == len(first.tokens)
    assert len(index) == len(first.tokens)
    assert store.nbytes == 0
    assert lookup.propose(second, 3) is None
    assert len(index) == lookup.read == len(second.tokens)
    second.tokens.append(TEXT[5])
    assert lookup.propose(second, 3).tokens == TEXT[6:9]
    # it went to one sequence: another one that goes on from there has to read everything
    other = store.start(sequence([*first.tokens, 5]))
    assert other.read == 0
    assert other.index is not index


def test_a_turn_that_differs_gets_a_copy():
    store = IndexStore(1 << 20, 9)
    first = answered(store, TEXT, ANSWER)
    before = store.nbytes
    edited = sequence([*TEXT, *ANSWER[:5], 7, 8, 9])
    lookup = store.start(edited)
    assert lookup.read == len(edited.tokens)
    assert store.nbytes == before
    # only what was not in common was read
    assert len(lookup.index) == len(first.tokens) + 3
    edited.tokens += [ANSWER[4]]
    assert lookup.propose(edited, 2).tokens in ([7, 8], ANSWER[5:7])
    # the other one is still there for whoever goes on from it, and knows nothing of the copy
    again = store.start(sequence([*first.tokens, 1]))
    assert again.read == len(first.tokens)
    assert len(again.index) == len(first.tokens)


def test_the_same_prompt_again():
    store = IndexStore(1 << 20, 9)
    answered(store, TEXT, ANSWER)
    seq = sequence(TEXT)
    lookup = store.start(seq)
    assert lookup.read == len(TEXT)
    assert lookup.propose(seq, 4).tokens == ANSWER[:4]


def test_the_longest_beginning_wins_and_few_tokens_in_common_are_not_worth_it():
    store = IndexStore(1 << 20, 9)
    for count in (45, 40, 35):
        answered(store, [*TEXT[:count], 1, 2, 3], [4], name=f"{count}")
    lookup = store.start(sequence([*TEXT[:42], 9]))
    assert lookup.origins == {"45", "x"}
    answered(store, TEXT[: FEWEST_SHARED - 1], [1], name="short")
    store.forget("", "45")
    store.forget("", "40")
    store.forget("", "35")
    assert store.start(sequence([*TEXT[: FEWEST_SHARED - 1], 1, 2])).origins == {"short", "x"}  # wholly in common
    answered(store, [*TEXT[: FEWEST_SHARED - 1], 5, 6], [7], name="other")
    assert store.start(sequence([*TEXT[: FEWEST_SHARED - 1], 8, 9])).origins == {"x"}


def test_tenants_do_not_share_indexes():
    store = IndexStore(1 << 20, 9)
    first = answered(store, TEXT, ANSWER, "A")
    for other in ("B", ""):
        seq = sequence([*first.tokens, 1], other)
        lookup = store.start(seq)
        assert lookup.read == 0
        assert lookup.propose(seq, 4) is None
        assert len(lookup.index) == len(seq.tokens)
    assert store.start(sequence([*first.tokens, 1], "A")).read == len(first.tokens)


def test_the_limit_holds_and_the_least_recently_kept_go_first():
    store = IndexStore(1 << 16, 9)
    for number in range(60):
        answered(store, [number, *TEXT], ANSWER, name=f"{number}")
        kept = list(store._kept.values())
        assert store.nbytes == sum(k.lookup.index.nbytes + 4 * len(k.tokens) for k in kept) <= 1 << 16
    assert 1 < len(kept) < 60
    assert [k.tokens[0] for k in kept] == list(range(60 - len(kept), 60))
    nothing = IndexStore(0, 9)
    answered(nothing, TEXT, ANSWER)
    assert (nothing.nbytes, len(nothing._kept)) == (0, 0)


def test_indexes_expire():
    store = IndexStore(1 << 20, 10.0)
    answered(store, TEXT, ANSWER, name="old", now=100.0)
    answered(store, [1, *TEXT], ANSWER, name="new", now=105.0)
    store.expire(110.0)
    assert len(store._kept) == 2
    store.expire(110.1)
    assert [k.lookup.origins for k in store._kept.values()] == [{"new"}]
    answered(store, [2, *TEXT], ANSWER, name="later", now=120.0)
    assert [k.lookup.origins for k in store._kept.values()] == [{"later"}]


@pytest.mark.parametrize("divergent", [False, True])
def test_a_forgotten_request_is_in_no_index(divergent):
    """Neither in its own nor in those that were made from it, nor in one that is at work."""
    store = IndexStore(1 << 20, 9)
    first = answered(store, TEXT, ANSWER, name="first")
    prompt = [*TEXT, 7] if divergent else [*first.tokens, 7]
    second = answered(store, prompt, [8, 9], name="second")
    working = sequence([*second.tokens, 5] if divergent else [*TEXT, 6], name="third")
    lookup = store.start(working)
    working.tokens.append(ANSWER[0])
    assert lookup.propose(working, 3).tokens == ANSWER[1:4]
    answered(store, [300, *TEXT], ANSWER, "other", name="first")  # of another tenant
    store.forget("", "first")
    assert lookup.propose(working, 3) is None  # its own tokens have none of the answer
    assert lookup.read == len(working.tokens)
    working.tokens.append(TEXT[3])
    assert lookup.propose(working, 3).tokens == TEXT[4:7]
    assert [k.lookup.tenant for k in store._kept.values()] == ["other"]
    store.forget("other")
    assert (store.nbytes, len(store._kept)) == (0, 0)


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(0, 2), max_size=60), st.integers(0, 40))
def test_common_prefix(a, b, shared):
    a = [1] * shared + a
    b = [1] * shared + b
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == expected


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_was_kept_an_index_drafts_what_is_there(data):
    """Random conversations of two tenants that go on, differ and end: drafts stand in that tenant's texts, sums are right."""
    store = IndexStore(data.draw(st.sampled_from([1 << 14, 1 << 20])), 9)
    texts: dict[str, list[list[int]]] = {"A": [], "B": []}
    for number in range(data.draw(st.integers(1, 8))):
        tenant = data.draw(st.sampled_from("AB"))
        known = data.draw(st.sampled_from(texts[tenant])) if texts[tenant] else [0] * 35
        cut = data.draw(st.integers(0, len(known)))
        seq = sequence([*known[:cut], *data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))], tenant, f"{number}")
        lookup = store.start(seq)
        assert lookup.read in (0, len(seq.tokens)) or seq.tokens[: lookup.read] in texts[tenant]
        for token in data.draw(st.lists(st.integers(0, 2), max_size=6)):
            proposal = lookup.propose(seq, 4)
            if proposal is not None:
                tail = seq.tokens[len(seq.tokens) - proposal.length :]
                own = [*texts[tenant], seq.tokens]
                assert any(occurs([*tail, proposal.tokens[0]], text) for text in own)
            seq.tokens.append(token)
        store.keep(seq, lookup, 0.0)
        texts[tenant].append(seq.tokens)
        assert store.nbytes == sum(k.lookup.index.nbytes + 4 * len(k.tokens) for k in store._kept.values()) <= store.limit


def occurs(part: list[int], text: list[int]) -> bool:
    return any(part == text[i : i + len(part)] for i in range(len(text)))


# -- in an engine ----------------------------------------------------------------------------------------------------------


def test_a_conversation_reads_each_token_once(tiny_engine, monkeypatch):
    engine = tiny_engine("llama", speculate="lookup")
    engine._controller.lengths = always(8)
    plain = tiny_engine("llama", speculate="off")
    read: list[int] = []
    propose = Lookup.propose

    def counting(lookup, seq, most):
        before = lookup.read
        proposal = propose(lookup, seq, most)
        read.append(lookup.read - before)
        return proposal

    monkeypatch.setattr(Lookup, "propose", counting)
    rng = random.Random(1)
    history = random_prompt(rng, 40, 128)
    for turn in range(4):
        params = SamplingParams(max_tokens=20, temperature=0.7, seed=turn, ignore_eos=True)
        read.clear()
        (result,) = engine.generate(history, params)
        assert fingerprints([result]) == fingerprints(plain.generate(history, params))
        # the prompt less what the turn before has left, and the answer less what came after the last draft
        new = 40 if turn == 0 else 5
        assert new < sum(read) <= new + 20
        history = [*history, *result.token_ids, *random_prompt(rng, 5, 128)]
    assert isinstance(next(iter(engine._controller.store._kept.values())).lookup.index, SuffixIndex)
    check_idle(engine)
