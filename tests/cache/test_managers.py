"""The logical cache: random lives of sequences against brute force, and the rules one by one."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from obole.cache.ledger import Usage
from obole.cache.managers import KVCacheManager, SlidingManager
from obole.cache.spec import CacheGroup, StateKind
from obole.config import BLOCK_SIZE
from obole.types import Request, SamplingParams, Sequence, StepPlan
from tests.fakes.fake_model import FakeModel, Slot, context_digest

FULL = CacheGroup(StateKind.FULL, None, (0,))
LAYOUTS = {
    "full": (FULL,),
    "full and sliding": (FULL, CacheGroup(StateKind.SLIDING, 20, (1,)), CacheGroup(StateKind.SLIDING, 20, (2,))),
    "two windows": (FULL, CacheGroup(StateKind.SLIDING, 1, (1,)), CacheGroup(StateKind.SLIDING, 48, (2,))),
    "only sliding": (CacheGroup(StateKind.SLIDING, 33, (0,)),),
}
CHUNK = 40


def make_cache(layout: str = "full", blocks: int = 64, identity: object = None, **options: bool) -> KVCacheManager:
    return KVCacheManager(LAYOUTS[layout], blocks, {"weights": identity or "w"}, chunk=CHUNK, **options)  # type: ignore[dict-item]


def make_seq(tokens: list[int] | range, tenant: str = "", **params: int) -> Sequence:
    request = Request(id="r", prompt_ids=tuple(tokens), params=SamplingParams(**params), seed=0, tenant=tenant)
    return Sequence(request, 0, 0, 10_000)


def compute(cache: KVCacheManager, seq: Sequence, upto: int, model: FakeModel | None = None) -> bool:
    """One step for one sequence; False if there is no room."""
    copies = cache.allocate(seq, upto)
    if copies is None:
        return False
    if model is not None:
        start = seq.num_computed
        samples = upto == len(seq.tokens) < seq.max_len
        model.run(StepPlan([seq], [start], [upto - start], [samples], copies, upto - start))
    seq.num_computed = upto
    cache.commit(seq)
    return True


def run_whole(cache: KVCacheManager, seq: Sequence) -> int:
    """Match, compute all tokens in chunks, release; returns the hit."""
    hit = cache.match(seq)
    cache.attach(seq, hit)
    while seq.num_computed < len(seq.tokens):
        assert compute(cache, seq, min(len(seq.tokens), seq.num_computed + CHUNK))
    cache.release(seq)
    return hit


def candidates(length: int) -> Iterator[int]:
    """Hits that are possible at all, longest first."""
    if length % BLOCK_SIZE == 0:
        yield length - 1
    yield from range((length - 1) // BLOCK_SIZE * BLOCK_SIZE, -1, -BLOCK_SIZE)


def brute_force_hit(cache: KVCacheManager, model: FakeModel, seq: Sequence) -> int:
    """The longest hit by the contents of all named blocks, without any use of keys."""
    named = [slots for slots, key in zip(model.slots, cache.ledger.key_of, strict=True) if key is not None]
    tokens = seq.tokens

    def cached(group: int, block: int) -> bool:
        span = range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
        wanted = [Slot(group, p, context_digest(tokens[: p + 1]), seq.request.tenant) for p in span]
        return wanted in named

    for n in candidates(len(tokens)):
        needed = [
            (g, block)
            for g, group in enumerate(cache.groups)
            for block in range(-(-n // BLOCK_SIZE))
            if group.window is None or (block + 1) * BLOCK_SIZE > max(0, n - group.window + 1)
        ]
        if all(cached(g, block) for g, block in needed):
            return n
    raise AssertionError("no hit at all is always possible")


class ManagerMachine(RuleBasedStateMachine):
    @initialize(layout=st.sampled_from(sorted(LAYOUTS)), blocks=st.integers(20, 40))
    def build(self, layout: str, blocks: int) -> None:
        self.cache = make_cache(layout, blocks)
        self.model = FakeModel(LAYOUTS[layout], blocks, CHUNK)
        self.alive: list[Sequence] = []

    def pick(self, data: st.DataObject) -> Sequence:
        return data.draw(st.sampled_from(self.alive))

    @rule(length=st.sampled_from([1, 15, 16, 17, 31, 32, 48, 64, 70]), branch=st.integers(0, 70), tenant=st.sampled_from("ab"))
    def start(self, length: int, branch: int, tenant: str) -> None:
        seq = make_seq([p if p < branch else p + 1000 for p in range(length)], tenant)
        hit = self.cache.match(seq)
        assert hit == brute_force_hit(self.cache, self.model, seq)
        self.cache.attach(seq, hit)
        self.alive.append(seq)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), rows=st.integers(1, CHUNK))
    def step(self, data: st.DataObject, rows: int) -> None:
        seq = self.pick(data)
        if seq.num_computed == len(seq.tokens):
            seq.tokens.append(data.draw(st.integers(0, 1)))
        before = (copy.deepcopy(seq.tables), self.cache.usage(), list(self.cache.ledger.refs), list(self.cache.ledger.key_of))
        upto = min(len(seq.tokens), seq.num_computed + rows)
        if not compute(self.cache, seq, upto, self.model):
            after = (seq.tables, self.cache.usage(), self.cache.ledger.refs, self.cache.ledger.key_of)
            assert after == before or (before[0] == [] and after[1:] == before[1:])

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.pick(data)
        child = make_seq(parent.request.prompt_ids, parent.request.tenant)  # type: ignore[arg-type]
        done = self.cache.fork(parent, child)
        if parent.num_computed == parent.prompt_len:  # the moment at which the scheduler forks
            assert done
        if done:
            assert child.num_computed == parent.prompt_len - 1
            self.alive.append(child)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq = self.pick(data)
        self.cache.release(seq)
        self.alive.remove(seq)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check(self.alive)


ManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestManager = ManagerMachine.TestCase


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 100, 160])
def test_the_same_prompt_again_hits_all_whole_blocks_but_never_the_last_token(layout, length):
    cache = make_cache(layout)
    assert run_whole(cache, make_seq(range(length))) == 0
    again = length - 1 if length % BLOCK_SIZE == 0 else length // BLOCK_SIZE * BLOCK_SIZE
    assert run_whole(cache, make_seq(range(length))) == again
    cache.check([])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_branching_at_every_offset_hits_the_blocks_before_the_branch(layout):
    cache = make_cache(layout, blocks=200)
    run_whole(cache, make_seq(range(64)))
    for branch in range(64):
        hit = cache.match(make_seq([*range(branch), 9999, *range(branch + 1, 64)]))
        assert hit == branch // BLOCK_SIZE * BLOCK_SIZE


def test_equal_second_blocks_are_not_shared_after_different_first_blocks():
    cache = make_cache()
    run_whole(cache, make_seq([*[1] * 16, *range(16), 0]))
    assert cache.match(make_seq([*[2] * 16, *range(16), 0])) == 0


def test_tenants_share_nothing():
    cache = make_cache()
    for tenant in ("a", "b", ""):
        assert run_whole(cache, make_seq(range(40), tenant)) == 0
        assert run_whole(cache, make_seq(range(40), tenant)) == 32


def test_other_weights_have_other_keys():
    one, other, same = (make_cache(identity=name) for name in ("x", "y", "x"))
    keys = []
    for cache in (one, other, same):
        seq = make_seq(range(40))
        cache.match(seq)
        keys.append(seq.keys)
    assert keys[0] == keys[2]
    assert not set(keys[0]) & set(keys[1])


def test_no_hit_when_the_prefix_cache_is_off():
    cache = make_cache(prefix_cache=False)
    assert run_whole(cache, make_seq(range(64))) == 0
    assert run_whole(cache, make_seq(range(64))) == 0
    assert cache.usage() == Usage(64, 64, 0, 0)


def test_no_hit_while_prompt_logprobs_are_wanted():
    cache = make_cache()
    run_whole(cache, make_seq(range(64)))
    assert cache.match(make_seq(range(64), prompt_logprobs=0)) == 0


def test_a_generated_token_is_cached_too():
    cache = make_cache()
    seq = make_seq(range(10))
    seq.tokens += range(100, 130)
    run_whole(cache, seq)
    assert cache.match(make_seq([*range(10), *range(100, 130), 7])) == 32


def test_tokens_that_were_not_computed_are_never_found():
    cache = make_cache()
    seq = make_seq(range(64))
    cache.attach(seq, 0)
    assert cache.allocate(seq, 48) is not None
    seq.num_computed = 31  # the rest was a draft that was turned down
    cache.commit(seq)
    cache.release(seq)
    assert cache.match(make_seq(range(64))) == 16


def test_a_block_written_twice_by_neighbours_is_named_once():
    cache = make_cache()
    twins = [make_seq(range(20)), make_seq(range(20))]
    for seq in twins:
        cache.attach(seq, cache.match(seq))
    for seq in twins:
        assert compute(cache, seq, 20)
    for seq in twins:
        cache.release(seq)
    assert cache.usage() == Usage(64, 63, 1, 0)


def test_the_tail_of_the_least_recently_used_prefix_is_evicted_first():
    cache = make_cache(blocks=6)
    run_whole(cache, make_seq(range(48)))  # 3 blocks
    run_whole(cache, make_seq(range(1000, 1032)))  # 2 blocks
    run_whole(cache, make_seq(range(2000, 2032)))  # takes the free block, and the oldest cached one
    assert cache.match(make_seq(range(49))) == 32
    assert cache.match(make_seq(range(1000, 1033))) == 32


def test_all_groups_lose_their_tail_together():
    cache = make_cache("full and sliding", blocks=9)
    run_whole(cache, make_seq(range(40)))  # 6 blocks with a name, 3 without
    noise = make_seq(range(1000, 1016))
    cache.attach(noise, 0)
    assert compute(cache, noise, 16)
    noise.tokens += range(16)
    assert compute(cache, noise, 32)
    assert cache.match(make_seq(range(40))) == 16


def test_a_cached_last_block_in_use_is_copied_before_it_is_written():
    cache = make_cache()
    first = make_seq(range(32))
    cache.attach(first, 0)
    assert compute(cache, first, 32)
    second = make_seq(range(32))
    cache.attach(second, cache.match(second))
    assert second.num_computed == 31
    shared = second.tables[0][1]
    assert cache.allocate(second, 32) == [(shared, second.tables[0][1])]
    assert second.tables[0][0] == first.tables[0][0]
    assert second.tables[0][1] != first.tables[0][1]
    cache.check([first, second])


def test_a_cached_last_block_that_nobody_holds_is_written_in_place_even_in_a_full_pool():
    cache = make_cache(blocks=2)
    run_whole(cache, make_seq(range(32)))
    again = make_seq(range(32))
    cache.attach(again, cache.match(again))
    assert again.num_computed == 31
    assert cache.allocate(again, 32) == []
    assert cache.ledger.key_of[again.tables[0][1]] is None  # its contents are not final now
    again.num_computed = 32
    cache.commit(again)
    cache.release(again)
    assert cache.match(make_seq(range(32))) == 31


def test_a_cached_last_block_keeps_its_name_where_there_is_room():
    cache = make_cache()
    run_whole(cache, make_seq(range(32)))
    again = make_seq(range(32))
    cache.attach(again, cache.match(again))
    [(source, target)] = cache.allocate(again, 32) or []
    assert again.tables[0][1] == target != source
    assert cache.match(make_seq(range(32))) == 31


def test_a_fork_shares_all_and_then_copies_the_tail_on_both_sides():
    cache = make_cache()
    parent = make_seq(range(40))
    cache.attach(parent, 0)
    assert compute(cache, parent, 40)
    child = make_seq(range(40))
    assert cache.fork(parent, child)
    assert child.tables == parent.tables
    assert cache.usage().in_use == 3
    tail = parent.tables[0][2]
    assert cache.allocate(child, 40) == [(tail, child.tables[0][2])]
    assert cache.allocate(parent, 41) == []
    assert parent.tables[0][2] == tail
    cache.check([parent, child])


def test_the_last_of_two_to_write_a_shared_tail_writes_it_in_place():
    cache = make_cache()
    parent = make_seq(range(40))
    cache.attach(parent, 0)
    assert compute(cache, parent, 40)
    child = make_seq(range(40))
    assert cache.fork(parent, child)
    cache.release(parent)
    tail = child.tables[0][2]
    assert cache.allocate(child, 40) == []
    assert child.tables[0][2] == tail


def test_no_fork_before_the_prompt_is_computed():
    cache = make_cache()
    parent = make_seq(range(40))
    cache.attach(parent, 0)
    assert compute(cache, parent, 20)
    child = make_seq(range(40))
    assert not cache.fork(parent, child)
    assert child.tables == []


def test_no_fork_from_a_parent_whose_window_has_moved_on():
    cache = make_cache("full and sliding")
    parent = make_seq(range(40))
    parent.tokens += [0] * 40
    cache.attach(parent, 0)
    for upto in range(1, 81):
        assert compute(cache, parent, upto)
    usage = cache.usage()
    assert not cache.fork(parent, make_seq(range(40)))
    assert cache.usage() == usage


def test_a_sliding_group_holds_its_window_and_no_more():
    cache = make_cache("full and sliding", blocks=200)
    seq = make_seq(range(300))
    cache.attach(seq, 0)
    for upto in range(1, 301):
        assert compute(cache, seq, upto)
        if upto % BLOCK_SIZE == 0:
            gone = max(0, upto - 20) // BLOCK_SIZE
            assert [b < 0 for b in seq.tables[1]] == [True] * gone + [False] * (upto // BLOCK_SIZE - gone)
    assert -1 not in seq.tables[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 40])
def test_blocks_needed_is_exactly_the_most_that_is_held(layout, chunk):
    """Over all beginnings of the chunks: the peak is reached, and never passed."""
    for length in (1, 16, 17, 60, 100, 101):
        most = 0
        for first in range(1, min(chunk, length) + 1):
            cache = KVCacheManager(LAYOUTS[layout], 100, {}, chunk=chunk)
            seq = make_seq(range(length))
            cache.attach(seq, 0)
            ends = [*range(first, length, chunk), length]
            for end in ends:
                assert cache.allocate(seq, end) is not None
                most = max(most, cache.usage().in_use)
                seq.num_computed = end
                if end // BLOCK_SIZE > seq.num_registered:
                    cache.commit(seq)
        needed = cache.blocks_needed(length)
        assert most <= needed
        if length <= 17 or length - chunk >= 48 + 16:
            assert most == needed
        assert KVCacheManager(LAYOUTS[layout], needed, {}, chunk=chunk).can_ever_hold(length)
        assert not KVCacheManager(LAYOUTS[layout], needed - 1, {}, chunk=chunk).can_ever_hold(length)


def test_a_window_needs_the_blocks_it_overlaps():
    window = SlidingManager(20)
    assert [window.first_needed(p) for p in (0, 19, 34, 35, 51)] == [0, 0, 0, 1, 2]
