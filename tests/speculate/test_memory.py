"""What is remembered of earlier requests: whose it is, how much, for how long, and that it can be deleted."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from exact.common import check_idle, fingerprints, random_prompt
from obole import SamplingParams
from obole.speculate.controller import always
from obole.speculate.memory import GENERATIONS, LOOK_BACK, Memory, Recollection
from obole.types import Sequence, Source
from tests.fakes.driver import make_seqs


def finished(name: str, tokens: list[int], tenant: str = "", cached: int = 0) -> Sequence:
    [seq] = make_seqs(name, tokens[:1], tenant=tenant)
    seq.tokens = list(tokens)
    seq.tally.cached = cached
    return seq


def ask(memory: Memory, tokens: list[int], tenant: str = "", most: int = 8):
    return Recollection(memory).propose(finished("asking", tokens, tenant), most)


def walk(start: int, length: int = 100) -> list[int]:
    """Tokens that no walk from another hundred shares."""
    return list(range(start * 1000, start * 1000 + length))


def test_what_followed_before_is_drafted():
    memory = Memory(1 << 20, 10)
    memory.remember(finished("a", walk(1)), 0.0)
    proposal = ask(memory, [7, *walk(1)[20:40]])
    assert (proposal.source, proposal.length, proposal.sure) == (Source.MEMORY, 20, 1.0)
    assert proposal.tokens == walk(1)[40:48]
    assert ask(memory, walk(2)) is None
    assert ask(memory, walk(1)) is None  # nothing followed there


def test_a_match_does_not_run_across_two_answers():
    memory = Memory(1 << 20, 10)
    memory.remember(finished("a", [1, 2, 3]), 0.0)
    memory.remember(finished("b", [4, 5, 6]), 0.0)
    assert ask(memory, [2, 3]) is None
    assert ask(memory, [1]).tokens == [2, 3]


def test_tenants_do_not_share():
    memory = Memory(1 << 20, 10)
    memory.remember(finished("a", walk(1), "A"), 0.0)
    assert ask(memory, walk(1)[:20], "A").tokens == walk(1)[20:28]
    for other in ("B", "", "a", "A "):
        assert ask(memory, walk(1)[:20], other) is None


def test_the_newer_of_two_equally_long_matches_is_drafted():
    memory = Memory(4 * 4096, 10)
    generations = memory.generations("")
    number = 0
    while len(memory.generations("")) < 2:
        generations = memory.generations("")
        memory.remember(finished(f"{number}", [1, 2, 3, number + 10]), 0.0)
        number += 1
    assert generations[-1].index is not generations[0].index
    assert ask(memory, [1, 2, 3]).tokens == [number - 1 + 10]


def test_the_cached_beginning_of_a_prompt_is_not_remembered_twice():
    memory = Memory(1 << 20, 10)
    tokens = walk(1, 500)
    memory.remember(finished("a", tokens, cached=400), 0.0)
    [generation] = memory.generations("")
    assert len(generation.index) == 100 + LOOK_BACK
    assert ask(memory, tokens[400:410]).tokens == tokens[410:418]


def test_no_limit_no_memory():
    memory = Memory(0, 10)
    memory.remember(finished("a", walk(1)), 0.0)
    assert memory.nbytes == 0
    assert ask(memory, walk(1)[:9]) is None


def test_generations_roll_over_and_the_oldest_goes_first():
    limit = 1 << 18
    memory = Memory(limit, 1000)
    seen = set()
    for number in range(200):
        memory.remember(finished(f"{number}", walk(number, 64)), 0.0)
        generations = memory.generations("")
        seen.add(len(generations))
        assert memory.nbytes == sum(g.nbytes for g in generations) <= limit
        assert ask(memory, walk(number, 64)[:30]).tokens == walk(number, 64)[30:38]  # the newest is always there
    assert max(seen) in range(GENERATIONS, GENERATIONS + 3)
    assert ask(memory, walk(0, 64)[:30]) is None
    known = [number for number in range(200) if ask(memory, walk(number, 64)[:30]) is not None]
    assert known == list(range(known[0], 200))  # what went was the oldest
    assert len(known) > 20


def test_a_document_larger_than_the_limit_is_not_kept():
    memory = Memory(1 << 14, 1000)
    memory.remember(finished("a", walk(1, 900)), 0.0)
    assert memory.nbytes == 0
    assert memory.generations("") == []


def test_the_tenant_written_to_least_recently_loses_first():
    limit = 1 << 18
    memory = Memory(limit, 1000)
    for number in range(100):
        memory.remember(finished(f"a{number}", walk(number, 64), "A"), 0.0)
    before = len(memory.generations("A"))
    for number in range(30):
        memory.remember(finished(f"b{number}", walk(number, 64), "B"), 0.0)
        assert memory.nbytes <= limit
    assert len(memory.generations("A")) < before
    assert all(ask(memory, walk(number, 64)[:30], "B") for number in range(30))


def test_a_text_expires_a_while_after_it_was_last_added_to():
    memory = Memory(1 << 20, 10.0)
    memory.remember(finished("a", walk(1), "A"), 100.0)
    memory.remember(finished("b", walk(2), "B"), 105.0)
    memory.expire(110.0)
    assert ask(memory, walk(1)[:20], "A") is not None
    memory.expire(110.5)
    assert ask(memory, walk(1)[:20], "A") is None
    assert ask(memory, walk(2)[:20], "B") is not None
    memory.remember(finished("c", walk(3), "C"), 116.0)  # of whatever tenant
    assert memory.generations("B") == []
    assert memory.nbytes == memory.generations("C")[0].nbytes


def test_forgetting_a_request():
    memory = Memory(1 << 20, 10)
    memory.remember(finished("a", walk(1)), 0.0)
    memory.remember(finished("b", walk(2)), 0.0)
    memory.remember(finished("a", walk(3)), 0.0)  # a second choice
    memory.remember(finished("b", walk(4), "other"), 0.0)
    reading = Recollection(memory)
    asking = finished("asking", walk(1)[:10])
    assert reading.propose(asking, 4).tokens == walk(1)[10:14]
    memory.forget("", "a")
    asking.tokens += walk(1)[10:12]
    assert reading.propose(asking, 4) is None  # a place that was found before
    for number, there in ((1, False), (2, True), (3, False)):
        assert (ask(memory, walk(number)[:9]) is not None) is there
    memory.forget("", "b")
    assert memory.generations("") == []
    assert ask(memory, walk(4)[:9], "other") is not None
    memory.forget("other", "unknown")
    memory.forget("unknown", "b")
    memory.forget("other")
    assert memory.nbytes == 0


def test_a_long_gap_between_two_questions_is_not_read_as_one_text():
    """A drafter that is not asked for a while must not take what lies on both sides of the gap for neighbours."""
    memory = Memory(1 << 20, 10)
    memory.remember(finished("a", [*walk(1)[:10], *walk(2)[: LOOK_BACK + 10]]), 0.0)
    reading = Recollection(memory)
    asking = finished("asking", walk(1)[:10])
    reading.propose(asking, 1)
    asking.tokens += [*walk(3)[:50], *walk(2)[:LOOK_BACK]]
    proposal = reading.propose(asking, 4)
    assert proposal.length == LOOK_BACK
    assert proposal.tokens == walk(2)[LOOK_BACK : LOOK_BACK + 4]


class Ledger(RuleBasedStateMachine):
    """Against a plain list of documents: sums, limits, ages and owners."""

    LIMIT, KEEP = 1 << 15, 8.0

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory(self.LIMIT, self.KEEP)
        self.now = 0.0
        self.number = 0
        self.forgotten: set[str] = set()
        self.written: dict[str, tuple[str, list[int], float]] = {}

    @rule(tenant=st.sampled_from("ABC"), length=st.integers(1, 120), again=st.booleans())
    def remember(self, tenant: str, length: int, again: bool) -> None:
        self.number += 1
        name = f"{tenant}{self.number}"
        tokens = walk(self.number, length)
        for seq in [finished(name, tokens, tenant)] * (2 if again else 1):
            self.memory.remember(seq, self.now)
        self.written[name] = (tenant, tokens, self.now)

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.memory.expire(self.now)

    @rule(tenant=st.sampled_from("ABC"), data=st.data())
    def forget(self, tenant: str, data: st.DataObject) -> None:
        names = [name for name, (owner, _, _) in self.written.items() if owner == tenant]
        one = data.draw(st.none() | st.sampled_from(names)) if names else None
        self.memory.forget(tenant, one)
        self.forgotten |= {one} if one is not None else set(names)

    @invariant()
    def books_balance(self) -> None:
        memory = self.memory
        generations = [g for tenant in "ABC" for g in memory.generations(tenant)]
        assert memory.nbytes == sum(g.nbytes for g in generations) <= self.LIMIT
        for tenant in "ABC":
            for generation in memory.generations(tenant):
                assert generation.documents
                assert self.now - generation.newest <= self.KEEP
                assert len(generation.index) == sum(d.size for ds in generation.documents.values() for d in ds)
                for name, documents in generation.documents.items():
                    assert name not in self.forgotten
                    owner, tokens, since = self.written[name]
                    assert owner == tenant
                    assert since <= generation.newest
                    assert all(d.tolist() == tokens for d in documents)


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=5), st.data())
def test_a_proposal_stands_somewhere_in_the_memory_of_the_tenant(documents, data):
    memory = Memory(1 << 20, 10)
    owners = [data.draw(st.sampled_from("AB")) for _ in documents]
    for i, (owner, tokens) in enumerate(zip(owners, documents, strict=True)):
        memory.remember(finished(f"{i}", tokens, owner), 0.0)
    asking = finished("asking", [data.draw(st.integers(0, 3))], "A")
    reading = Recollection(memory)
    for _ in range(6):
        proposal = reading.propose(asking, 5)
        if proposal is not None:
            text = [*asking.tokens[len(asking.tokens) - proposal.length :], *proposal.tokens]
            assert len(proposal.tokens) <= 5
            assert 0 < proposal.sure <= 1
            own = [tokens for owner, tokens in zip(owners, documents, strict=True) if owner == "A"]
            assert any(text == tokens[i : i + len(text)] for tokens in own for i in range(len(tokens)))
        asking.tokens += data.draw(st.lists(st.integers(0, 3), max_size=3))


# -- in an engine ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "memory"])
def test_a_tenant_never_drafts_from_another(tiny_engine, mode):
    engine = tiny_engine("llama", speculate=mode)
    engine._controller.lengths = always(8)
    prompt = random_prompt(random.Random(1), 50, 128)
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, seed=1, logprobs=2)
    (first,) = engine.generate(prompt, params, tenant="A")
    (again,) = engine.generate(prompt, params, tenant="A")
    (other,) = engine.generate(prompt, params, tenant="B")
    (nobody,) = engine.generate(prompt, params)
    assert fingerprints([first, again, other, nobody]) == fingerprints([first] * 4)
    # asked again, the answer is known: 4 passes (1 + 9 + 9 + 9 + 2) for 30 tokens
    assert again.receipt.sources["model"] <= 5
    for result in (other, nobody):
        assert result.receipt.sources == first.receipt.sources
        assert result.receipt.drafted == first.receipt.drafted  # what it drafts from is its own
        assert "memory" not in result.receipt.drafted
    check_idle(engine)


def test_a_request_without_drafts_leaves_nothing_behind(tiny_engine):
    engine = tiny_engine("llama")
    prompt = random_prompt(random.Random(2), 50, 128)
    engine.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True, speculate="off"))
    assert engine._controller.memory.nbytes == engine._controller.store.nbytes == 0
    engine.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True, speculate="lookup"))
    assert engine._controller.memory.nbytes == 0
    engine.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True, speculate="memory"))
    assert engine._controller.memory.nbytes > 0


@pytest.mark.parametrize("how", ["expiry", "tenant", "request"])
def test_what_is_gone_is_not_drafted(tiny_engine, how):
    """After its time, or deleted: the same question again is answered as if for the first time."""
    engine = tiny_engine("llama", draft_memory_seconds=60)
    controller = engine._controller
    controller.lengths = always(8)
    now = [1000.0]
    controller.clock = lambda: now[0]
    prompt = random_prompt(random.Random(3), 50, 128)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    (first,) = engine.generate(prompt, params, tenant="A")
    now[0] += 59
    (soon,) = engine.generate(prompt, params, tenant="A")
    assert soon.receipt.sources["model"] < first.receipt.sources["model"]
    if how == "expiry":
        now[0] += 61
    elif how == "tenant":
        controller.forget("A")
    else:
        controller.forget("A", first.id)
        controller.forget("A", soon.id)
    (late,) = engine.generate(prompt, params, tenant="A")
    assert late.receipt.sources == first.receipt.sources
    assert late.receipt.drafted == first.receipt.drafted
    assert late.token_ids == first.token_ids


def test_the_limit_holds_under_many_requests(tiny_engine):
    limit = 1 << 17
    engine = tiny_engine("llama", draft_memory=limit)
    rng = random.Random(4)
    most = 0
    for number in range(12):
        prompts = [random_prompt(rng, rng.randint(1, 90), 128) for _ in range(4)]
        engine.generate(prompts, SamplingParams(max_tokens=20, n=2), tenant=f"{number % 5}")
        controller = engine._controller
        most = max(most, controller.memory.nbytes, controller.store.nbytes)
        assert controller.memory.nbytes <= limit
        assert controller.store.nbytes <= limit
    assert most > limit // 2
    check_idle(engine)


def test_texts_of_an_earlier_time_come_before_others_and_go_first():
    memory = Memory(1 << 20, keep_seconds=100.0)
    memory.remember(finished("new", list(range(50))), 1000.0)
    for i, when in enumerate((990.0, 950.0, 905.0)):  # newest first
        assert memory.recall("", f"old {i}", np.arange(1000 * (i + 1), 1000 * (i + 1) + 50, dtype=np.int32), when)
    assert memory.recall("other", "older", np.arange(60, dtype=np.int32), 901.0)
    assert ask(memory, [2010, 2011, 2012]).tokens[0] == 2013
    assert len(memory.generations("")) == 2
    memory.remember(finished("newer", list(range(5000, 5050))), 1001.0)
    assert len(memory.generations("")) == 2
    memory.expire(1002.0)
    assert not memory.generations("other")
    assert ask(memory, [2010, 2011, 2012]) is not None
    memory.expire(1091.0)
    assert ask(memory, [2010, 2011, 2012]) is None
    assert ask(memory, [10, 11, 12]) is not None
    full = Memory(1000, keep_seconds=100.0)
    assert not full.recall("", "long", np.zeros(100, dtype=np.int32), 1.0)
    assert full.nbytes == 0
