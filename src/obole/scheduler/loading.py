"""Blocks on their way up from RAM or SSD, for sequences that wait for them. No torch, no clock of its own.

A prompt whose beginning is in a lower tier is loaded where that is expected to be quicker than computing it. Its sequence then
owns blocks and takes part in no step. What has come up is laid into them step by step, and named once that step is settled.

Waiting must hardly ever cost more than it saves. With W seconds spent waiting so far, and R(n) what it takes to compute the
last n tokens, a sequence goes on waiting while

    W + R(those that would have to be computed if it stopped waiting now) <= 1.05 R(those that were missing when it began).

So while blocks come up faster than they could be computed, it waits; and a disk that is slow, hangs or fails costs at most 5 %
of the time to the first token. Loads are looked at between steps: while others compute, one that is not worth the length of a
step is not begun, and one that turns out to be bad may cost the rest of a step beside those 5 %.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from obole.cache.managers import KVCacheManager, Place
from obole.cache.spec import StateKind
from obole.cache.tiers.interface import Load, Tiers
from obole.config import BLOCK_SIZE
from obole.types import Sequence, StepPlan, Tier

SLACK = 0.05  # of the time to compute what is missing: what waiting may cost in vain
RETRY_SECONDS = 20.0  # between two loads that are begun against all expectation, to see if the disk has recovered
STEP_BYTES = 64 << 20  # laid into the pool in one step: others wait for that

Recompute = Callable[[int, int], float]  # seconds to compute the tokens [start, end) of a sequence


@dataclass(slots=True)
class Loading:
    """`places[i]` is where block i of the load belongs; `tokens` will be cached when all are there, `found` were before."""

    seq: Sequence
    load: Load
    places: list[Place]
    tokens: int
    found: int
    began: float
    laid: int = 0  # leading blocks that are in the pool, or will be when the step under way has run
    named: int = 0  # of these, those that certainly are
    tiers: list[Tier] = field(default_factory=list)  # of those laid

    def usable(self, ready: int, whole: bool) -> int:
        """Tokens that need not be computed with so many leading blocks. `whole`: a prefix cut short is of no use."""
        if ready == len(self.places):
            return self.tokens
        return self.found if whole else max(self.found, self.places[ready][1] * BLOCK_SIZE)


class Loader:
    """Owns all loads. `block_bytes`: of one block; `recompute`: an estimate."""

    def __init__(self, cache: KVCacheManager, tiers: Tiers, block_bytes: int, recompute: Recompute) -> None:
        self.cache = cache
        self.tiers = tiers
        self.recompute = recompute
        self.loading: dict[Sequence, Loading] = {}
        self.entered: list[Loading] = []  # by the step under way, which reads what they have loaded
        self._step_blocks = max(1, STEP_BYTES // block_bytes)
        self._whole = any(group.kind is not StateKind.FULL for group in cache.groups)
        self._retry = 0.0
        self.planned = 0.0  # when the last step was; the scheduler says so
        self._step_seconds = 0.0  # that it took
        cache.ledger.watch()

    # -- whether ----------------------------------------------------------------------------------------------------------

    def worth(self, seq: Sequence, found: int, now: float, busy: bool) -> int:
        """Tokens that will be cached after a load, if one pays; else 0. `found`: tokens that are cached in the pool.

        `busy`: the step has something to compute, so what does not come from RAM is found ready when that is done.
        """
        tokens = self.cache.match(seq, self.tiers.where)
        if tokens <= found:
            return 0
        keys = self.cache.absent(seq, tokens)
        everything = self.recompute(found, len(seq.tokens))
        slack = SLACK * everything
        seconds, first = self.tiers.seconds(keys), self.tiers.seconds(keys[:1])
        lag = self._step_seconds if busy and seconds > 0 else 0.0
        pays = max(seconds, lag) <= everything - self.recompute(tokens, len(seq.tokens))
        if pays and (seconds if self._whole else first) <= slack:
            return tokens
        if now < self._retry:
            return 0
        self._retry = now + RETRY_SECONDS
        return tokens

    def begin(self, seq: Sequence, places: list[Place], tokens: int, found: int, now: float) -> None:
        """Begin to load the blocks at the places that the sequence holds empty blocks for."""
        load = self.tiers.load([self.cache.key_at(seq, place) for place in places])
        self.loading[seq] = Loading(seq, load, places, tokens, found, now)

    # -- while it lasts ---------------------------------------------------------------------------------------------------

    def lay(self, seq: Sequence, plan: StepPlan) -> None:
        """Have what is ready laid into the blocks of a sequence by the step being planned, as far as that may go."""
        one = self.loading[seq]
        end = min(one.load.ready, one.laid + self._step_blocks - len(plan.promotions))
        for i in range(one.laid, end):
            group, index = one.places[i]
            plan.promotions.append((seq.tables[group][index], one.load.block(i)))
            one.tiers.append(one.load.tier(i))
        one.laid = max(one.laid, end)

    def over(self, seq: Sequence, now: float) -> bool:
        """Whether there is nothing more to wait for: all is laid, or all that comes, or waiting does not pay any longer."""
        one = self.loading[seq]
        if one.laid == len(one.places) or (one.load.over and one.laid == one.load.ready):
            return True
        return self.patience(one, now) <= 0

    def patience(self, one: Loading, now: float) -> float:
        """Seconds for which waiting will pay from now on if nothing more comes."""
        length = len(one.seq.tokens)
        rest = self.recompute(one.usable(one.load.ready, self._whole), length)
        return (1 + SLACK) * self.recompute(one.found, length) - rest - (now - one.began)

    def enter(self, seq: Sequence, plan: StepPlan, now: float) -> int:
        """The load is over: the sequence holds what has come of it, its `num_computed` says how much. Returns the tokens."""
        one = self.loading.pop(seq)
        seq.tally.load_seconds += now - one.began
        blocks = [seq.tables[g][j] for g, j in one.places]
        tokens = self.cache.adopt(seq, one.places[one.laid :])
        held = {block for table in seq.tables for block in table}
        lost = set(blocks) - held
        if lost:
            plan.promotions = [p for p in plan.promotions if p[0] not in lost]
        if seq.tally.cached < 0:
            seq.tally.cached_by_tier = _by_tier(one, [block in held for block in blocks], tokens)
        self.entered.append(one)
        return tokens

    # -- and its end ------------------------------------------------------------------------------------------------------

    def drop(self, seq: Sequence, plan: StepPlan | None) -> None:
        """A sequence is to lose its blocks, whether it loads, or has entered by the `plan` that is being made."""
        one = self.loading.pop(seq, None)
        if one is not None:
            seq.tally.load_seconds += max(0.0, self.planned - one.began)
            one.load.close()
        if plan is not None and plan.promotions:
            lost = {block for table in seq.tables for block in table}
            plan.promotions = [p for p in plan.promotions if p[0] not in lost]

    def lays(self, seq: Sequence) -> bool:
        """Whether the step under way lays blocks into the pool for a sequence."""
        one = self.loading.get(seq)
        return any(other.seq is seq for other in self.entered) if one is None else one.named < one.laid

    def settled(self, now: float) -> None:
        """The step has run: name what it has laid into the pool, and let go of the loads that are over."""
        self._step_seconds = now - self.planned
        self._bury()
        for one in self.loading.values():
            self.cache.name(one.seq, one.places[one.named : one.laid])
            one.named = one.laid
        self._close()

    def abandoned(self) -> list[Sequence]:
        """The step has failed: the sequences with blocks that it may not have filled, which they must not keep."""
        self._bury()
        doubtful = [one.seq for one in self.loading.values() if one.named < one.laid]
        doubtful += [one.seq for one in self.entered]
        self._close()
        return doubtful

    def reset(self) -> None:
        """Let go of everything."""
        self.entered += self.loading.values()
        self.loading.clear()
        self._close()

    def _bury(self) -> None:
        """Let go of the loads of sequences that were cancelled while the step was under way."""
        for seq in [seq for seq in self.loading if seq.dead]:
            self.drop(seq, None)

    def _close(self) -> None:
        for one in self.entered:
            one.load.close()
        self.entered = []


def _by_tier(one: Loading, kept: Iterable[bool], tokens: int) -> dict[Tier, int]:
    """Of `tokens` cached tokens, those in blocks that were loaded and are `kept`, by the slowest tier that one came from."""
    order = list(Tier)
    slowest: dict[int, Tier] = {}
    for (_, index), tier, is_kept in zip(one.places, one.tiers, kept, strict=False):
        if is_kept:
            slowest[index] = max(slowest.get(index, tier), tier, key=order.index)
    counts: dict[Tier, int] = {}
    for index, tier in slowest.items():
        counts[tier] = counts.get(tier, 0) + min(BLOCK_SIZE, tokens - index * BLOCK_SIZE)
    return counts
