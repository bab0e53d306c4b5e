"""Drafters that a test writes itself, and a constraint made by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from obole import Engine
from obole.speculate.controller import Controller, Drafter, Speculation, always
from obole.speculate.lookup import Lookup
from obole.speculate.proposal import Proposal
from obole.types import Sequence, Source

Propose = Callable[[Sequence, int], Proposal | None]


@dataclass(slots=True)
class Scripted(Controller):
    """A controller whose drafters a test provides, one for each sequence; requests with "off" have none."""

    make: Callable[[Sequence], Drafter] | None = None

    def _begin(self, seq: Sequence) -> Speculation:
        if (seq.request.params.speculate or self.mode) == "off" or self.make is None:
            return Speculation((), None)
        drafter = self.make(seq)
        return Speculation((drafter,), drafter if isinstance(drafter, Lookup) else None)


@dataclass(slots=True)
class Says:
    """A drafter that is one function."""

    function: Propose

    def propose(self, seq: Sequence, most: int) -> Proposal | None:
        return self.function(seq, most)


def inject(engine: Engine, make: Callable[[Sequence], Drafter], length: int) -> None:
    """Let a drafter of the test's draft for every sequence to come, `length` tokens at a time."""
    known = {f.name: getattr(engine._controller, f.name) for f in dataclasses.fields(Controller)}
    engine._controller = Scripted(**known | {"lengths": always(length)}, make=make)


def oracle(
    answers: Mapping[tuple[int, ...], tuple[int, ...]], spoil: Callable[[int, int], int]
) -> Callable[[Sequence], Drafter]:
    """Drafts the known answer to each prompt. `spoil(place in the answer, token)` is what is drafted in place of a token."""

    def propose(seq: Sequence, most: int) -> Proposal | None:
        done = len(seq.tokens) - seq.prompt_len
        rest = answers[seq.request.prompt_ids][done : done + most]
        tokens = [spoil(done + j, token) for j, token in enumerate(rest)]
        return Proposal(Source.LOOKUP, 8, 1.0, tokens) if tokens else None

    return lambda _: Says(propose)


@dataclass(slots=True)
class Automaton:
    """A constraint as a table: `moves[state][token]` is the next state; the answer is over in a state without moves."""

    moves: Mapping[int, Mapping[int, int]]
    vocab_size: int
    state: int = 0
    taken: list[int] = field(default_factory=list)

    def allowed(self) -> np.ndarray:
        bits = np.zeros(-(-self.vocab_size // 32) * 32, dtype=np.uint8)
        bits[list(self.moves[self.state])] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token_id: int) -> None:
        self.state = self.moves[self.state][token_id]  # KeyError: the token was not allowed
        self.taken.append(token_id)

    def forced(self) -> list[int]:
        tokens, state, seen = [], self.state, set()
        while len(self.moves[state]) == 1 and state not in seen:
            seen.add(state)
            [(token, state)] = self.moves[state].items()
            tokens.append(token)
        return tokens

    @property
    def over(self) -> bool:
        return not self.moves[self.state]
