"""What drafts would bring for answers that are known: the engine's own controller is led along them without a model.

No answer depends on drafts, so those that a log has are those that there would have been. Each pass drafts what the controller
would draft, accepts of it what the answer confirms, and takes the time that the machine's `StepCost` gives it. The controller
itself hears less of a pass than it takes, as in the engine, and decides by that. One sequence runs at a time.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from obole.costmodel import StepCost
from obole.speculate.acceptance import bucket_of
from obole.speculate.controller import Controller, Drafter
from obole.speculate.lookup import IndexStore, Lookup
from obole.speculate.memory import Memory, Recollection
from obole.speculate.proposal import LONGEST_DRAFT
from obole.speculate.suffix import SuffixIndex
from obole.types import Request, SamplingParams, Sequence, StepPlan

BUCKETS = ("1", "2", "3-4", "5-8", "9-16", "17-32", "33+")  # tokens of the match, as `bucket_of` numbers them
MEMORY_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Answered:
    """A request whose answer is known. `cached`: tokens of the prompt found in the prefix cache."""

    prompt: Seq[int]
    answer: Seq[int]
    tenant: str = ""
    cached: int = 0


@dataclass(slots=True)
class Copying:
    """Of the tokens of answers, how many followed a match of each bucket of lengths (`seen`), and how many of these were what
    had followed before (`right`): in the request's own text, in its tenant's earlier ones, and in the longer match of both."""

    tokens: int = 0
    seen: dict[str, list[int]] = field(default_factory=lambda: {name: [0] * len(BUCKETS) for name in ("own", "memory", "both")})
    right: dict[str, list[int]] = field(
        default_factory=lambda: {name: [0] * len(BUCKETS) for name in ("own", "memory", "both")}
    )

    def share(self, name: str, least_bucket: int = 0) -> float:
        return sum(self.right[name][least_bucket:]) / self.tokens if self.tokens else 0.0

    def note(self, name: str, length: int, right: bool) -> None:
        bucket = bucket_of(length)
        self.seen[name][bucket] += 1
        self.right[name][bucket] += right


@dataclass(frozen=True, slots=True)
class Drafted:
    """One answer with drafts of one kind: `tokens` after the first in `passes` and `seconds`, without drafts in `plain`."""

    tokens: int
    passes: int
    seconds: float
    plain: float
    drafted: int
    accepted: Counter[str]

    @property
    def speed_up(self) -> float:
        return self.plain / self.seconds if self.seconds else 1.0


class Replay:
    """Answers of a log, in their order, under one mode of drafting. Owns the memory of all tenants, at most `memory_bytes`.

    `cost`: what passes take; `told`: what the controller hears of them."""

    def __init__(self, cost: StepCost, told: StepCost, vocab_size: int, mode: str, memory_bytes: int) -> None:
        self.mode = mode
        self._now = 0.0
        self._cost, self._told = own_copy(cost), own_copy(told)
        self._controller = Controller(
            mode=mode,
            cost=own_copy(told),
            vocab_size=vocab_size,
            memory=Memory(memory_bytes, MEMORY_SECONDS),
            store=IndexStore(memory_bytes, MEMORY_SECONDS),
            clock=lambda: self._now,
        )
        self._number = 0

    def plain_seconds(self, context: int) -> float:
        """Of a token after so many others, without drafts."""
        return self._cost.of(1, context, context)

    def run(self, one: Answered) -> Drafted:
        """Lead the controller along one answer."""
        seq = sequence(f"replayed {self._number}", one)
        self._number += 1
        answer = list(one.answer)
        seq.tokens.extend(answer[:1])
        at, passes, seconds, plain, drafted = 1, 0, 0.0, 0.0, 0
        accepted: Counter[str] = Counter()
        while at < len(answer):
            start = seq.num_computed = len(seq.tokens) - 1
            self._controller.draft([seq], 0)
            tokens = [] if seq.draft is None else seq.draft.tokens
            right = 0
            while right < len(tokens) and at + right < len(answer) and tokens[right] == answer[at + right]:
                right += 1
            chosen = answer[at : at + right + 1]
            step = 1 + len(tokens), start * (1 + len(tokens)), start
            took = self._cost.of(*step)
            plan = StepPlan([seq], [start], [1 + len(tokens)], [True], [], 1 + len(tokens))
            self._controller.observe(plan, [chosen], self._told.of(*step))
            if seq.draft is not None:
                accepted[str(seq.draft.sources[0])] += min(right, len(chosen))
            drafted += len(tokens)
            passes += 1
            seconds += took
            plain += sum(self.plain_seconds(start + i) for i in range(len(chosen)))
            seq.draft = None
            seq.tokens.extend(chosen)
            at += len(chosen)
        self._now += seconds
        self._controller.finish(seq)
        return Drafted(max(0, len(answer) - 1), passes, seconds, plain, drafted, accepted)


def own_copy(cost: StepCost) -> StepCost:
    """The same at the reference pace, to be changed freely."""
    return dataclasses.replace(cost, rows=list(cost.rows), seconds=list(cost.seconds), pace=1.0, _curve=None)


class CopyFinder:
    """What could be copied at all, token by token, whether it would pay or not. Owns the memory of all tenants."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory = Memory(memory_bytes, MEMORY_SECONDS)
        self._number = 0

    def run(self, one: Answered, copying: Copying) -> None:
        """Add an answer to `copying`."""
        seq = sequence(f"searched {self._number}", one)
        self._number += 1
        drafters: dict[str, Drafter] = {
            "own": Lookup(SuffixIndex(), one.tenant, frozenset()),
            "memory": Recollection(self._memory),
        }
        for token in one.answer:
            best: tuple[int, bool] | None = None
            for name, drafter in drafters.items():
                proposal = drafter.propose(seq, 1)
                if proposal is not None:
                    found = (proposal.length, proposal.tokens[0] == token)
                    copying.note(name, *found)
                    best = found if best is None or found[0] > best[0] else best
            if best is not None:
                copying.note("both", *best)
            seq.tokens.append(token)
        copying.tokens += len(one.answer)
        self._memory.remember(seq, float(self._number))


def sequence(name: str, one: Answered) -> Sequence:
    """A sequence whose prompt is read."""
    request = Request(id=name, prompt_ids=tuple(one.prompt), params=SamplingParams(), seed=0, tenant=one.tenant)
    seq = Sequence(request, 0, 0, len(one.prompt) + len(one.answer) + LONGEST_DRAFT)
    seq.tally.cached = one.cached
    return seq
