"""Stop strings as an automaton that reads one character at a time (Aho and Corasick, 1975).

Reading by characters makes the answer independent of how the text was cut into tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopAutomaton:
    """States are the prefixes of all stop strings; state 0 is the empty one. Immutable once built.

    `live[state]`: how much of the text's end may still become a stop string.
    `match[state]`: length of the longest stop string that ends here, 0 if none does.
    """

    __slots__ = ("live", "match", "_next", "_fail")

    def __init__(self, stops: Sequence[str]) -> None:
        self.live = [0]
        self.match = [0]
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character: the longest suffix of the text that is a prefix of a stop string."""
        while True:
            found = self._next[state].get(character)
            if found is not None:
                return found
            if state == 0:
                return 0
            state = self._fail[state]

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            found = self._next[state].get(character)
            if found is None:
                found = len(self._next)
                self._next[state][character] = found
                self._next.append({})
                self._fail.append(0)
                self.match.append(0)
                self.live.append(self.live[state] + 1)  # the length of the prefix
            state = found
        self.match[state] = len(stop)

    def _link(self) -> None:
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            for character, child in self._next[state].items():
                fail = self._fail[child] = self.step(self._fail[state], character) if state else 0
                self.match[child] = self.match[child] or self.match[fail]
                if not self._next[child]:  # complete, and the beginning of no longer one
                    self.live[child] = self.live[fail]
                waiting.append(child)


@lru_cache(maxsize=64)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of some stop strings (64 of 200 characters take some milliseconds to build, so it is shared)."""
    return StopAutomaton(stops)
