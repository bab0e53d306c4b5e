"""The logical cache: which blocks a sequence holds, which it may share, and when it lets go of them. No torch.

To the scheduler these are opaque allocations: it asks for room for tokens and hears yes or no. Between these calls, for
every group g of a sequence that owns blocks:

    tables[g]:  | -1 ... -1 |  blocks with computed tokens  |  blocks for tokens to come  |
    token       0        first_kept                    num_computed                 16 * len(tables[g])

All tables of a sequence have the same length. A block that may be written, i.e. one at or after `num_computed`, is held
once and has no key: `allocate` sees to that, by copying the block or taking its key away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from obole.cache.ledger import BlockLedger, Usage
from obole.cache.prefix import Value, canonical, extend_keys, group_suffix, owner_tag, root_key
from obole.cache.spec import CacheGroup, StateKind
from obole.config import BLOCK_SIZE
from obole.types import Sequence


class StateManager(Protocol):
    """What one kind of layer state needs of a block table; one implementation for each `StateKind`."""

    def first_needed(self, position: int) -> int:
        """First block that computing the token at `position` reads; all later ones are read too."""

    def first_kept(self, computed: int) -> int:
        """First block that a sequence with `computed` tokens still holds."""

    def peak_blocks(self, tokens: int, chunk: int) -> int:
        """Most blocks held at once while `tokens` tokens are computed, at most `chunk` of them in one step."""


@dataclass(frozen=True, slots=True)
class FullManager:
    """Keys and values of every token."""

    def first_needed(self, position: int) -> int:  # noqa: ARG002
        return 0

    def first_kept(self, computed: int) -> int:  # noqa: ARG002
        return 0

    def peak_blocks(self, tokens: int, chunk: int) -> int:  # noqa: ARG002
        return _blocks(tokens)


@dataclass(frozen=True, slots=True)
class SlidingManager:
    """Keys and values of the last `window` tokens: the token at p sees positions p - window + 1 to p."""

    window: int

    def first_needed(self, position: int) -> int:
        return max(0, position - self.window + 1) // BLOCK_SIZE

    def first_kept(self, computed: int) -> int:
        # one position more than the next token needs: a fork computes the last prompt token again
        return max(0, computed - self.window) // BLOCK_SIZE

    def peak_blocks(self, tokens: int, chunk: int) -> int:
        # Blocks are let go of when a block has been filled, so a step that ends at `end` and began `chunk` tokens earlier
        # holds these. The count repeats every 16 tokens, once the window has begun to move.
        return max(
            (_blocks(end) - self.first_kept(max(0, end - chunk) // BLOCK_SIZE * BLOCK_SIZE))
            for end in range(max(1, tokens - BLOCK_SIZE + 1), tokens + 1)
        )


Place = tuple[int, int]  # group, index of a block in the tables of that group
_owner_tag = lru_cache(maxsize=4096)(owner_tag)


def _sliding(group: CacheGroup) -> StateManager:
    if group.window is None or group.window < 1:
        raise ValueError(f"A sliding cache group needs a window of at least 1, not {group.window}.")
    return SlidingManager(group.window)


MANAGERS: dict[StateKind, Callable[[CacheGroup], StateManager]] = {
    StateKind.FULL: lambda _: FullManager(),
    StateKind.SLIDING: _sliding,
}


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


class KVCacheManager:
    """Serves the block tables of sequences, for all cache groups, from one ledger.

    `identity`: everything beside the tokens and the tenant that the contents of a block depend on (digest of the weights,
    KV type, layout version, settings of position embeddings, adapter, shard), as plain data. Block size and groups are
    added here. `chunk`: most tokens of one sequence computed in one step.
    """

    def __init__(
        self, groups: tuple[CacheGroup, ...], num_blocks: int, identity: Value, *, prefix_cache: bool = True, chunk: int
    ) -> None:
        self.groups = groups
        self.managers = tuple(MANAGERS[group.kind](group) for group in groups)
        self.ledger = BlockLedger(num_blocks)
        self.prefix_cache = prefix_cache
        self.chunk = chunk
        layout: list[Value] = [[group.kind.value, group.window, group.layers] for group in groups]
        self.identity = canonical([identity, BLOCK_SIZE, layout])
        self._suffixes = tuple(group_suffix(g) for g in range(len(groups)))
        self._full = tuple(g for g, group in enumerate(groups) if group.kind is StateKind.FULL)
        self._partial = tuple(g for g, group in enumerate(groups) if group.kind is not StateKind.FULL)

    # -- what fits --------------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Blocks that can be had now, cached ones included."""
        return self.ledger.available

    def blocks_needed(self, tokens: int) -> int:
        """Most blocks that a sequence holds at once while its first `tokens` tokens are computed."""
        return sum(manager.peak_blocks(tokens, self.chunk) for manager in self.managers) if tokens > 0 else 0

    def can_ever_hold(self, tokens: int) -> bool:
        """Whether an otherwise empty pool has room to compute `tokens` tokens of one sequence."""
        return self.blocks_needed(tokens) <= self.ledger.num_blocks

    def missing(self, seq: Sequence, tokens: int) -> int:
        """Blocks that the sequence will at most take beside those that it holds, until `tokens` tokens are computed."""
        have = sum(len(table) - table.count(-1) for table in seq.tables)
        chunk = min(self.chunk, tokens - seq.num_computed)
        peak = sum(manager.peak_blocks(tokens, chunk) for manager in self.managers) if chunk > 0 else 0
        return max(0, peak - have) + self._shared_tail(seq)

    # -- prefix hits ------------------------------------------------------------------------------------------------------

    def match(self, seq: Sequence, elsewhere: Callable[[bytes], object] | None = None) -> int:
        """Most leading tokens whose state is cached: whole blocks, and never the last token, which must be computed.

        All groups of full attention must hold all blocks up to there, other groups those that the next token reads. If
        all tokens are cached, the answer is one less than their number, inside the last block. 0 while prompt
        log-probabilities are wanted: they need the logits of every prompt token.

        `elsewhere`: says of a key, by anything but None, that what is not in the pool can be had from a lower tier.
        """
        wants_scores = seq.request.params.prompt_logprobs is not None and len(seq.prompt_logprobs) < seq.prompt_len - 1
        if not self.prefix_cache or wants_scores:
            return 0
        self._extend_keys(seq, len(seq.tokens) // BLOCK_SIZE)
        knows, suffixes, keys = self.ledger.knows, self._suffixes, seq.keys

        def has(g: int, j: int) -> bool:
            key = keys[j] + suffixes[g]
            return knows(key) or (elsewhere is not None and elsewhere(key) is not None)

        return self._longest(len(seq.tokens) // BLOCK_SIZE, len(seq.tokens) - 1, has)

    def _longest(self, count: int, most: int, has: Callable[[int, int], bool]) -> int:
        """Most leading tokens, of `count` full blocks and at most `most`, that are had; `has`: says so of (group, block)."""
        for g in self._full:
            count = next((j for j in range(count) if not has(g, j)), count)
        best = min(count * BLOCK_SIZE, most)
        needed = [(g, self.managers[g].first_needed(best)) for g in self._partial]
        j = _blocks(best) - 1
        while j >= min((first for _, first in needed), default=j + 1):
            if any(j >= first and not has(g, j) for g, first in needed):
                # no longer prefix whose window touches block j can be served: try the one that ends before it
                best = j * BLOCK_SIZE
                needed = [(g, self.managers[g].first_needed(best)) for g in self._partial]
            j -= 1
        return best

    def attach(self, seq: Sequence, tokens: int) -> None:
        """Hold the cached blocks of the first `tokens` tokens, as `match` has just found them; sets `num_computed`."""
        end = _blocks(tokens)
        seq.tables = []
        for manager, suffix in zip(self.managers, self._suffixes, strict=True):
            first = min(manager.first_needed(tokens), end)
            table = [-1] * first
            for key in seq.keys[first:end]:
                block = self.ledger.lookup(key + suffix)
                if block is None:
                    raise RuntimeError("attach asks for more than match has found.")
                self.ledger.acquire(block)
                table.append(block)
            seq.tables.append(table)
        seq.num_computed = tokens
        seq.num_registered = tokens // BLOCK_SIZE

    def reserve(self, seq: Sequence, tokens: int) -> list[Place] | None:
        """Hold blocks for the first `tokens` tokens: those in the pool, and empty ones at the places returned.

        In the order in which a prefix grows. None, with nothing held, if there are not enough. The sequence owns nothing yet
        and has computed nothing; `adopt` ends this state, or `release`.
        """
        seq.tables = [[-1] * _blocks(tokens) for _ in self.groups]
        places = []
        for place in self._places(tokens):
            block = self.ledger.lookup(self.key_at(seq, place))
            if block is None:
                places.append(place)
            else:
                self.ledger.acquire(block)
                seq.tables[place[0]][place[1]] = block
        if len(places) > self.ledger.available:
            self.release(seq)
            return None
        for g, j in places:
            seq.tables[g][j] = self.ledger.allocate()
        return places

    def absent(self, seq: Sequence, tokens: int) -> list[bytes]:
        """Keys of the blocks that the pool lacks for a hit of `tokens` tokens, in the order in which a prefix grows."""
        keys = (self.key_at(seq, place) for place in self._places(tokens))
        return [key for key in keys if not self.ledger.knows(key)]

    def _places(self, tokens: int) -> list[Place]:
        """Places of the blocks that the token after so many needs."""
        end = _blocks(tokens)
        firsts = [min(manager.first_needed(tokens), end) for manager in self.managers]
        return [(g, j) for j in range(end) for g, first in enumerate(firsts) if j >= first]

    def key_at(self, seq: Sequence, place: Place) -> bytes:
        """What the block at a place goes by."""
        return seq.keys[place[1]] + self._suffixes[place[0]]

    def name(self, seq: Sequence, places: Iterable[Place]) -> None:
        """Name blocks whose contents are now what a lower tier had under their keys."""
        if seq.private:
            return
        owner = _owner_tag(seq.request.tenant)
        for place in places:
            block = seq.tables[place[0]][place[1]]
            if self.ledger.key_of[block] is None:
                self.ledger.register(block, self.key_at(seq, place), owner)

    def adopt(self, seq: Sequence, empty: Iterable[Place]) -> int:
        """After `reserve`: go on with the longest prefix that there is; sets `num_computed`. Blocks at places `empty` are so.

        That is what the sequence holds, or what the pool knows by now, if that is more. Blocks without a name are named when
        the sequence is next committed. Returns the tokens.
        """
        missing, tables = set(empty), seq.tables
        end = len(tables[0])

        def has(g: int, j: int) -> bool:
            return j < end and tables[g][j] >= 0 and (g, j) not in missing

        best = self._longest(end, len(seq.tokens) - 1, has)
        known = self.match(seq)
        if known > best:
            self.attach(seq, known)  # before the others are let go of: they may be the same ones
            self._let_go(tables)
            return known
        kept = _blocks(best)
        self._let_go([[-1] * kept + table[kept:] for table in tables])
        seq.tables = [table[:kept] for table in tables]
        seq.num_computed = best
        unnamed = (j for j in range(kept) for t in seq.tables if t[j] >= 0 and self.ledger.key_of[t[j]] is None)
        seq.num_registered = min(next(unnamed, kept), best // BLOCK_SIZE)
        return best

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Let `child`, another answer to the same prompt, share the parent's blocks of all prompt tokens but the last.

        False, with nothing changed, if the parent has not computed them, or holds some of them no longer.
        """
        tokens = child.prompt_len - 1
        end = _blocks(tokens)
        if parent.num_computed < tokens or len(parent.tables) != len(self.groups):
            return False
        firsts = [min(manager.first_needed(tokens), end) for manager in self.managers]
        if any(-1 in table[first:end] for table, first in zip(parent.tables, firsts, strict=True)):
            return False
        child.tables = [[-1] * first + table[first:end] for table, first in zip(parent.tables, firsts, strict=True)]
        for table, first in zip(child.tables, firsts, strict=True):
            for block in table[first:]:
                self.ledger.acquire(block)
        child.num_computed = tokens
        child.num_registered = tokens // BLOCK_SIZE
        child.keys = parent.keys[: child.num_registered]
        return True

    # -- the life of a table ----------------------------------------------------------------------------------------------

    def allocate(self, seq: Sequence, upto: int) -> list[tuple[int, int]] | None:
        """Make room for the tokens [num_computed, upto). None, with nothing changed, if there is not enough.

        Returns the blocks (from, to) to copy, in order, before anything is written: the block in which `num_computed` lies,
        where others hold it or may ask for it. The source of a copy may be handed out again in the same step.
        """
        ledger = self.ledger
        if not seq.tables:
            seq.tables = [[] for _ in self.groups]
        more = max(0, _blocks(upto) - len(seq.tables[0]))
        spare = ledger.available - more * len(seq.tables) - self._shared_tail(seq)
        if spare < 0:
            return None
        copies = []
        tail, offset = divmod(seq.num_computed, BLOCK_SIZE)
        for table in seq.tables:
            if offset:
                block = table[tail]
                # a named block that nobody else holds could be written where it is, but the next one may ask for it
                if ledger.refs[block] > 1 or (ledger.key_of[block] is not None and spare >= len(seq.tables)):
                    table[tail] = ledger.allocate()
                    copies.append((block, table[tail]))
                    ledger.release(block)
                else:
                    ledger.give_up(block)
            table.extend([ledger.allocate() for _ in range(more)])
        return copies

    def commit(self, seq: Sequence) -> None:
        """After `num_computed` has passed a block boundary: name the blocks filled, let go of those behind a window.

        Only computed tokens are named, so a draft that was turned down can never be found later.
        """
        ledger = self.ledger
        full = seq.num_computed // BLOCK_SIZE
        if self.prefix_cache and full > seq.num_registered and not seq.private:
            self._extend_keys(seq, full)
            owner = _owner_tag(seq.request.tenant)
            for table, suffix in zip(seq.tables, self._suffixes, strict=True):
                for j in range(seq.num_registered, full):
                    # those from the pool among blocks that have come up from a lower tier have their names already
                    if table[j] >= 0 and ledger.key_of[table[j]] is None:
                        ledger.register(table[j], seq.keys[j] + suffix, owner)
        seq.num_registered = full
        for g in self._partial:
            table = seq.tables[g]
            j = self.managers[g].first_kept(full * BLOCK_SIZE) - 1
            while j >= 0 and table[j] >= 0:
                ledger.release(table[j])
                table[j] = -1
                j -= 1

    def trim(self, seq: Sequence) -> None:
        """Let go of the blocks behind those of the tokens that there are: they were for a draft that was turned down."""
        kept = _blocks(len(seq.tokens))
        for table in seq.tables:
            for block in table[kept:]:
                self.ledger.release(block)
            del table[kept:]

    def release(self, seq: Sequence) -> None:
        """Let go of all blocks, the last ones of all groups first: a prefix is of use only while every group has it."""
        self._let_go(seq.tables)
        seq.tables = []
        seq.num_registered = 0
        seq.num_computed = 0

    def _let_go(self, tables: list[list[int]]) -> None:
        for j in range(max(map(len, tables), default=0) - 1, -1, -1):
            for table in tables:
                if table[j] >= 0:
                    self.ledger.release(table[j])

    def hold(self, seq: Sequence, tokens: int, until: float) -> tuple[int, list[bytes]]:
        """Keep the full blocks of a sequence's first `tokens` tokens in preference to others, as far as they may be held.

        Returns the tokens so held in the pool, from the first on, and the keys of all these blocks.
        """
        places = [place for place in self._places(tokens // BLOCK_SIZE * BLOCK_SIZE) if place[1] < len(seq.keys)]
        keys = [self.key_at(seq, place) for place in places]
        refused = [j for (_, j), key in zip(places, keys, strict=True) if not self.ledger.hold(key, until)]
        return min([*refused, tokens // BLOCK_SIZE]) * BLOCK_SIZE, keys

    def forget(self, tenant: str) -> int:
        """Delete the contents of a tenant's blocks. Returns how many there were."""
        return self.ledger.forget_owner(_owner_tag(tenant))

    def reset(self) -> None:
        """Forget everything, held blocks included: for when the books cannot be trusted. Nobody may own blocks afterwards."""
        watched = self.ledger.watched
        self.ledger = BlockLedger(self.ledger.num_blocks)
        if watched:
            self.ledger.watch()

    # -- books ------------------------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        return self.ledger.usage()

    def check(self, holders: Iterable[Sequence] | None = None) -> None:
        """Raise `LedgerError` unless the books balance; `holders`: all sequences that own blocks."""
        if holders is None:
            self.ledger.check()
        else:
            self.ledger.check(block for seq in holders for table in seq.tables for block in table if block >= 0)

    def _shared_tail(self, seq: Sequence) -> int:
        """Blocks to copy before the token at `num_computed` can be written."""
        tail, offset = divmod(seq.num_computed, BLOCK_SIZE)
        return sum(self.ledger.refs[table[tail]] > 1 for table in seq.tables) if offset else 0

    def _extend_keys(self, seq: Sequence, count: int) -> None:
        if len(seq.keys) < count:
            root = b"" if seq.keys else root_key(self.identity, seq.request.tenant)
            extend_keys(seq.keys, root, seq.tokens, count)
