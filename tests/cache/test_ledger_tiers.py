"""What the books say of tiers: what was named and given up, what is held, and whose it is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from obole.cache.ledger import BlockLedger, LedgerError
from obole.types import NamedBlock


def key(n: int) -> bytes:
    return b"key %d" % n


def filled(blocks: int, *, watch: bool = True) -> BlockLedger:
    """All blocks cached, named by their numbers, block 0 let go of first; owners a and b in turn."""
    ledger = BlockLedger(blocks)
    if watch:
        ledger.watch()
    for block in [ledger.allocate() for _ in range(blocks)]:
        ledger.register(block, key(block), b"a" if block % 2 == 0 else b"b")
    for block in range(blocks):
        ledger.release(block)
    ledger.check()
    return ledger


def test_what_is_named_and_given_up_is_noted_once():
    ledger = filled(3)
    assert [n.block for n in ledger.take_named()] == [0, 1, 2]
    assert ledger.take_named() == []
    assert ledger.allocate() == 0
    assert ledger.take_given_up() == [NamedBlock(key(0), b"a", 0)]
    assert ledger.take_given_up() == []
    ledger.acquire(1)
    ledger.give_up(1)
    assert ledger.take_given_up() == [NamedBlock(key(1), b"b", 1)]
    assert not ledger.knows(key(1))
    ledger.give_up(1)
    assert ledger.take_given_up() == []


def test_nobody_to_tell():
    ledger = filled(3, watch=False)
    ledger.allocate()
    assert ledger.take_named() == ledger.take_given_up() == []


def test_held_blocks_go_last_until_their_time():
    ledger = filled(6)
    assert [ledger.hold(key(n), 10.0) for n in (0, 1, 2, 3)] == [True, True, True, False]
    assert not ledger.hold(b"unknown", 10.0)
    assert ledger.hold(key(0), 5.0)  # an earlier end does not count
    ledger.check()
    assert ledger.usage().cached == 6
    assert [ledger.allocate() for _ in range(4)] == [3, 4, 5, 0]
    ledger.expire(9.9)
    ledger.acquire(1)
    ledger.release(1)
    assert ledger.allocate() == 2  # both are held, and 1 was used since
    ledger.expire(10.0)
    ledger.check()
    assert ledger.allocate() == 1
    with pytest.raises(LedgerError):
        ledger.allocate()


def test_what_is_no_longer_held_is_the_next_to_go():
    ledger = filled(4)
    ledger.hold(key(3), 1.0)
    ledger.expire(2.0)
    assert ledger.allocate() == 3


def test_an_owner_is_forgotten():
    ledger = filled(6)
    ledger.acquire(0)
    ledger.hold(key(2), 10.0)
    ledger.allocate()  # gives up 1, of b
    ledger.take_named()
    assert ledger.forget_owner(b"a") == 3
    ledger.check([0, 1])
    assert not any(ledger.knows(key(n)) for n in (0, 2, 4))
    assert ledger.knows(key(3))
    assert ledger.usage().free == 2
    assert [n.owner for n in ledger.take_given_up()] == [b"b"]
    ledger.release(0)
    assert ledger.usage().free == 3


@given(st.integers(0, 10_000))
def test_the_books_balance_whatever_happens(seed):
    rng = random.Random(seed)
    ledger = BlockLedger(8)
    ledger.watch()
    held: list[int] = []
    for now in range(60):
        action = rng.randrange(6)
        if action < 2 and ledger.available:
            held.append(ledger.allocate())
            if rng.random() < 0.8:
                ledger.register(held[-1], key(rng.randrange(12)), rng.choice([b"a", b"b"]))
        elif action == 2 and held:
            ledger.release(held.pop(rng.randrange(len(held))))
        elif action == 3 and (block := ledger.lookup(key(rng.randrange(12)))) is not None:
            ledger.acquire(block)
            held.append(block)
        elif action == 4:
            ledger.hold(key(rng.randrange(12)), now + rng.randrange(20))
            ledger.expire(float(now))
        elif action == 5 and rng.random() < 0.1:
            ledger.forget_owner(b"a")
        ledger.check(held)
        for named in ledger.take_given_up():
            assert ledger.key_of[named.block] != named.key or ledger.lookup(named.key) == named.block
