"""The books of the block pool: who holds which block, what it contains, and which one to give up next. No torch."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from obole.types import NamedBlock


class LedgerError(RuntimeError):
    """The books do not balance: a bug in the engine, never the fault of a request."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of blocks: free + cached + in_use = total. Cached blocks can be given up at any time."""

    total: int
    free: int
    cached: int
    in_use: int


class BlockLedger:
    """Block ids 0 to num_blocks - 1, each in one of three states.

    - free: nobody holds it and its contents mean nothing;
    - in use: held `refs[block]` times;
    - cached: nobody holds it, but its contents have a key and may be wanted again.

    Free blocks are handed out first, then the cached one that was let go of longest ago. Every operation on one block is
    O(1). The contents of a block belong to its key from `register` until the block is handed out again or `forget` is called.

    Blocks can be held for a time (`hold`): these are given up after all other cached ones. At most half of all are.

    Where there are tiers below the pool (`watch`), the books also note which blocks were named and which were given up, until
    somebody takes these notes. Nothing has been written to a block given up before the step for which it was handed out.
    """

    __slots__ = (
        "_block_of", "_cached", "_free", "_given_up", "_held", "_named", "_until", "_watched", "key_of", "owner_of", "refs",
    )  # fmt: skip

    def __init__(self, num_blocks: int) -> None:
        self.refs = [0] * num_blocks
        self.key_of: list[bytes | None] = [None] * num_blocks
        self.owner_of = [b""] * num_blocks  # of the blocks with a key: who may have them deleted
        self._block_of: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what was used last is warm in the caches
        self._cached: OrderedDict[int, None] = OrderedDict()  # let go of longest ago first
        self._held: OrderedDict[int, None] = OrderedDict()  # cached too, and held: likewise
        self._until: dict[int, float] = {}  # until when blocks with a key are held, whoever uses them
        self._watched = False
        self._given_up: list[NamedBlock] = []
        self._named: list[NamedBlock] = []

    def watch(self) -> None:
        """From now on, note blocks that are named or given up."""
        self._watched = True

    @property
    def watched(self) -> bool:
        return self._watched

    def take_given_up(self) -> list[NamedBlock]:
        """Contents given up since the last call: still there, until the step is run for which their blocks were handed out."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def take_named(self) -> list[NamedBlock]:
        """Blocks named since the last call; they may have been given up again."""
        named, self._named = self._named, []
        return named

    @property
    def num_blocks(self) -> int:
        return len(self.refs)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._cached) + len(self._held)

    def allocate(self) -> int:
        """Take a block, held once, with no key. Raises `LedgerError` when none is left: ask `available` first."""
        if self._free:
            block = self._free.pop()
        elif self._cached or self._held:
            block = (self._cached or self._held).popitem(last=False)[0]
            self.give_up(block)
        else:
            raise LedgerError(f"All {self.num_blocks} blocks are in use.")
        self.refs[block] = 1
        return block

    def acquire(self, block: int) -> None:
        """Hold a block that is in use or cached once more."""
        if self.refs[block] == 0:
            if self.key_of[block] is None:
                raise LedgerError(f"Block {block} is free: there is nothing in it to share.")
            del (self._held if block in self._until else self._cached)[block]
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """Let go of a block once. The last holder leaves it cached if it has a key, else free.

        A sequence lets go of its last block first, so that its beginning, which more prompts share, is given up last.
        """
        if self.refs[block] == 0:
            raise LedgerError(f"Block {block} is released by somebody who does not hold it.")
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if self.key_of[block] is None:
                self._free.append(block)
            else:
                (self._held if block in self._until else self._cached)[block] = None

    def hold(self, key: bytes, until: float) -> bool:
        """Give up the block with these contents after others, until then. False if there is none, or half of all are held."""
        block = self._block_of.get(key)
        if block is None or (block not in self._until and len(self._until) >= self.num_blocks // 2):
            return False
        if block in self._cached:
            del self._cached[block]
            self._held[block] = None
        self._until[block] = max(until, self._until.get(block, until))
        return True

    def expire(self, now: float) -> None:
        """Blocks that were held until now are cached as any others, and are the next to go. O(1) where none is held."""
        for block in [b for b, until in self._until.items() if until <= now] if self._until else ():
            del self._until[block]
            if block in self._held:
                del self._held[block]
                self._cached[block] = None
                self._cached.move_to_end(block, last=False)

    def register(self, block: int, key: bytes, owner: bytes = b"") -> bool:
        """Name the contents of a block in use. False if another block already goes by that key: this one stays unnamed."""
        if self.refs[block] == 0:
            raise LedgerError(f"Block {block} is in nobody's hands and cannot be named.")
        if self.key_of[block] is not None:
            raise LedgerError(f"Block {block} already has a key.")
        if self._block_of.setdefault(key, block) != block:
            return False
        self.key_of[block] = key
        self.owner_of[block] = owner
        if self._watched:
            self._named.append(NamedBlock(key, owner, block))
        return True

    def give_up(self, block: int) -> None:
        """Take the name off a block that is about to be written, so that its contents are lost to the pool."""
        key = self.key_of[block]
        if key is not None:
            if self._watched:
                self._given_up.append(NamedBlock(key, self.owner_of[block], block))
            self.forget(block)

    def forget(self, block: int) -> None:
        """Take the name off a block, whose contents then mean nothing to anybody else."""
        key = self.key_of[block]
        if key is not None:
            self.key_of[block] = None
            self._until.pop(block, None)
            del self._block_of[key]

    def lookup(self, key: bytes) -> int | None:
        """The block with these contents, in use or cached."""
        return self._block_of.get(key)

    def knows(self, key: bytes) -> bool:
        """Whether some block has these contents."""
        return key in self._block_of

    def forget_owner(self, owner: bytes) -> int:
        """Delete what an owner's blocks contain: cached ones become free, those in use lose their names. Returns how many."""
        found = [b for b, key in enumerate(self.key_of) if key is not None and self.owner_of[b] == owner]
        for block in found:
            if self.refs[block] == 0:
                del (self._held if block in self._until else self._cached)[block]
                self._free.append(block)
            self.forget(block)
        self._given_up = [named for named in self._given_up if named.owner != owner]
        self._named = [named for named in self._named if named.owner != owner]
        return len(found)

    def usage(self) -> Usage:
        free, cached = len(self._free), len(self._cached) + len(self._held)
        return Usage(self.num_blocks, free, cached, self.num_blocks - free - cached)

    def check(self, holdings: Iterable[int] | None = None) -> None:
        """Raise `LedgerError` unless every block is in one state and the books agree.

        `holdings`: the blocks that all holders together think they hold, with repetition; None: not compared.
        """
        free, cached = set(self._free), {*self._cached, *self._held}
        if self._cached.keys() & self._until.keys() or not self._held.keys() <= self._until.keys():
            raise LedgerError("A block is held that is not, or the other way round.")
        held = {b for b, n in enumerate(self.refs) if n > 0}
        if len(free) + len(cached) + len(held) != self.num_blocks or len(free | cached | held) != self.num_blocks:
            raise LedgerError(f"{len(free)} free + {len(cached)} cached + {len(held)} in use are not {self.num_blocks} blocks.")
        if len(free) != len(self._free) or min(self.refs, default=0) < 0:
            raise LedgerError("A block is free twice, or held less than never.")
        named = {key: b for b, key in enumerate(self.key_of) if key is not None}
        if named != self._block_of or len(named) != sum(key is not None for key in self.key_of):
            raise LedgerError("Keys and blocks do not point at each other.")
        if any(self.key_of[b] is not None for b in free) or any(self.key_of[b] is None for b in cached):
            raise LedgerError("A free block has a key, or a cached one has none.")
        if holdings is not None:
            counts = Counter(holdings)
            if any(n != counts[b] for b, n in enumerate(self.refs)):
                raise LedgerError("Blocks are held more or less often than the sequences say.")
