"""The store against a model: whatever is done in whatever order, a block that comes is the right one, and the books balance."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fakes.faulty_disk import FaultyDisk
from fakes.tier_blocks import FOLDER, IDENTITY, OTHER, OWNER, SIZE, content, contents, key, name
from obole.cache.tiers.load import StoreLoad
from obole.cache.tiers.store import TierStore

RAM_BLOCKS = 6
NUMBERS = st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True)


def owner_of(number: int) -> bytes:
    return OWNER if number % 2 else OTHER


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.disk = FaultyDisk()
        self.given: set[int] = set()  # and not forgotten since
        self.loads: list[tuple[StoreLoad, list[int]]] = []
        self.now = 0.0
        self.open()

    def open(self) -> None:
        self.store = TierStore(
            SIZE, IDENTITY, RAM_BLOCKS * SIZE, (FOLDER, 80 * SIZE), lambda: self.now, disk=self.disk, queue_bytes=8 * SIZE
        )

    def teardown(self) -> None:
        self.store.close()

    @rule(numbers=NUMBERS, persist=st.booleans())
    def give(self, numbers: list[int], persist: bool) -> None:
        names = [name(n, owner_of(n)) for n in numbers]
        (self.store.persist if persist else self.store.demote)(names, contents(numbers))
        self.given |= set(numbers)

    @rule(numbers=NUMBERS)
    def load(self, numbers: list[int]) -> None:
        self.loads.append((self.store.load([key(n) for n in numbers]), numbers))

    @rule()
    def finish(self) -> None:
        if not self.loads:
            return
        load, numbers = self.loads.pop(0)
        while not load.over:
            self.store.wait(1.0)
        for i in range(load.ready):
            assert bytes(load.block(i)) == bytes(content(numbers[i]))
        load.close()

    @rule()
    def leave_one(self) -> None:
        if self.loads:
            self.loads.pop()[0].close()

    @rule(numbers=NUMBERS, seconds=st.floats(0, 100))
    def hold(self, numbers: list[int], seconds: float) -> None:
        self.store.hold([key(n) for n in numbers], self.now + seconds)

    @rule(seconds=st.floats(0, 100))
    def later(self, seconds: float) -> None:
        self.now += seconds

    @rule(owner=st.sampled_from([OWNER, OTHER]))
    def forget(self, owner: bytes) -> None:
        gone = {n for n in self.given if owner_of(n) == owner}
        assert self.store.forget(owner) <= len(gone)
        self.given -= gone

    @rule()
    def flush(self) -> None:
        self.store.flush()
        whole = self.disk.contents()
        assert not any(bytes(content(n)) in whole for n in set(range(41)) - self.given)

    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        self.store.flush()
        if killed:
            self.disk = self.disk.killed()
        self.store.close()
        self.loads.clear()
        self.open()

    @invariant()
    def only_what_was_given_is_anywhere(self) -> None:
        assert all(self.store.where(key(n)) is None for n in set(range(41)) - self.given)

    @invariant()
    def books_balance(self) -> None:
        with self.store._lock:
            arena, ram = self.store._arena, self.store._ram
            assert ram is not None
            assert arena.free == sum(holders == 0 for holders in arena.holders)
            assert len(ram) + ram._reserved <= RAM_BLOCKS
            assert len(ram._policy) + len(ram._copies) == len(ram)


StoreMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestStore = StoreMachine.TestCase
