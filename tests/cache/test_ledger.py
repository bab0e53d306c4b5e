"""The ledger against a model that is too simple to be wrong."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from obole.cache.ledger import BlockLedger, LedgerError, Usage

BLOCKS = 6


def key(n: int) -> bytes:
    return b"key %d" % n


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = BlockLedger(BLOCKS)
        self.held: list[int] = []  # with repetition
        self.names: dict[int, bytes] = {}  # block: key
        self.cached: list[int] = []  # let go of longest ago first

    @precondition(lambda self: self.ledger.available)
    @rule()
    def allocate(self) -> None:
        anything_free = len(self.cached) + len(set(self.held)) < BLOCKS
        block = self.ledger.allocate()
        if anything_free:
            assert block not in self.cached
        else:
            assert block == self.cached.pop(0)
            del self.names[block]
        assert block not in self.held
        assert self.ledger.key_of[block] is None
        self.held.append(block)

    @precondition(lambda self: not self.ledger.available)
    @rule()
    def allocate_too_much(self) -> None:
        with pytest.raises(LedgerError, match="in use"):
            self.ledger.allocate()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.ledger.release(block)
        self.held.remove(block)
        if block not in self.held and block in self.names:
            self.cached.append(block)

    @rule(block=st.integers(0, BLOCKS - 1))
    def acquire(self, block: int) -> None:
        if block in self.held or block in self.cached:
            self.ledger.acquire(block)
            self.held.append(block)
            if block in self.cached:
                self.cached.remove(block)
        else:
            with pytest.raises(LedgerError, match="free"):
                self.ledger.acquire(block)

    @rule(block=st.integers(0, BLOCKS - 1), n=st.integers(0, 4))
    def register(self, block: int, n: int) -> None:
        if block not in self.held or block in self.names:
            with pytest.raises(LedgerError):
                self.ledger.register(block, key(n))
        elif key(n) in self.names.values():
            assert self.ledger.register(block, key(n)) is False
        else:
            assert self.ledger.register(block, key(n)) is True
            self.names[block] = key(n)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.ledger.forget(block)
        self.names.pop(block, None)

    @invariant()
    def books_balance(self) -> None:
        self.ledger.check(self.held)
        in_use, cached = len(set(self.held)), len(self.cached)
        assert self.ledger.usage() == Usage(BLOCKS, BLOCKS - in_use - cached, cached, in_use)
        assert self.ledger.available == BLOCKS - in_use
        for n in range(5):
            found = [block for block, name in self.names.items() if name == key(n)]
            assert self.ledger.lookup(key(n)) == (found[0] if found else None)


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase


def test_a_block_released_too_often_is_an_error():
    ledger = BlockLedger(2)
    block = ledger.allocate()
    ledger.release(block)
    with pytest.raises(LedgerError, match="does not hold"):
        ledger.release(block)
    ledger.check([])


def test_check_finds_a_lost_block():
    ledger = BlockLedger(2)
    block = ledger.allocate()
    ledger.refs[block] = 0
    with pytest.raises(LedgerError, match="are not 2 blocks"):
        ledger.check()


def test_check_compares_with_what_the_holders_say():
    ledger = BlockLedger(2)
    block = ledger.allocate()
    ledger.check([block])
    for wrong in ([], [block, block], [1 - block]):
        with pytest.raises(LedgerError, match="more or less often"):
            ledger.check(wrong)
