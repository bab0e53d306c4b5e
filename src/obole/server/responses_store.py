"""Responses that may be asked for again, each by its tenant only: bounded in number, bytes and age."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

OVERHEAD = 1024  # bytes that a response takes up beside its texts


@dataclass(slots=True, eq=False)
class Turn:
    """What one response added to its conversation: input and answer as chat messages, without instructions.

    Turns form trees that grow towards their roots: `before` is what this one continues. A turn is kept as long as a
    response needs it, its own or a later one; `holders` counts those, `size` is its bytes.
    """

    before: Turn | None
    messages: Sequence[dict[str, Any]]
    size: int = 0
    holders: int = 0

    def conversation(self) -> list[dict[str, Any]]:
        """The messages from the first turn to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.before
        return [message for turn in reversed(turns) for message in turn.messages]


class Live(Protocol):
    """A response in progress."""

    @property
    def status(self) -> str: ...

    def json(self) -> bytes:
        """As it is now."""

    def cancel(self) -> None:
        """End it before its time."""


@dataclass(slots=True, eq=False)
class Stored:
    """One response of a tenant. `live`: None once it has ended; then `document` is its JSON and `status` how it ended.

    `turn`: None while it cannot be continued, because it has no end or a bad one.
    """

    tenant: int
    id: str
    live: Live | None
    status: str = "in_progress"
    document: bytes = b""
    turn: Turn | None = None
    used: float = 0.0  # when somebody last asked for it or continued it
    size: int = 0  # bytes, without the turn

    def json(self) -> bytes:
        return self.document if self.live is None else self.live.json()


@dataclass(slots=True)
class _Share:
    """What one tenant has stored, that used longest ago first."""

    responses: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    size: int = 0  # bytes


class ResponseStore:
    """Keeps at most `most` responses and `most_bytes` bytes, none longer than `seconds` after its last use.

    When room is needed, the tenant that takes up most of what is scarce loses the response that it used longest ago: nobody
    can push out what others stored by storing much. For one thread. `clock`: seconds.
    """

    def __init__(self, most: int, most_bytes: int, seconds: float, clock: Callable[[], float]) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._clock = clock
        self._shares: dict[int, _Share] = {}

    def __len__(self) -> int:
        return sum(len(share.responses) for share in self._shares.values())

    @property
    def size(self) -> int:
        """Bytes of all that is stored."""
        return sum(share.size for share in self._shares.values())

    def begin(self, stored: Stored) -> None:
        """Keep a response that is in progress."""
        share = self._shares.setdefault(stored.tenant, _Share())
        share.responses[stored.id] = stored
        stored.used = self._clock()
        stored.size = OVERHEAD
        share.size += stored.size
        self._make_room()

    def end(self, stored: Stored, turn: Turn | None) -> None:
        """A response has come to its end, after which it shows the same for ever. If it was deleted meanwhile, it stays so."""
        assert stored.live is not None
        stored.document, stored.status, stored.live = stored.live.json(), stored.live.status, None
        share = self._shares.get(stored.tenant)
        if share is None or share.responses.get(stored.id) is not stored:
            return
        stored.used = self._clock()
        share.responses.move_to_end(stored.id)
        stored.size += len(stored.document)
        share.size += len(stored.document)
        if turn is not None:
            turn.size = len(msgspec.json.encode(turn.messages))
            stored.turn = turn
            _hold(share, turn)
        self._make_room()

    def find(self, tenant: int, response_id: str) -> Stored | None:
        """A tenant's response by its id; it counts as used."""
        self._expire()
        share = self._shares.get(tenant)
        stored = None if share is None else share.responses.get(response_id)
        if share is not None and stored is not None:
            stored.used = self._clock()
            share.responses.move_to_end(response_id)
        return stored

    def delete(self, stored: Stored) -> None:
        """Forget a response. Those that continue it stay whole."""
        share = self._shares[stored.tenant]
        if share.responses.pop(stored.id, None) is None:
            return
        share.size -= stored.size
        _release(share, stored.turn)
        stored.turn = None

    def _make_room(self) -> None:
        self._expire()
        while len(self) > self._most:
            self._drop_oldest(max(self._shares.values(), key=lambda share: len(share.responses)))
        while self.size > self._most_bytes:
            self._drop_oldest(max(self._shares.values(), key=lambda share: share.size))

    def _expire(self) -> None:
        latest = self._clock() - self._seconds
        for share in self._shares.values():
            while share.responses and next(iter(share.responses.values())).used <= latest:
                self._drop_oldest(share)

    def _drop_oldest(self, share: _Share) -> None:
        self.delete(next(iter(share.responses.values())))


def _hold(share: _Share, turn: Turn | None) -> None:
    while turn is not None:
        turn.holders += 1
        if turn.holders > 1:
            return
        share.size += turn.size
        turn = turn.before


def _release(share: _Share, turn: Turn | None) -> None:
    while turn is not None:
        turn.holders -= 1
        if turn.holders:
            return
        share.size -= turn.size
        turn = turn.before
