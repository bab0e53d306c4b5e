"""Eviction policies against models that are too simple to be wrong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from obole.cache.tiers.policy import Gdsf, Holding, LogPolicy, Lru, Policy, S3Fifo, Sieve

STEPS = st.lists(st.tuples(st.sampled_from(["use", "use", "use", "victim", "remove"]), st.integers(0, 9)), max_size=120)


class Model:
    """What a policy is by its definition: lists, searched from end to end."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []  # in order of arrival

    def add(self, key: bytes) -> None:
        self.keys.append(key)

    def hit(self, key: bytes) -> None: ...

    def remove(self, key: bytes) -> None:
        self.keys.remove(key)

    def victim(self) -> bytes:
        return self.keys.pop(0)


class LruModel(Model):
    def hit(self, key: bytes) -> None:
        self.keys.remove(key)
        self.keys.append(key)


class SieveModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.used: set[bytes] = set()
        self.hand = 0

    def hit(self, key: bytes) -> None:
        self.used.add(key)

    def remove(self, key: bytes) -> None:
        place = self.keys.index(key)
        del self.keys[place]
        self.used.discard(key)
        self.hand -= place < self.hand
        self._wrap()

    def victim(self) -> bytes:
        while True:
            key = self.keys[self.hand]
            if key not in self.used:
                del self.keys[self.hand]
                self._wrap()  # past the newest it begins anew, even if newer ones come
                return key
            self.used.remove(key)
            self.hand += 1
            self._wrap()

    def _wrap(self) -> None:
        self.hand = self.hand if self.hand < len(self.keys) else 0


class S3Model(Model):
    """Of a capacity of 10: a small queue of 2, names of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.small: list[bytes] = []
        self.main: list[bytes] = []
        self.ghost: list[bytes] = []
        self.count: dict[bytes, int] = {}

    def add(self, key: bytes) -> None:
        self.keys.append(key)
        self.count[key] = 0
        if key in self.ghost:
            self.ghost.remove(key)
            self.main.append(key)
        else:
            self.small.append(key)

    def hit(self, key: bytes) -> None:
        self.count[key] = min(3, self.count[key] + 1)

    def remove(self, key: bytes) -> None:
        self.keys.remove(key)
        (self.small if key in self.small else self.main).remove(key)

    def victim(self) -> bytes:
        while self.small and (len(self.small) >= 2 or not self.main):
            key = self.small.pop(0)
            if self.count[key]:
                self.count[key] = 0
                self.main.append(key)
                continue
            self.ghost = [*self.ghost, key][-8:]
            self.keys.remove(key)
            return key
        while self.count[self.main[0]]:
            key = self.main.pop(0)
            self.count[key] -= 1
            self.main.append(key)
        key = self.main.pop(0)
        self.keys.remove(key)
        return key


class GdsfModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.age = 0.0
        self.worth: dict[bytes, tuple[float, int, int]] = {}  # priority, when, uses
        self.time = 0

    def _set(self, key: bytes, uses: int) -> None:
        self.time += 1
        self.worth[key] = (self.age + uses, self.time, uses)

    def add(self, key: bytes) -> None:
        self.keys.append(key)
        self._set(key, 1)

    def hit(self, key: bytes) -> None:
        self._set(key, self.worth[key][2] + 1)

    def victim(self) -> bytes:
        key = min(self.keys, key=lambda k: self.worth[k][:2])
        self.age = self.worth[key][0]
        self.keys.remove(key)
        return key


PAIRS = [(Lru, LruModel), (Sieve, SieveModel), (lambda: S3Fifo(10, 0.2), S3Model), (Gdsf, GdsfModel)]


def play(policy: Policy, model: Model, steps: list[tuple[str, int]]) -> None:
    for step, number in steps:
        key = b"%d" % number
        if step == "use":
            there = key in model.keys
            for one in (policy, model):
                (one.hit if there else one.add)(key)
        elif step == "remove" and key in model.keys:
            policy.remove(key)
            model.remove(key)
        elif step == "victim" and model.keys:
            assert policy.victim() == model.victim()
        assert len(policy) == len(model.keys)
        assert all((b"%d" % n in policy) == (b"%d" % n in model.keys) for n in range(10))
    while model.keys:
        assert policy.victim() == model.victim()
    with pytest.raises(KeyError):
        policy.victim()


@pytest.mark.parametrize(("policy", "model"), PAIRS, ids=["lru", "sieve", "s3fifo", "gdsf"])
def test_policies_do_what_their_definitions_say(policy, model):
    @settings(max_examples=150, deadline=None)
    @given(STEPS)
    def check(steps: list[tuple[str, int]]) -> None:
        play(policy(), model(), steps)

    check()


def test_gdsf_weighs_cost_against_size():
    policy = Gdsf()
    for key, size, cost in ((b"dear", 1, 9.0), (b"large", 10, 9.0), (b"cheap", 1, 1.0), (b"middle", 3, 9.0)):
        policy.add(key, size, cost)
    assert [policy.victim() for _ in range(4)] == [b"large", b"cheap", b"middle", b"dear"]


def test_a_prefix_named_from_its_end_goes_from_its_end():
    for policy in (Lru(), Sieve(), S3Fifo(8), Gdsf()):
        for key in (b"3", b"2", b"1", b"0"):
            policy.add(key)
        assert [policy.victim() for _ in range(4)] == [b"3", b"2", b"1", b"0"]


HOLDS = st.lists(
    st.tuples(st.sampled_from(["use", "use", "victim", "remove", "hold", "later"]), st.integers(0, 5), st.integers(1, 9)),
    max_size=80,
)


@settings(max_examples=200, deadline=None)
@given(HOLDS)
def test_what_is_held_goes_last(steps):
    policy = Holding(Lru())
    free: list[bytes] = []  # in LRU order
    held: dict[bytes, float] = {}  # there and held
    until: dict[bytes, float] = {}
    now = 0.0

    def expire() -> None:
        for key in sorted((k for k in until if until[k] <= now), key=lambda k: (until[k], k)):
            del until[key]
            if held.pop(key, None) is not None:
                free.append(key)

    for step, number, amount in steps:
        key = b"%d" % number
        if step == "later":
            now += amount
        elif step == "hold" and now + amount > until.get(key, 0.0):
            policy.hold(key, now + amount)
            until[key] = now + amount
            if key in free:
                free.remove(key)
                held[key] = until[key]
            elif key in held:
                held[key] = until[key]
        elif step == "use":
            if key in free:
                policy.hit(key)
                free.remove(key)
                free.append(key)
            elif key in held:
                policy.hit(key)
            elif key in until:
                policy.add(key)
                held[key] = until[key]
            else:
                policy.add(key)
                free.append(key)
        elif step == "remove" and (key in free or key in held):
            policy.remove(key)
            held.pop(key, None)
            free = [other for other in free if other != key]
        elif step == "victim" and (free or held):
            victim = policy.victim(now)
            expire()
            if free:
                assert victim == free.pop(0)
            else:
                assert victim == min(held, key=lambda k: (held[k], k))
                for gone in [k for k in until if (until[k], k) <= (held[victim], victim)]:
                    until.pop(gone)  # what was held and not there, for less long, was forgotten on the way
                del held[victim]
        assert len(policy) == len(free) + len(held)


def test_the_log_gives_up_copies_and_keeps_what_only_it_has():
    log = LogPolicy(100, share=0.25, rounds=2)
    log.rose(b"above")
    assert not log.main(b"above")
    assert log.main(b"new")
    assert not log.survives(b"above", False, 0.0)  # a faster tier has it
    log.rose(b"sunk")
    log.sank(b"sunk")
    assert log.survives(b"sunk", False, 0.0)
    assert not log.survives(b"sunk", True, 0.0)  # no use since
    for _ in range(5):
        log.hit(b"used")
    assert [log.survives(b"used", True, 0.0) for _ in range(3)] == [True, True, False]
    assert [log.gives_copies(*sizes) for sizes in ((0, 9), (1, 9), (3, 9), (1, 0))] == [False, False, True, True]


def test_the_log_keeps_what_is_held_while_it_can():
    log = LogPolicy(100)
    log.hold(b"a", 10.0)
    assert log.survives(b"a", True, 5.0)
    assert not log.survives(b"a", True, 5.0, honour_holds=False)
    log.hold(b"a", 10.0)
    assert not log.survives(b"a", True, 10.0)


def test_the_log_remembers_so_many_keys_and_no_more():
    log = LogPolicy(1)
    for number in range(9):
        log.rose(b"%d" % number)
    assert [number for number in range(9) if not log.main(b"%d" % number)] == [5, 6, 7, 8]


def test_a_log_that_finds_nothing_because_all_comes_back_too_late_becomes_selective():
    log = LogPolicy(10)
    keys = [b"%d" % number for number in range(10)]
    for key in keys:
        assert log.sank(key)
        assert not log.survives(key, True, 0.0)
    assert not log.selective
    for key in keys[:4]:
        log.missed(key)
    assert log.selective
    assert log.sank(keys[0])  # it came back
    assert not log.sank(b"new")
    log.hold(b"held", 1.0)
    assert log.sank(b"held")
    log.missed(b"new")
    assert log.sank(b"new")
    for _ in range(20):
        log.hit(keys[0])
    assert not log.selective
    assert log.sank(b"newer")
