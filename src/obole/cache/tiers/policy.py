"""Which block to give up next: pure objects over keys, without bytes, files or threads.

`benchmarks/cache_traces.py` replays them. Sizes are in any unit, as long as it is that of the capacity. Whoever puts a whole
prefix in, or finds it used, names its last block first: what is deeper in a prefix is worthless without its beginning, and so
should go earlier.
"""

# ruff: noqa: ARG002  (policies that have no use for a size or a cost are told them all the same)
from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import Protocol, TypeVar

Key = bytes
MAX_COUNT = 3  # uses that S3-FIFO remembers of a key
MEMORIES = 4  # keys of which a log remembers something, for each that it holds

V = TypeVar("V")


class Policy(Protocol):
    """What is kept, and the order in which it goes. All methods but GDSF's are O(1), amortised."""

    def __len__(self) -> int: ...

    def __contains__(self, key: Key) -> bool: ...

    def add(self, key: Key, size: int = 1, cost: float = 1.0) -> None:
        """A key that is not there yet. `cost`: of doing without it, in any unit."""

    def hit(self, key: Key) -> None:
        """A key that is there was used."""

    def remove(self, key: Key) -> None:
        """A key that is there goes for another reason."""

    def victim(self) -> Key:
        """Take out the key to give up next. KeyError where nothing is left."""


class Lru:
    """Least recently used first. Source: folklore."""

    def __init__(self) -> None:
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, key: Key, size: int = 1, cost: float = 1.0) -> None:
        self._keys[key] = None

    def hit(self, key: Key) -> None:
        self._keys.move_to_end(key)

    def remove(self, key: Key) -> None:
        del self._keys[key]

    def victim(self) -> Key:
        return self._keys.popitem(last=False)[0]


class Sieve:
    """One queue and a hand that walks from the oldest to the newest, sparing what was used since it last came by.

    Source: Zhang et al., SIEVE is simpler than LRU, NSDI 2024.
    """

    def __init__(self) -> None:
        self._used: dict[Key, bool] = {}
        self._newer: dict[Key | None, Key | None] = {None: None}  # a ring through None: newer than None is the oldest
        self._older: dict[Key | None, Key | None] = {None: None}
        self._hand: Key | None = None  # None: begins at the oldest

    def __len__(self) -> int:
        return len(self._used)

    def __contains__(self, key: Key) -> bool:
        return key in self._used

    def add(self, key: Key, size: int = 1, cost: float = 1.0) -> None:
        newest = self._older[None]
        self._newer[newest], self._older[key] = key, newest
        self._newer[key], self._older[None] = None, key
        self._used[key] = False

    def hit(self, key: Key) -> None:
        self._used[key] = True

    def remove(self, key: Key) -> None:
        del self._used[key]
        newer, older = self._newer.pop(key), self._older.pop(key)
        self._newer[older], self._older[newer] = newer, older
        if self._hand == key:
            self._hand = newer

    def victim(self) -> Key:
        if not self._used:
            raise KeyError("Nothing is left to give up.")
        hand = self._hand
        while hand is None or self._used[hand]:
            if hand is not None:
                self._used[hand] = False
            hand = self._newer[hand]
        self._hand = hand
        self.remove(hand)
        return hand


class S3Fifo:
    """Two queues: a small one that most keys leave without a second use, and the main one, where used keys go round again.

    A key that comes back soon after it left the small queue enters the main one. Source: Yang et al., FIFO queues are all you
    need for cache eviction, SOSP 2023. `promote`: uses in the small queue that lead into the main one.
    """

    def __init__(self, capacity: int, small: float = 0.1, promote: int = 1) -> None:
        self._small_capacity = capacity * small
        self._ghost_capacity = capacity - self._small_capacity
        self._promote = promote
        self._small: OrderedDict[Key, int] = OrderedDict()  # sizes
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghost: OrderedDict[Key, int] = OrderedDict()  # gone from the small queue, remembered by name
        self._small_size = self._ghost_size = 0
        self._count: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._count)

    def __contains__(self, key: Key) -> bool:
        return key in self._count

    def add(self, key: Key, size: int = 1, cost: float = 1.0) -> None:
        self._count[key] = 0
        if key in self._ghost:
            self._ghost_size -= self._ghost.pop(key)
            self._main[key] = size
        else:
            self._small[key] = size
            self._small_size += size

    def hit(self, key: Key) -> None:
        self._count[key] = min(self._count[key] + 1, MAX_COUNT)

    def remove(self, key: Key) -> None:
        del self._count[key]
        if key in self._small:
            self._small_size -= self._small.pop(key)
        else:
            del self._main[key]

    def victim(self) -> Key:
        while self._small and (self._small_size >= self._small_capacity or not self._main):
            key, size = self._small.popitem(last=False)
            self._small_size -= size
            if self._count[key] < self._promote:
                del self._count[key]
                self._remember(key, size)
                return key
            self._count[key] = 0
            self._main[key] = size
        while True:
            key, size = self._main.popitem(last=False)  # KeyError: nothing is left
            if self._count[key] == 0:
                del self._count[key]
                return key
            self._count[key] -= 1
            self._main[key] = size

    def _remember(self, key: Key, size: int) -> None:
        self._ghost[key] = size
        self._ghost_size += size
        while self._ghost_size > self._ghost_capacity:
            self._ghost_size -= self._ghost.popitem(last=False)[1]


class Gdsf:
    """By cost times uses over size, ageing as others are given up: the least first. O(log n).

    Source: Cherkasova, Improving WWW proxies performance with greedy-dual-size-frequency caching policy, 1998.
    """

    def __init__(self) -> None:
        self._age = 0.0
        self._serial = 0
        self._worth: dict[Key, tuple[float, int, float, int]] = {}  # priority, serial, cost over size, uses
        self._heap: list[tuple[float, int, Key]] = []  # entries that are no longer what `_worth` says are skipped

    def __len__(self) -> int:
        return len(self._worth)

    def __contains__(self, key: Key) -> bool:
        return key in self._worth

    def add(self, key: Key, size: int = 1, cost: float = 1.0) -> None:
        self._set(key, cost / size, 1)

    def hit(self, key: Key) -> None:
        _, _, density, uses = self._worth[key]
        self._set(key, density, uses + 1)

    def remove(self, key: Key) -> None:
        del self._worth[key]

    def victim(self) -> Key:
        if not self._worth:
            raise KeyError("Nothing is left to give up.")
        while True:
            priority, serial, key = heapq.heappop(self._heap)
            if self._worth.get(key, (0.0, -1))[1] == serial:
                self._age = priority
                del self._worth[key]
                return key

    def _set(self, key: Key, density: float, uses: int) -> None:
        self._serial += 1
        priority = self._age + density * uses
        self._worth[key] = (priority, self._serial, density, uses)
        heapq.heappush(self._heap, (priority, self._serial, key))
        if len(self._heap) > 4 * len(self._worth) + 64:
            self._heap = [(worth[0], worth[1], name) for name, worth in self._worth.items()]
            heapq.heapify(self._heap)


class Holding:
    """A policy some of whose keys are held until a time: they go last, those whose time ends first before others.

    What is held need not be there yet: it is held when it comes.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._until: dict[Key, float] = {}
        self._ends: list[tuple[float, Key]] = []  # a heap; those that `_until` contradicts are out of date
        self._parked: dict[Key, tuple[int, float]] = {}  # held and there: size and cost, out of the policy's sight

    def __len__(self) -> int:
        return len(self._policy) + len(self._parked)

    def __contains__(self, key: Key) -> bool:
        return key in self._parked or key in self._policy

    def add(self, key: Key, size: int = 1, cost: float = 1.0) -> None:
        if key in self._until:
            self._parked[key] = (size, cost)
        else:
            self._policy.add(key, size, cost)

    def hit(self, key: Key) -> None:
        if key not in self._parked:
            self._policy.hit(key)

    def remove(self, key: Key) -> None:
        if self._parked.pop(key, None) is None:
            self._policy.remove(key)

    def hold(self, key: Key, until: float, size: int = 1, cost: float = 1.0) -> None:
        """From now on, until then. A later time counts, an earlier one does not."""
        if until <= self._until.get(key, -float("inf")):
            return
        self._until[key] = until
        heapq.heappush(self._ends, (until, key))
        if key in self._policy:
            self._policy.remove(key)
            self._parked[key] = (size, cost)

    def release(self, key: Key) -> None:
        """Whoever held it has no more say."""
        if self._until.pop(key, None) is not None and key in self._parked:
            self._policy.add(key, *self._parked.pop(key))

    def held(self, key: Key, now: float) -> bool:
        return self._until.get(key, now) > now

    def victim(self, now: float) -> Key:
        """Take out the key to give up next. KeyError where nothing is left."""
        self._expire(now)
        if len(self._policy):
            return self._policy.victim()
        while True:
            if not self._parked:
                raise KeyError("Nothing is left to give up.")
            until, key = heapq.heappop(self._ends)
            if self._until.get(key) != until:
                continue
            if key in self._parked:
                del self._until[key], self._parked[key]
                return key
            self._until.pop(key)  # held, not there, and the room is needed: forgotten

    def _expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            until, key = heapq.heappop(self._ends)
            if self._until.get(key) == until:
                self.release(key)


class LogPolicy:
    """For a log of segments in two queues, which are given up whole, the oldest first; what survives is written again.

    The queue of copies takes what is written while a faster tier has it too, so that it outlives the process. Nothing is
    lost by giving up such a copy as long as its key is above, and it sinks when the faster tiers give it up: then it
    survives into the main queue. The main queue is a clock: what was used survives as many rounds, at most `rounds`.

    So the tiers together hold nearly as many different blocks as their sizes add up to, and the newest are on disk besides:
    the copies may take a `share` of the log, and as much more as is not needed yet.

    Where blocks come back only after they were given up, a queue finds none of them, however recent; then the log is selective:
    it takes only what was used before, or came back, and so keeps a part for good. It is so while more than `thrash` times
    as many blocks come back too late as are found. Source: the ghost queue of S3-FIFO, with the faster tiers for its small one.
    """

    def __init__(self, capacity: int, share: float = 0.03, rounds: int = 2, thrash: float = 0.5) -> None:
        self._capacity = capacity  # keys that fit the log, about
        self._share = share
        self._rounds = rounds
        self._thrash = thrash
        self._above: OrderedDict[Key, None] = OrderedDict()
        self._count: OrderedDict[Key, int] = OrderedDict()
        self._until: OrderedDict[Key, float] = OrderedDict()
        self._ghost: OrderedDict[Key, bool] = OrderedDict()  # given up or not taken; True: came back since
        self._found = self._late = 0.0  # blocks found, and that came back too late, the older ones fading
        self._sunk = 0

    @property
    def selective(self) -> bool:
        return self._late > self._thrash * self._found

    def rose(self, key: Key) -> None:
        """A faster tier has it from now on."""
        _remember(self._above, key, None, MEMORIES * self._capacity)

    def missed(self, key: Key) -> None:
        """It was looked for and had to be computed."""
        if key in self._ghost:
            self._late += 1
            _remember(self._ghost, key, True, self._capacity)

    def sank(self, key: Key) -> bool:
        """No faster tier has it any more. False where the log will not have it either."""
        self._sunk += 1
        if self._sunk > self._capacity // 2:
            self._sunk, self._found, self._late = 0, self._found / 2, self._late / 2
        returned = self._ghost.pop(key, False)
        if self.selective and not (returned or key in self._count or key in self._until):
            _remember(self._ghost, key, False, self._capacity)
            return False
        self._above.pop(key, None)
        return True

    def main(self, key: Key) -> bool:
        """Whether a new record goes to the main queue."""
        return key not in self._above

    def hit(self, key: Key) -> None:
        """It was found again, here or above."""
        self._found += 1
        _remember(self._count, key, min(self._count.get(key, 0) + 1, self._rounds), MEMORIES * self._capacity)

    def hold(self, key: Key, until: float) -> None:
        _remember(self._until, key, max(until, self._until.get(key, until)), MEMORIES * self._capacity)

    def forget(self, key: Key) -> None:
        """A key that goes for another reason, without a trace."""
        for memories in (self._above, self._count, self._until, self._ghost):
            memories.pop(key, None)

    def gives_copies(self, copies: int, main: int) -> bool:
        """Whether the queue of copies is the one to give up a segment, the queues being of these sizes."""
        return copies > 0 and (main == 0 or copies >= self._share * (copies + main))

    def survives(self, key: Key, main: bool, now: float, *, honour_holds: bool = True) -> bool:
        """Whether a record of a segment that is given up is to be written again. Asked once each time; else it is gone."""
        until = self._until.get(key)
        if until is not None and until <= now:
            del self._until[key]
        elif until is not None and honour_holds:
            return True
        if key in self._above:
            return False
        count = self._count.get(key, 0)
        if not main:
            return True
        if not count:
            self._until.pop(key, None)
            _remember(self._ghost, key, False, self._capacity)
            return False
        if count > 1:
            self._count[key] = count - 1
        else:
            del self._count[key]
        return True


def _remember(memories: OrderedDict[Key, V], key: Key, value: V, limit: int) -> None:
    """The newest memories, at most so many."""
    memories[key] = value
    memories.move_to_end(key)
    while len(memories) > limit:
        memories.popitem(last=False)
